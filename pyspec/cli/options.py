"""Options that several commands share, with llama-server's names where the meaning is the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pyspec.cli import verbose_option
from pyspec.config import DRAFT_HEADS, KV_TYPES, PAGE_SIZES, WEIGHTS, settings_from
from pyspec.errors import ConfigError
from pyspec.ranges import INT32, rules_of
from pyspec.registry import DRAFTERS, WHETHER, added_drafters, is_spec_type
from pyspec.request import SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

    from pyspec.config import EngineSettings
    from pyspec.engine.api import Engine

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


class Number(click.FloatRange):
    """A finite number in a range: click lets NaN through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not isfinite(number):
            self.fail(f"{value} is no finite number.", param, ctx)
        return number


LLAMA_CPP = {"ngram": "ngram-simple"}  # spelling of a drafter where it is not draft-NAME
SPEC_TYPES = {name: name for name in (*WHETHER, *DRAFTERS)} | {
    LLAMA_CPP.get(name, f"draft-{name}"): name for name in DRAFTERS
}
"""Our spellings and llama.cpp's."""

REMOVED = {
    ("--draft", "--draft-n", "--draft-max"): "--spec-draft-n-max",
    ("--draft-min", "--spec-draft-n-min"): "",
    ("--draft-p-min",): "--spec-draft-p-min",
    ("--spec-ngram-size-n",): "--spec-ngram-simple-size-n",
    ("--spec-ngram-size-m", "--spec-ngram-min-hits"): "",
}
"""Flags that are gone from llama.cpp, and what to type now; "" if nothing takes their place."""

IGNORED = {
    ("-ngl", "--n-gpu-layers", "--gpu-layers"): "the whole model runs on one device (--device)",
    ("-ngld", "--spec-draft-ngl"): "the drafter runs where the target does",
    ("-fa", "--flash-attn"): "attention is chosen per device",
}
"""Flags of llama-server that take a value and change nothing here, with the reason that is logged."""

IGNORED_SWITCHES = {
    ("-cb", "--cont-batching"): "slots are always batched together",
    ("--jinja",): "the model's template is always used",
}


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """What the user wants loaded, before any of it is looked up."""

    model: str = ""
    repo: str = ""
    file: str = ""
    draft: str = ""
    draft_repo: str = ""

    def target(self) -> str:
        """A path or a catalogue name; downloaded first with -hf. Raises ConfigError, DownloadError."""
        if bool(self.model) == bool(self.repo):
            what = "-m and -hf exclude each other" if self.model else "which model? give a GGUF file, a name, or -hf"
            raise ConfigError(f"{what}; `pyspec models` lists names")
        if self.file and not self.repo:
            raise ConfigError("-hff names a file of a repository: give that with -hf")
        return str(_from_hub(self.repo, self.file)) if self.repo else self.model

    def drafter(self) -> str:
        """A path, or "auto" if none was named. Raises ConfigError, DownloadError."""
        if self.draft and self.draft_repo:
            raise ConfigError("-md and -hfd exclude each other")
        if self.draft_repo:
            return str(_from_hub(self.draft_repo, "", drafter=True))
        if not self.draft:
            return "auto"
        from pyspec.catalog import resolve

        return str(resolve(self.draft)[0])


def _from_hub(name: str, file: str, *, drafter: bool = False) -> str:
    from pyspec.hub import from_hub, split_name

    repo, quant = split_name(name)
    return str(from_hub(repo, quant, file, drafter=drafter))


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """The engine as the user typed it; names of EngineSettings where they are the same."""

    choice: ModelChoice
    np: int
    ctx: int
    settings: Mapping[str, object]

    def check(self, np: int = 0) -> None:
        """Raise ConfigError for settings that mean nothing, before the seconds that torch's import takes."""
        settings_from({"np": np or self.np, "ctx": self.ctx, **self.settings})

    def load(self, np: int = 0, *, isolated: bool = False) -> Engine:
        """Load it, with `np` slots if given, and in a process of its own if `isolated`. Raises PyspecError."""
        target, draft, values = self._looked_up(np)
        from pyspec.engine.api import Engine

        return Engine.open(target, draft, values, isolated=isolated)

    def plan(self, np: int = 0) -> tuple[Path, EngineSettings]:
        """The target's file and the settings that `load` would have. Raises PyspecError."""
        found = self._looked_up(np)
        from pyspec.engine.api import pair_of

        return pair_of(*found)

    def _looked_up(self, np: int) -> tuple[str, str, dict[str, object]]:
        from pyspec.catalog import resolve

        target, draft = self.choice.target(), self.choice.drafter()
        if self.choice.repo and draft == "auto":
            from pyspec.cli.beside import drafter_beside

            draft = drafter_beside(self.choice.repo, self.choice.file, target, str(self.settings["spec_type"]))
        resolve(target)
        self.check(np)
        return target, draft, {"np": np or self.np, "ctx": self.ctx, **self.settings}


