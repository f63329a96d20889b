"""Options that several commands share, under llama-server's names where the meaning is the same."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from pyspec.cli import verbose_option
from pyspec.cli.choice import EngineChoice, ModelChoice
from pyspec.cli.fields import option_of
from pyspec.cli.flags import folding, grouped
from pyspec.config import DEVICE, MAX_CTX, MAX_MIB, MODEL, SERVING, SLOTS, EngineSettings
from pyspec.errors import ConfigError
from pyspec.ranges import INT32, SWITCH, Rule, rules_of
from pyspec.registry import (
    DRAFTERS,
    LLAMA_CPP,
    RESERVED,
    SUFFIX,
    added_drafters,
    is_spec_type,
    split_spec_type,
)
from pyspec.request import DEFAULT_SAMPLERS, LETTERS, SAMPLING, SamplingGiven, SamplingParams

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# -- sampling --------------------------------------------------------------------------------------------------------
# The sampling flags, with llama-server's names and defaults.

SAMPLING_RULES = {rule.name: rule for rule in rules_of(SamplingParams)}
BIAS = re.compile(r"(\d+)([+-](?:inf|[0-9.]+(?:e[+-]?\d+)?))", re.IGNORECASE)


def _names(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    names = [name.strip() for name in (value or "").split(";")]
    return None if value is None else tuple(filter(None, names))


def _letters(
    ctx: click.Context,
    param: click.Parameter,
    value: str | None,
) -> tuple[str, ...] | None:
    if value is None:
        return None
    if unknown := sorted(set(value) - LETTERS.keys()):
        known = ", ".join(f"{letter} {name}" for letter, name in LETTERS.items())
        raise click.BadParameter(f"{unknown[0]!r} is no sampler; there are {known}")
    return tuple(LETTERS[letter] for letter in value)


def _breakers(
    ctx: click.Context,
    param: click.Parameter,
    values: tuple[str, ...],
) -> tuple[str, ...] | None:
    return () if "none" in values else values or None


def _biases(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> tuple[tuple[int, float], ...] | None:
    found = []
    for value in values:
        match = BIAS.fullmatch(value)
        if match is None:
            raise click.BadParameter(
                f"want a token id and its bias, such as 15043+1 or 2-inf, got {value!r}"
            )
        found.append((int(match[1]), float(match[2])))
    return tuple(found) or None


def _of_field(rule: Rule) -> Callable[[Any], Any]:
    """The option of a field; its value is None unless it is given, because the model's file may recommend another."""
    if rule.kind is SWITCH:
        return option_of(rule)
    return option_of(rule, default=None, said=f"{rule.default:g}", show_default=False)


_own = grouped(SAMPLING)
SAMPLING_OPTIONS: list[Callable[[Any], Any]] = [
    _own("-n", "--predict", "--n-predict", "n_predict", llama="N_PREDICT", default=-1, type=click.IntRange(-1, INT32),
         help="Most tokens to generate; -1: until the context is full."),
    *(_of_field(rule) for rule in SAMPLING_RULES.values() if rule.flag.words),
    _own("--dry-sequence-breaker", "dry_sequence_breakers", llama="", multiple=True, callback=_breakers,
         help="DRY: text that ends a repetition (instead of the defaults); may be repeated; or none."),
    _own("--samplers", llama="", default=None, callback=_names, metavar="A;B;...", help="Samplers in order, by name."),
    _own("--sampler-seq", "--sampling-seq", "sampler_letters", llama="", default=None, callback=_letters,
         help="Samplers in order, by letter."),
    _own("-l", "--logit-bias", llama="", multiple=True, callback=_biases, metavar="ID+BIAS",
         help="Bias of a token, such as 15043+1; 2-inf bans it."),
]  # fmt: skip


def sampling_of(values: dict[str, Any]) -> SamplingGiven:
    """The sampling flags, removed from a command's values. Raises ConfigError, UsageError."""
    letters = values.pop("sampler_letters")
    if letters is not None and values["samplers"] is not None:
        raise click.UsageError("--samplers and --sampler-seq exclude each other")
    values["samplers"] = letters if values["samplers"] is None else values["samplers"]
    if values["samplers"] == DEFAULT_SAMPLERS:
        values["samplers"] = None
    flags = {p.name: p.opts[0] for p in click.get_current_context().command.params}
    given = {}
    for name, rule in SAMPLING_RULES.items():
        if name in values and (value := values.pop(name)) is not None:
            if flaw := rule.flaw(value, flags[name]):
                raise ConfigError(flaw)
            given[name] = value
    return SamplingGiven(SamplingParams(**given), frozenset(given))


log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


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


def begin_log(level: int = 2) -> None:
    """Log to stderr from now on, more with -v, and begin with `log_ignored`. level: as of `logs.set_up`"""
    from pyspec.cli.logs import set_up

    set_up(4 if click.get_current_context().meta.get("pyspec.verbose") else level)
    log_ignored()


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
    raise click.BadParameter(f"'{value}' is not a drafter of this version; it has {known}{other}")


