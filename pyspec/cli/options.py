"""Options that several commands share, under llama-server's names where the meaning is the same."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from pyspec.cli import verbose_option
from pyspec.cli.choice import EngineChoice, ModelChoice
from pyspec.cli.flags import grouped
from pyspec.cli.sampling import SAMPLING_OPTIONS, sampling_of
from pyspec.config import (
    CPU_ACTIVATIONS,
    DRAFT_HEADS,
    DRAFT_SAMPLINGS,
    KV_TYPES,
    MAX_CTX,
    MAX_MIB,
    PAGE_SIZES,
    ROPE_SCALINGS,
    WEIGHTS,
    EngineSettings,
)
from pyspec.registry import (
    DRAFTERS,
    LLAMA_CPP,
    RESERVED,
    SUFFIX,
    added_drafters,
    is_spec_type,
    split_spec_type,
)

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


class Number(click.FloatRange):
    """A finite number in a range: click accepts NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


SPEC_TYPES = {name: name for name in (*RESERVED, *DRAFTERS)} | {
    LLAMA_CPP.get(name, f"draft-{name}"): name for name in DRAFTERS
}
"""pyspec's spellings and llama.cpp's."""


def spec_type_of(value: str) -> str:
    """pyspec's spelling of a `--spec-type`, which may be no valid one."""
    name, has_suffixes = split_spec_type(value)
    return (
        value if value == SUFFIX else SPEC_TYPES.get(name, name) + (f",{SUFFIX}" if has_suffixes else "")
    )


def apply(options: list[Callable[[F], F]]) -> Callable[[F], F]:
    """One decorator of several, in the order of help."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def log_ignored() -> None:
    """Log the flags and variables that had no effect. Called once logging is set up."""
    for text in click.get_current_context().meta.get("pyspec.warnings", []):
        log.warning("%s", text)
    for text in click.get_current_context().meta.get("pyspec.notes", []):
        log.info("%s", text)


def _spec_type(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if is_spec_type(spec_type_of(value)):
        return spec_type_of(value)
    known = ", ".join((*SPEC_TYPES, *added_drafters(), SUFFIX))
    other = "; of llama.cpp's n-gram drafters that is ngram-simple" if value.startswith("ngram") else ""
    raise click.BadParameter(
        f"'{value}' is not a drafter of this version; it has {known}{other}",
        ctx,
        param,
    )


def _n_slot(ctx: click.Context, param: click.Parameter, value: int) -> int:
    if not value:
        raise click.BadParameter(
            "0 slots answer nothing; want -1 or a whole number from 1 on", ctx, param
        )
    return value


def _split_mode(ctx: click.Context, param: click.Parameter, value: str) -> None:
    """llama.cpp's flag for several GPUs: checked here, used in `_engine_choice`."""
    ctx.meta["pyspec.split"] = value
    if value in ("layer", "row"):
        why = "the model runs on one device, or its tensors are divided over several (--tp)"
        ctx.meta.setdefault("pyspec.notes", []).append(f"-sm {value} has no effect: {why}")


SPLITS = ("none", "layer", "row", "tensor")
_model = grouped("Model")
_slots = grouped("Slots, context and cache")
_device = grouped("Device")
_draft = grouped("Drafts")


