"""Options that several commands share, under llama-server's names where the meaning is the same."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from pyspec.cli import verbose_option
from pyspec.cli.choice import EngineChoice, ModelChoice
from pyspec.cli.fields import option_of
from pyspec.cli.flags import grouped
from pyspec.cli.sampling import SAMPLING_OPTIONS, sampling_of
from pyspec.config import DEVICE, MAX_CTX, MAX_MIB, MODEL, SERVING, SLOTS, EngineSettings
from pyspec.ranges import rules_of
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


def apply(options: Sequence[Callable[[Any], Any]]) -> Callable[[F], F]:
    """One decorator of several, in the order of help."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


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
_model, _slots, _device = grouped(MODEL), grouped(SLOTS), grouped(DEVICE)


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
    "spec_type": {"callback": _spec_type,
        "help": f"Drafter: auto, none, {', '.join(sorted(DRAFTERS))} or {SUFFIX}; TYPE,{SUFFIX} for both. llama-server's names "
        "(draft-mtp, ngram-simple ...) mean the same."},
}  # fmt: skip
"""What an option does beyond its field: other defaults, and other spellings of values."""


def setting_option(name: str) -> Callable[[F], F]:
    """The option of a field of EngineSettings."""
    return option_of(RULES[name], **_CHANGES.get(name, {}))


ENGINE_OPTIONS: list[Callable[[Any], Any]] = [
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


def engine_options(function: F, but: Sequence[str] = ()) -> F:
    """Add all options of a load to a command; it receives `engine: EngineChoice`. `but`: settings whose options the command defines itself."""

    def fold(values: dict[str, Any]) -> None:
        values["engine"] = _engine_choice(values, but)

    names = [name for name, rule in RULES.items() if name not in but and rule.flag.group != SERVING]
    shared = [*ENGINE_OPTIONS, *map(setting_option, names)]
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
        draft=values.pop("draft_path", None) or "",
        draft_repo=values.pop("spec_draft_hf", ""),
        look=values.pop("look"),
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