def _n_slot(ctx: click.Context, param: click.Parameter, value: int) -> int:
    if not value:
        raise click.BadParameter("0 slots answer nothing; want -1 or a whole number from 1 on")
    return value


def _split_mode(ctx: click.Context, param: click.Parameter, value: str) -> None:
    """llama.cpp's flag for several GPUs: checked here, used in `_engine_choice`."""
    ctx.meta["pyspec.split"] = value
    if value in ("layer", "row"):
        why = "the model runs on one device, or its tensors are divided over several (--tp)"
        ctx.meta.setdefault("pyspec.notes", []).append(f"-sm {value} has no effect: {why}")


LEAST_BYTES = 1 << 20  # a smaller number without a unit is one of GiB
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def amount(ctx: click.Context, param: click.Parameter, value: str | None) -> int:
    """Callback of options for memory: bytes of a text such as 24G; 0 if it is not given."""
    if value is None:
        return 0
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", value, re.IGNORECASE)
    n = float(found[1]) * UNITS[found[2].upper()] if found else -1.0
    if found and not found[2] and 0 < n < LEAST_BYTES:
        n *= UNITS["G"]
    if not 1 << 20 <= n < 1 << 50:
        raise click.BadParameter(f"want an amount of memory such as 24G, got {value!r}")
    return int(n)