def device_name(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """A device in pyspec's spelling, or llama.cpp's: CUDA0, none."""
    names = [name.strip() for name in value.split(",")]
    if len(names) > 1:
        raise click.BadParameter(
            f"a model runs on one device, or on the first {len(names)} GPUs with --tp {len(names)}; "
            f"name one of {value!r}",
            ctx,
            param,
        )
    match = re.fullmatch(r"cuda:?(\d+)", names[0].lower())
    return f"cuda:{match[1]}" if match else {"none": "cpu"}.get(names[0], names[0])


def _list_devices(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        import torch

        click.echo("cpu")
        for i in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(i)
            click.echo(f"cuda:{i}  {about.name}, {about.total_memory / 2**30:.1f} GiB")
        ctx.exit()


def _go_offline(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:  # huggingface_hub reads it at import, which has not happened yet
        os.environ["HF_HUB_OFFLINE"] = "1"


def _take_token(ctx: click.Context, param: click.Parameter, value: str) -> None:
    if value:
        os.environ["HF_TOKEN"] = value


def _complete_model(
    ctx: click.Context,
    param: click.Parameter,
    incomplete: str,
) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    from pyspec.catalog import catalogue

    names = [CompletionItem(name) for name in catalogue() if name.startswith(incomplete)]
    return names or [CompletionItem(incomplete, type="file")]


MODEL_OPTIONS: list[Callable[[Any], Any]] = [
    click.argument("name", metavar="[MODEL]", required=False, default="", shell_complete=_complete_model),
    _model("-m", "--model", default="", shell_complete=_complete_model,
           help="GGUF file, or a name from `pyspec models`."),
    _model("-hf", "-hfr", "--hf-repo", default="", metavar="USER/REPO[:QUANT]",
           help="Hugging Face repository to download from."),
    _model("-hff", "--hf-file", default="",
           help="File of that repository. Default: Q4_K_M, else Q8_0, else the first; one that fits, if that does not."),
    _model("-hft", "--hf-token", expose_value=False, callback=_take_token,
           help="Hugging Face token. Default: HF_TOKEN."),
    _model("--look/--no-look", default=True,
           help="Before a download, check by the file's head that the model runs and fits here."),
    _model("--offline", is_flag=True, expose_value=False, callback=_go_offline,
           help="Use downloaded files only."),
]  # fmt: skip

_rope = grouped("Longer contexts")
ROPE_OPTIONS: list[Callable[[Any], Any]] = [
    _rope("--rope-scaling", type=click.Choice(ROPE_SCALINGS[1:]), default=None,
          help="How positions beyond the trained context are reached. Default, here and below: as the model's file says."),
    _rope("--rope-scale", default=0.0, type=Number(0), help="Factor by which the context becomes longer."),
    _rope("--rope-freq-base", default=0.0, type=Number(0), help="Base of the frequencies."),
    _rope("--rope-freq-scale", default=0.0, type=Number(0), help="1 / --rope-scale."),
    _rope("--yarn-orig-ctx", default=0, type=click.IntRange(0), help="Context that the model was trained for."),
    _rope("--yarn-ext-factor", default=-1.0, type=Number(-1),
          help="Share of YaRN's ramp, 0 to 1. 0: all frequencies are divided."),
    _rope("--yarn-attn-factor", default=-1.0, type=Number(-1),
          help="Multiplies cos and sin. No effect with YaRN, as in llama-server."),
    _rope("--yarn-beta-slow", default=-1.0, type=Number(-1),
          help="Frequencies with fewer turns in the old context are divided."),
    _rope("--yarn-beta-fast", default=-1.0, type=Number(-1),
          help="Frequencies with more turns in the old context stay."),
]  # fmt: skip
THREADS = _device("-t", "--threads", default=0, help="CPU threads. 0 or -1: torch's choice.")
ENGINE_OPTIONS: list[Callable[[Any], Any]] = [
    _model("-md", "--model-draft", "--spec-draft-model", default="", help="GGUF file of a drafter, or of a small model that drafts."),
    _model(
        "-hfd", "-hfrd", "--spec-draft-hf", "--hf-repo-draft", "spec_draft_hf", default="",
        metavar="USER/REPO[:QUANT]", help="Hugging Face repository of the drafter.",
    ),
    _model("-np", "--parallel", "np", default=-1, type=click.IntRange(-1), callback=_n_slot,
           help="Number of slots. -1: 4 in the server, else 1."),
    _model("-c", "--ctx-size", "ctx", default=0,
           help="Context size per request. 0: as much as fits, up to the model's length."),
    *ROPE_OPTIONS,
    _slots("--kv-unified-per-slot", default=0, type=click.IntRange(0, MAX_CTX),
           help="As in llama-server: context size per request; -c is then the size of the pool."),
    _slots("--kv-pool", default=0, help="KV cache size in tokens, for all slots. 0: -np times -c."),
    _slots("--page-size", default=32, type=click.Choice(PAGE_SIZES), help="Tokens per KV page."),
    _slots("--cache-prompt/--no-cache-prompt", "prefix_cache", default=True,
           help="Reuse the KV cache of equal prompt prefixes."),
    _slots("--cache-device", default=0,
           help="Device memory for checkpoints of recurrent states and windows, in MiB. 0: one per slot."),
    _slots("-cram", "--cache-ram", default=8192,
           help="Host memory for more checkpoints, in MiB. -1: no limit."),
    _slots("--cache-disk", default="", metavar="DIR",
           help="Folder where the prefix cache is also kept, for restarts and other servers of this machine."),
    _slots("--cache-disk-size", default=32768, type=click.IntRange(1),
           help="Size of that folder, in MiB."),
    _slots("--checkpoint-every", default=8192,
           help="Tokens between checkpoints in a long prompt. 0: none."),
    _slots("--swa-full", is_flag=True,
           help="Layers with a sliding window keep the whole text."),
    _slots("-b", "--batch-size", "batch", default=0,
           help="Maximum rows per forward while only prompts run. 0: 2048, or -ub on a CPU."),
    _slots("-ub", "--ubatch-size", "ubatch", default=0,
           help="Maximum rows per forward while slots decode. 0: 512, and up to -b as long as a forward takes less than 0.4 s."),
    _slots("--tpot", default=0.0, type=Number(0, 1e6),
           help="Target in milliseconds per output token: prompts leave decoding slots as much time. 0: none."),
    _slots("--ttft", default=0.0, type=Number(0, 1e7),
           help="Target in milliseconds to the first token: goes before --tpot once half of it is over. 0: none."),
    _slots("--prompt-weight", default=1.0, type=Number(0, 1000),
           help="Share of the time that a long prompt gets beside decoding slots: 1 is as much as one of them. 0: no limit."),
    _slots("-ctk", "--cache-type-k", type=click.Choice(KV_TYPES), default=None,
           help="Type of keys [that of values, else f16]."),
    _slots("-ctv", "--cache-type-v", type=click.Choice(KV_TYPES), default=None,
           help="Type of values [that of keys]."),
    THREADS,
    _device("-dev", "--device", default="auto", callback=device_name,
            help="auto, cpu, cuda, cuda:1 ..."),
    _device("-mg", "--main-gpu", default=0, type=click.IntRange(0, 999),
            help="Number of the GPU; -dev takes precedence."),
    _device("--list-devices", is_flag=True, is_eager=True, expose_value=False, callback=_list_devices,
            help="List the devices and exit."),
    _device("--tp", default=1,
            help="Tensor-parallel ranks, each with its own process and GPU. 0: all GPUs."),
    _device(
        "-sm", "--split-mode", type=click.Choice(SPLITS), default="none", callback=_split_mode, expose_value=False,
        help="As in llama-server. tensor: --tp 0 unless --tp is given; the others have no effect.",
    ),
    _device("--weights", type=click.Choice(WEIGHTS), default="auto",
            help="Keep weights packed or unpack them."),
    _device("--cpu-activations", type=click.Choice(CPU_ACTIVATIONS), default="q16",
            help="On CPUs: bits of the rows that packed matrices multiply. q8 is faster and less exact."),
    _device("--warmup/--no-warmup", "warm_up", default=True,
            help="On GPUs, run a few rounds before the first request, or leave that to the first requests."),
    _device("--plain-loop", is_flag=True,
            help="Run rounds one by one, without CUDA graphs: to check a text that looks wrong."),
    _device("--exact", is_flag=True,
            help="Batch-invariant: a row's bits do not depend on other rows. Slows prompts down."),
    _device("--kernels", default="auto", metavar="TIER",
            help="Kernels to use: cuda, triton, reference, or op=tier,... for single ops."),
    _draft("--spec-type", default="auto", callback=_spec_type, metavar="TYPE",
           help=f"Drafter: auto, none, {', '.join(sorted(DRAFTERS))} or {SUFFIX}; TYPE,{SUFFIX} for both. llama-server's names "
           "(draft-mtp, ngram-simple ...) mean the same."),
    _draft("--spec-draft-n-max", "n_draft_max", default=0,
           help="Maximum draft tokens per round. 0: the drafter's default."),
    _draft("--spec-draft-p-min", "--draft-p-min", "draft_p_min", default=0.0,
           help="Stop a draft below this probability."),
    _draft("--spec-draft-type-k", "-ctkd", "--cache-type-k-draft", "draft_kv_type",
           type=click.Choice(KV_TYPES), default=None, help="Type of the drafter's keys [that of -ctk]."),
    _draft("--spec-draft-type-v", "-ctvd", "--cache-type-v-draft", "draft_kv_type_v",
           type=click.Choice(KV_TYPES), default=None,
           help="Type of the drafter's values [that of its keys, or of -ctv]."),
    _draft("--spec-draft-sampling", "draft_sampling", type=click.Choice(DRAFT_SAMPLINGS), default="argmax",
           help="Drafts of sampled requests: the likeliest tokens, or draws from the drafter's distribution."),
    _draft("--draft-head", type=click.Choice(DRAFT_HEADS), default="auto",
           help="Output head for drafts: the target's, or a four-bit copy."),
    _draft("--spec-fixed", "n_draft_fixed", is_flag=True,
           help="Always draft the full length, even if slower."),
    _draft("--spec-ngram-simple-size-n", "ngram_match", default=3,
           help="Tokens that an n-gram must match."),
    _draft("--spec-suffix-n-max", "suffix_n_max", default=15,
           help="Maximum tokens of a suffix draft."),
    _draft("--spec-suffix-min-token-prob", "suffix_min_prob", default=0.1,
           help="End a suffix draft where the product of its probabilities is lower."),
    _draft("--spec-suffix-cache", "suffix_cache", default=64,
           help="MiB of host memory for finished answers that suffix drafts continue. 0: none."),
    _draft("--spec-suffix-share", "suffix_share", is_flag=True,
           help="Let suffix drafts of a client come from other clients' answers."),
    _draft("--spec-synth-len", "synth_len", default=0.0,
           help="For tests: simulate acceptance, as mean tokens per round."),
    _draft(
        "--spec-synth-rates",
        "synth_rates",
        default="",
        metavar="P0,P1,...",
        help="For tests: simulate acceptance, as shares of rounds with 1, 2, ... or more drafts.",
    ),
]  # fmt: skip

OTHERS = frozenset(
    [
        "np",
        "ctx",
        "rope_scaling",
        "cache_disk",
        "kv_type",
        "kv_type_v",
        "draft_path",
        "replicas",
        "queue",
        "hang_timeout",
        "seed",
        "check_tap_shift",
        "demoted",
        "kv_events",
        "kv_events_replay",
        "kv_events_topic",
        "kv_events_format",
        "kv_events_buffer",
    ]
)
"""Settings that `_engine_choice` makes of several options, that a command has options of its own for, and those without any."""
SETTINGS = tuple(f.name for f in fields(EngineSettings) if f.name not in OTHERS)


def folding(function: F, fold: Callable[[dict[str, Any]], None]) -> F:
    """A command whose options are folded into fewer arguments before the call."""
    from functools import wraps

    @wraps(function)
    def folded(**values: Any) -> object:
        fold(values)
        return function(**values)

    return folded  # type: ignore[return-value]  # click calls it by names


def model_options(function: F) -> F:
    """Add MODEL, -m, -hf, -hff and -v to a command; it receives `choice: ModelChoice`."""

    def fold(values: dict[str, Any]) -> None:
        values["choice"] = _model_choice(values)

    return apply([*MODEL_OPTIONS, verbose_option])(folding(function, fold))


def engine_options(function: F, but: Sequence[Callable[[Any], Any]] = ()) -> F:
    """Add all options of a load to a command; it receives `engine: EngineChoice`. `but`: options that the command defines itself."""

    def fold(values: dict[str, Any]) -> None:
        values["engine"] = _engine_choice(values)

    shared = [option for option in ENGINE_OPTIONS if option not in but]
    return apply([*MODEL_OPTIONS, *shared, verbose_option])(folding(function, fold))


def sampling_options(function: F) -> F:
    """Add the sampling flags to a command; it receives `sampling: SamplingGiven` and `n_predict`."""

    def fold(values: dict[str, Any]) -> None:
        values["sampling"] = sampling_of(values)

    return apply(SAMPLING_OPTIONS)(folding(function, fold))


def _model_choice(values: dict[str, Any]) -> ModelChoice:
    name, model, repo = values.pop("name"), values.pop("model"), values.pop("hf_repo")
    if name or model:
        repo = _unless_around("hf_repo", repo, name or model)
        model = _unless_around("model", model, name)
    if name and model:
        raise click.UsageError(f"two models: {name} and -m {model}")
    return ModelChoice(
        model=name or model,
        repo=repo,
        file=values.pop("hf_file"),
        draft=values.pop("model_draft", ""),
        draft_repo=values.pop("spec_draft_hf", ""),
        look=values.pop("look"),
    )


def _unless_around(parameter: str, value: str, typed: str) -> str:
    """A typed value; a value from the environment gives way to a typed one of `typed`."""
    source = click.get_current_context().get_parameter_source(parameter)
    is_around = source is ParameterSource.ENVIRONMENT
    return "" if typed and is_around else value


def _engine_choice(values: dict[str, Any]) -> EngineChoice:
    choice = _model_choice(values)
    settings = {name: values.pop(name) for name in SETTINGS}
    if settings["batch"]:
        settings["ubatch"] = min(settings["ubatch"], settings["batch"])
    if settings["cache_ram"] == -1:
        settings["cache_ram"] = MAX_MIB
    settings["cache_disk"] = values.pop("cache_disk") or None
    context = click.get_current_context()
    was_given = context.get_parameter_source("tp") not in (None, ParameterSource.DEFAULT)
    if context.meta.get("pyspec.split") == "tensor" and not was_given:
        settings["tp"] = 0
    gpu, ctx, of_slot = values.pop("main_gpu"), values.pop("ctx"), values.pop("kv_unified_per_slot")
    if gpu and settings["device"] in ("auto", "cuda"):
        settings["device"] = f"cuda:{gpu}"
    if of_slot:
        settings["kv_pool"], ctx = settings["kv_pool"] or ctx, of_slot
    k, v = values.pop("cache_type_k"), values.pop("cache_type_v")
    settings["rope_scaling"] = values.pop("rope_scaling") or ""
    settings["kv_type"], settings["kv_type_v"] = k or v or "f16", v
    return EngineChoice(choice=choice, np=values.pop("np"), ctx=ctx, settings=settings)