def apply(options: list[Callable[[F], F]]) -> Callable[[F], F]:
    """One decorator out of several, in the order in which help shows them."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _removed(flags: tuple[str, ...], new: str) -> Callable[[F], F]:
    def refuse(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
        if value is not None:
            hint = f"use {new}" if new else "the draft length is found while running"
            raise click.UsageError(f"{flags[0]} is not a flag any more; {hint}", ctx)

    name = flags[0].lstrip("-").replace("-", "_") + "_removed"
    return click.option(*flags, name, hidden=True, expose_value=False, callback=refuse)


def _ignored(flags: tuple[str, ...], why: str, is_flag: bool) -> Callable[[F], F]:
    def note(ctx: click.Context, param: click.Parameter, value: object) -> None:
        if value:
            ctx.meta.setdefault("pyspec.notes", []).append(f"{flags[0]} changes nothing: {why}")

    name = flags[-1].lstrip("-").replace("-", "_") + "_ignored"
    text = f"Accepted, changes nothing: {why}."
    if is_flag:
        return click.option(*flags, name, is_flag=True, expose_value=False, callback=note, help=text)
    return click.option(*flags, name, expose_value=False, callback=note, metavar="X", help=text)


def tell_ignored() -> None:
    """Log which flags changed nothing. Called once logging is set up."""
    for text in click.get_current_context().meta.get("pyspec.notes", []):
        log.info("%s", text)


def _spec_type(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if value in SPEC_TYPES or is_spec_type(value):
        return SPEC_TYPES.get(value, value)
    known = ", ".join((*SPEC_TYPES, *added_drafters()))
    raise click.BadParameter(f"'{value}' is not a drafter of this version; it has {known}", ctx, param)


MODEL_OPTIONS: list[Callable[[Any], Any]] = [
    click.argument("name", metavar="[MODEL]", required=False, default=""),
    click.option("-m", "--model", default="", help="GGUF file, or a name from `pyspec models`."),
    click.option("-hf", "--hf-repo", default="", metavar="USER/REPO[:QUANT]", help="Download from Hugging Face."),
    click.option(
        "-hff", "--hf-file", default="", help="File of that repository; without it Q4_K_M, Q8_0, or the first."
    ),
]

ENGINE_OPTIONS: list[Callable[[Any], Any]] = [
    click.option("-md", "--model-draft", "--spec-draft-model", default="", help="Drafter's GGUF file."),
    click.option("-hfd", "--spec-draft-hf", default="", metavar="USER/REPO[:QUANT]", help="Drafter to download."),
    click.option(
        "-np", "--parallel", "np", default=-1, type=click.IntRange(-1), help="Slots. Default: 4 in the server, else 1."
    ),
    click.option("-c", "--ctx-size", "ctx", default=0, help="Tokens one request may hold. 0: the model's, up to 8192."),
    click.option("--kv-pool", default=0, help="Tokens of all slots together. 0: -np times -c."),
    click.option("--page-size", default=32, type=click.Choice(PAGE_SIZES), help="Tokens of one KV page."),
    click.option(
        "--cache-prompt/--no-cache-prompt", "prefix_cache", default=True, help="Keep prompts for requests like them."
    ),
    click.option("--cache-device", default=0, help="MiB on the device for recurrent checkpoints. 0: one per slot."),
    click.option("-cram", "--cache-ram", default=8192, help="MiB of host memory for those that do not fit there."),
    click.option("--checkpoint-every", default=8192, help="Tokens between checkpoints in a long prompt. 0: none."),
    click.option(
        "-b", "--batch-size", "batch", default=0, help="Rows of a forward of prompts. 0: 2048, or -ub on a CPU."
    ),
    click.option("-ub", "--ubatch-size", "ubatch", default=512, help="Rows of a forward in which somebody decodes."),
    click.option(
        "-ctk", "--cache-type-k", type=click.Choice(KV_TYPES), default=None, help="Type of keys and values [f16]."
    ),
    click.option("-ctv", "--cache-type-v", type=click.Choice(KV_TYPES), default=None, help="The same as -ctk."),
    click.option("-t", "--threads", default=0, help="CPU threads. 0 or -1: as torch chooses."),
    click.option("-dev", "--device", default="auto", help="auto, cpu, cuda, cuda:1 ..."),
    click.option("--weights", type=click.Choice(WEIGHTS), default="auto", help="Keep weights packed or unpack them."),
    click.option("--warmup/--no-warmup", "warm_up", default=True, help="Run a few rounds before the first request."),
    click.option(
        "--plain-loop", is_flag=True, help="One round after the other, no CUDA graphs: try it when a text looks wrong."
    ),
    click.option(
        "--spec-type", default="auto", callback=_spec_type, metavar="TYPE", help=f"One of {', '.join(SPEC_TYPES)}."
    ),
    click.option("--spec-draft-n-max", "n_draft_max", default=0, help="Most drafted tokens a round. 0: the drafter's."),
    click.option("--spec-draft-p-min", "draft_p_min", default=0.0, help="Stop a draft below this probability."),
    click.option(
        "--draft-head",
        type=click.Choice(DRAFT_HEADS),
        default="auto",
        help="Head that drafts share: the target's, or a four-bit copy for them alone.",
    ),
    click.option("--spec-fixed", "n_draft_fixed", is_flag=True, help="Always draft that many, whatever it costs."),
    click.option("--spec-ngram-simple-size-n", "ngram_match", default=3, help="Tokens an n-gram must match."),
    click.option("--spec-synth-len", "synth_len", default=0.0, help="Make acceptance up: mean tokens a round."),
    *[_ignored(flags, why, False) for flags, why in IGNORED.items()],
    *[_ignored(flags, why, True) for flags, why in IGNORED_SWITCHES.items()],
    *[_removed(flags, new) for flags, new in REMOVED.items()],
]

SAMPLING_OPTIONS: list[Callable[[Any], Any]] = [
    click.option("--temp", "temperature", default=None, type=float, help="Temperature; 0 is greedy."),
    click.option("--top-k", default=None, type=int, help="Keep the k best tokens; 0 keeps all."),
    click.option("--top-p", default=None, type=float, help="Keep this much probability; 1 keeps all."),
    click.option("--min-p", default=None, type=float, help="Drop tokens below this share of the best; 0 keeps all."),
    click.option("--typical", "typical_p", default=None, type=float, help="Locally typical sampling; 1 keeps all."),
    click.option("--repeat-penalty", default=None, type=float, help="1 is off."),
    click.option("--presence-penalty", default=None, type=float, help="0 is off."),
    click.option("--frequency-penalty", default=None, type=float, help="0 is off."),
    click.option("-s", "--seed", default=-1, help="Seed of the draw; -1 takes a new one."),
    click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-generation token."),
    click.option(
        "-n",
        "--predict",
        "--n-predict",
        "n_predict",
        default=-1,
        type=click.IntRange(-1, INT32),
        help="Most tokens to generate; -1: no limit.",
    ),
]

SETTINGS = (
    "kv_pool",
    "page_size",
    "batch",
    "ubatch",
    "prefix_cache",
    "cache_device",
    "cache_ram",
    "checkpoint_every",
    "threads",
    "device",
    "weights",
    "spec_type",
    "n_draft_max",
    "draft_p_min",
    "draft_head",
    "n_draft_fixed",
    "ngram_match",
    "synth_len",
    "warm_up",
    "plain_loop",
)


def grouped(function: F, fold: Callable[[dict[str, Any]], None]) -> F:
    """A command whose options are folded into fewer values before it is called."""
    from functools import wraps

    @wraps(function)
    def folded(**values: Any) -> object:
        fold(values)
        return function(**values)

    return folded  # type: ignore[return-value]


def model_options(function: F) -> F:
    """Give a command MODEL, -m, -hf, -hff and -v; it receives `choice: ModelChoice`."""

    def fold(values: dict[str, Any]) -> None:
        values["choice"] = _model_choice(values)

    return apply([*MODEL_OPTIONS, verbose_option])(grouped(function, fold))


def engine_options(function: F) -> F:
    """Give a command everything a load needs; it receives `engine: EngineChoice`."""

    def fold(values: dict[str, Any]) -> None:
        values["engine"] = _engine_choice(values)

    return apply([*MODEL_OPTIONS, *ENGINE_OPTIONS, verbose_option])(grouped(function, fold))


def sampling_options(function: F) -> F:
    """Give a command the sampling flags; it receives `sampling: SamplingParams` and `n_predict`."""

    def fold(values: dict[str, Any]) -> None:
        flags = {p.name: p.opts[0] for p in click.get_current_context().command.params}
        given = {}
        for rule in rules_of(SamplingParams):
            if rule.name in values and (value := values.pop(rule.name)) is not None:
                if flaw := replace(rule, title=flags[rule.name]).flaw(value):
                    raise ConfigError(flaw)
                given[rule.name] = value
        values["sampling"] = SamplingParams(**given)

    return apply(SAMPLING_OPTIONS)(grouped(function, fold))


def _model_choice(values: dict[str, Any]) -> ModelChoice:
    name, model = values.pop("name"), values.pop("model")
    if name and model:
        raise click.UsageError(f"two models: {name} and -m {model}")
    return ModelChoice(
        model=name or model,
        repo=values.pop("hf_repo"),
        file=values.pop("hf_file"),
        draft=values.pop("model_draft", ""),
        draft_repo=values.pop("spec_draft_hf", ""),
    )


def _engine_choice(values: dict[str, Any]) -> EngineChoice:
    choice = _model_choice(values)
    settings = {name: values.pop(name) for name in SETTINGS}
    if settings["batch"]:
        settings["ubatch"] = min(settings["ubatch"], settings["batch"])
    k, v = values.pop("cache_type_k"), values.pop("cache_type_v")
    if k and v and k != v:
        raise click.UsageError(f"-ctk {k} and -ctv {v} must be the same type")
    settings["kv_type"] = k or v or "f16"
    return EngineChoice(choice=choice, np=values.pop("np"), ctx=values.pop("ctx"), settings=settings)