def _on_off(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """llama-server's other words for on and off."""
    words = {"on": ("enabled", "true", "1"), "off": ("disabled", "false", "0")}
    return next((word for word, same in words.items() if value.lower() in same), value)


def _counted(**words: int) -> Callable[[click.Context, click.Parameter, Any], int]:
    """Callback of whole numbers that have names, too."""

    def read(ctx: click.Context, param: click.Parameter, value: Any) -> int:
        if value in words or re.fullmatch(r"[-+]?\d{1,300}", str(value)):
            return words[value] if value in words else int(value)
        raise click.BadParameter(f"{value!r} is not a whole number or {' or '.join(words)}")

    return read


SPLITS = ("none", "layer", "row", "tensor")
_model, _slots, _device = grouped(MODEL), grouped(SLOTS), grouped(DEVICE)


def device_name(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """A device in pyspec's spelling, or llama.cpp's: CUDA0, none."""
    names = [name.strip() for name in value.split(",")]
    if len(names) > 1:
        raise click.BadParameter(
            f"a model runs on one device, or on the first {len(names)} GPUs with --tp {len(names)}; "
            f"name one of {value!r}"
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
    _model("-m", "--model", llama="MODEL", default="", shell_complete=_complete_model,
           help="GGUF file, or a name from `pyspec models`."),
    _model("-hf", "-hfr", "--hf-repo", llama="HF_REPO", default="", metavar="USER/REPO[:QUANT]",
           help="Hugging Face repository to download from."),
    _model("-hff", "--hf-file", llama="HF_FILE", default="",
           help="File of that repository. Default: Q4_K_M, else Q8_0, else the first; one that fits, if that does not."),
    _model("-hft", "--hf-token", llama="", expose_value=False, callback=_take_token,
           help="Hugging Face token. Default: HF_TOKEN."),
    _model("--look/--no-look", default=True,
           help="Before a download, check by the file's head that the model runs and fits here."),
    _model("--offline", llama="OFFLINE", is_flag=True, expose_value=False, callback=_go_offline,
           help="Use downloaded files only."),
]  # fmt: skip
RULES = {rule.name: rule for rule in rules_of(EngineSettings) if rule.flag.words}
_CHANGES: dict[str, dict[str, Any]] = {
    "np": {"default": -1, "type": click.IntRange(-1), "callback": _n_slot},
    "device": {"callback": device_name},
    "kv_type": {"show_default": False},
    "vram": {"type": click.STRING, "default": None, "callback": amount,
        "help": "Most memory of each GPU that is planned and taken, as 24G. Default: all that is free."},
    "fit": {"type": click.STRING, "callback": _on_off},
    "n_gpu_layers": {"type": click.STRING, "callback": _counted(auto=-1, all=INT32), "show_default": False},
    "draft_n_gpu_layers": {"type": click.STRING, "callback": _counted(auto=-1, all=INT32), "show_default": False},
    "moe_cache_mib": {"type": click.STRING, "callback": _counted(auto=-1), "show_default": False},
    "spec_type": {"callback": _spec_type,
        "help": f"Drafter: auto, none, {', '.join(sorted(DRAFTERS))} or {SUFFIX}; TYPE,{SUFFIX} for both. llama-server's names "
        "(draft-mtp, ngram-simple ...) mean the same."},
}  # fmt: skip
"""What an option does beyond its field: other defaults, and other spellings of values."""


def setting_option(name: str) -> Callable[[F], F]:
    """The option of a field of EngineSettings."""
    return option_of(RULES[name], **_CHANGES.get(name, {}))


ENGINE_OPTIONS: list[Callable[[Any], Any]] = [
    _model("--mmproj-auto/--no-mmproj-auto", " /--no-mmproj", llama="MMPROJ_AUTO", default=True,
           help="With -hf, take the projector beside the model; --no-mmproj: none, whatever names one."),
    _model(
        "-hfd", "-hfrd", "--spec-draft-hf", "--hf-repo-draft", "spec_draft_hf", llama="SPEC_DRAFT_HF_REPO", default="",
        metavar="USER/REPO[:QUANT]", help="Hugging Face repository of the drafter.",
    ),
    _slots("--kv-unified-per-slot", llama="KV_UNIFIED_PER_SLOT", default=0, type=click.IntRange(0, MAX_CTX),
           help="As in llama-server: context size per request; -c is then the size of the pool."),
    _device("-mg", "--main-gpu", llama="MAIN_GPU", default=0, type=click.IntRange(0, 999),
            help="Number of the GPU; -dev takes precedence."),
    _device("--list-devices", llama="", is_flag=True, is_eager=True, expose_value=False, callback=_list_devices,
            help="List the devices and exit."),
    _device(
        "-sm", "--split-mode", llama="SPLIT_MODE", type=click.Choice(SPLITS), default="none", callback=_split_mode,
        expose_value=False,
        help="As in llama-server. tensor: --tp 0 unless --tp is given; the others have no effect.",
    ),
]  # fmt: skip
"""Options of a load besides those of the fields."""
SERVING_OPTIONS = [setting_option(name) for name, rule in RULES.items() if rule.flag.group == SERVING]
"""Options of a load that `pyspec server` alone has."""


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
        draft=values.pop("draft_path", None) or "",
        draft_repo=values.pop("spec_draft_hf", ""),
        look=values.pop("look"),
        mmproj=values.pop("mmproj_auto", True),
    )


def _unless_around(parameter: str, value: str, typed: str) -> str:
    """A typed value; a value from the environment gives way to a typed one of `typed`."""
    source = click.get_current_context().get_parameter_source(parameter)
    is_around = source is ParameterSource.ENVIRONMENT
    return "" if typed and is_around else value


def _is_given(name: str) -> bool:
    """True for an option that was typed, or set in the environment."""
    source = click.get_current_context().get_parameter_source(name)
    return source not in (None, ParameterSource.DEFAULT)


def keys_as_values(settings: dict[str, Any]) -> None:
    """A type of values alone is that of keys, too."""
    if settings["kv_type_v"] and not _is_given("kv_type"):
        settings["kv_type"] = settings["kv_type_v"]


def _engine_choice(values: dict[str, Any], but: Sequence[str]) -> EngineChoice:
    choice = _model_choice(values)
    np, ctx = values.pop("np"), values.pop("ctx")
    settings = {name: values.pop(name) for name in RULES if name in values and name not in but}
    if settings["batch"]:
        settings["ubatch"] = min(settings["ubatch"], settings["batch"])
    if settings["cache_ram"] == -1:
        settings["cache_ram"] = MAX_MIB
    settings["cache_disk"] = settings["cache_disk"] or None
    settings["mmproj"] = (settings["mmproj"] if choice.mmproj else None) or None
    if click.get_current_context().meta.get("pyspec.split") == "tensor" and not _is_given("tp"):
        settings["tp"] = 0
    gpu, of_slot = values.pop("main_gpu"), values.pop("kv_unified_per_slot")
    if gpu and settings["device"] in ("auto", "cuda"):
        settings["device"] = f"cuda:{gpu}"
    if of_slot:
        settings["kv_pool"], ctx = settings["kv_pool"] or ctx, of_slot
    keys_as_values(settings)
    settings["rope_scaling"] = settings["rope_scaling"] or ""
    return EngineChoice(choice=choice, np=np, ctx=ctx, settings=settings)


model_options = folding([*MODEL_OPTIONS, verbose_option], choice=_model_choice)
"""Add MODEL, -m, -hf, -hff and -v to a command; it receives `choice: ModelChoice`."""
sampling_options = folding(SAMPLING_OPTIONS, sampling=sampling_of)
"""Add the sampling flags to a command; it receives `sampling: SamplingGiven` and `n_predict`."""


def engine_options(function: F, but: Sequence[str] = ()) -> F:
    """Add all options of a load to a command; it receives `engine: EngineChoice`. `but`: settings whose options the command defines itself."""
    names = [name for name, rule in RULES.items() if name not in but and rule.flag.group != SERVING]
    options = [*MODEL_OPTIONS, *ENGINE_OPTIONS, *map(setting_option, names), verbose_option]
    return folding(options, engine=partial(_engine_choice, but=but))(function)
