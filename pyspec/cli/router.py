"""Several models for `pyspec server`: rows of its sources, each with the options of a server of its own."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache, partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyspec.cli.choice import projector_beside
from pyspec.cli.flags import GroupedOption, llama_flags, option_flags
from pyspec.cli.free_memory import card_memory, host_memory
from pyspec.cli.options import EngineChoice
from pyspec.config import EngineSettings
from pyspec.errors import ConfigError
from pyspec.server.models.preset import Preset, Setting
from pyspec.server.models.router import Download, Model, Router
from pyspec.server.models.sources import ListedModel, all_models
from pyspec.server.settings import LISTENING, MODELS, RouterSettings, ServerSettings

if TYPE_CHECKING:
    from pyspec.engine.api import Engine
    from pyspec.engine.plan.apart import LoadNeed, Planner
    from pyspec.engine.protocol import Core

log = logging.getLogger(__name__)

OF_ROUTER = (LISTENING, MODELS, "Logs")
"""Groups of options that a section of a preset can not have: they are the server's."""
ALSO = (
    "--threads-http", "--metrics", "--slots", "--props", "--ui", "--in-process", "--timeout", "--drain-timeout", "--help", "--version",
)  # fmt: skip
HOST_SPARE = 4 << 30  # bytes of the host that are left to other programs, or an eighth of what is free
CACHE_SHARE = 4  # prefix caches of all models together take this part of the host's budget, unless --cache-ram says more


_say = cache(lambda note: log.info("%s", note))  # a flag without effect, once for all models


@dataclass(frozen=True)
class RowOptions:
    """What the options of one model's server come to."""

    engine: EngineChoice
    settings: ServerSettings
    models: RouterSettings
    chat_template: str


@dataclass(frozen=True, kw_only=True)
class RowReader:
    """Makes models of what the sources list.

    command  `pyspec server`, which reads the options; words: those of the command line, which go before a section's
    n_slot   slots where no option has a number
    """

    command: click.Command
    words: Sequence[str]
    options: RouterSettings
    budget: Mapping[str, int]
    planner: Planner
    n_slot: int

    def read(self) -> list[Model]:
        """The models of all sources. Raises ConfigError, with the line of a preset."""
        folder, preset = self.options.models_dir, self.options.models_preset
        found = all_models(Path(folder) if folder else None, Path(preset) if preset else None)
        return [self._model(one) for one in found]

    def _model(self, listed: ListedModel) -> Model:
        preset = listed.preset
        own_words, given = [*listed.words], dict[str, Setting]()
        for setting in listed.flags:
            assert preset is not None
            words = words_of(self.command, setting, preset)
            given |= dict.fromkeys(_all_names(self.command, words[:1]), setting)
            own_words += words
        row = self._row(listed, own_words, given)
        own = listed.own

        def on(key: str, *, usual: bool = False) -> bool:
            return preset.switch(own[key]) if key in own and preset is not None else usual

        parks = on("park", usual=len(self.budget) > 1)  # there is a card
        model = model_of(listed.name, row, self.planner, self.n_slot, self._cache_ram, parks=parks)
        return replace(
            model,
            words=tuple(own_words),
            path=listed.path or model.path,
            source=listed.source,
            pinned=on("pin"),
            starts=on("load-on-startup"),
            parks=parks,
            stop_s=seconds(preset, own["stop-timeout"]) if preset and "stop-timeout" in own else 10.0,
            repo=listed.repo,
            hidden=listed.hidden,
            sees=model.sees or (listed.sees and row.engine.choice.mmproj),
        )

    @property
    def _cache_ram(self) -> int:
        """MiB of one model's prefix cache in host memory."""
        return (self.budget["host"] // CACHE_SHARE // (self.options.models_max or 4)) >> 20

    def _row(self, listed: ListedModel, words: list[str], given: Mapping[str, Setting]) -> RowOptions:
        """given: the lines that gave flags, by all names of these"""

        def error(message: str) -> ConfigError:
            if (preset := listed.preset) is None:
                return ConfigError(f"{listed.name}: {message}")
            flags = re.findall(r"(?<![\w-])--?\w[\w-]*", message)
            line = next((given[name] for name in flags if name in given), None)
            why = f"[{listed.name}]: {message}"
            return ConfigError(f"{preset.path}: {why}") if line is None else preset.error(line.line, why)

        try:
            # click keeps the names
            more: dict[str, Any] = {"obj": RowOptions, "help_option_names": ["-h", "--help"]}
            with self.command.make_context("server", [*words, *self.words], **more) as within:
                row = self.command.invoke(within)
                for note in within.meta.get("pyspec.notes", ()):
                    _say(note)
            assert isinstance(row, RowOptions)
            if listed.flags:  # a file of a folder may be broken: its load says so
                row.engine.choice.check()
                row.engine.check(self.n_slot if row.engine.np <= 0 else 0)
            row.settings.check()
        except click.UsageError as e:
            raise error(e.format_message()) from e
        except ConfigError as e:
            raise error(str(e)) from e
        return row


def model_of(
    name: str,
    row: RowOptions,
    planner: Planner | None,
    n_slot: int,
    cache_ram: int = 0,
    *,
    parks: bool = False,
) -> Model:
    """A model of the options of its server. planner: None for one that is loaded without a plan. parks: it is parked where it would leave"""
    engine = row.engine
    np = engine.np if engine.np > 0 else n_slot

    def pair() -> tuple[Path, EngineSettings]:
        path, settings = engine.plan(np)
        settings = replace(settings, parks=parks and settings.tp < 2 and settings.replicas == 1)
        if cache_ram and settings.cache_ram == EngineSettings().cache_ram:
            settings = replace(settings, cache_ram=min(cache_ram, settings.cache_ram))
        return path, settings

    def plan(budget: Mapping[str, int]) -> LoadNeed:
        from pyspec.engine.plan.apart import LoadNeed

        path, settings = pair()
        return (
            planner.need(path, settings, budget) if planner is not None else LoadNeed({}, settings.ctx)
        )

    def load(need: LoadNeed, begun: Callable[[Core], None]) -> Engine:
        from pyspec.engine.api import Engine

        path, settings = pair()
        settings = replace(settings, ctx=need.n_ctx)
        loaded = Engine.from_settings(path, settings, isolated=True, begun=begun)
        try:
            if row.chat_template:
                loaded.use_template(row.chat_template)
        except BaseException:
            loaded.close(0.0)
            raise
        return loaded

    choice = engine.choice
    return Model(
        name=name,
        sees=bool(engine.settings["mmproj"]),
        plan=plan,
        load=load,
        settings=replace(row.settings, aliases=tuple(dict.fromkeys((name, *row.settings.aliases)))),
        path=str(Path(choice.model).absolute()) if choice.model and Path(choice.model).is_file() else "",
        idle_s=float(row.models.sleep_idle),
    )


def words_of(command: click.Command, setting: Setting, preset: Preset) -> list[str]:
    """A line of a preset as words of the command line. Raises ConfigError with its line."""
    key, own, others = setting.key, option_flags(command), llama_flags()
    by_variable = {
        v: p.opts[0] for p in own.values() for v in (p.envvar if isinstance(p.envvar, list) else ())
    }
    by_variable |= {flag.env: flag.names[0] for flag in others.values() if flag.env}
    named = by_variable.get(key)
    name = next((n for n in (named, f"--{key}", f"-{key}") if n in own or n in others), None)
    if name is None:
        near = get_close_matches(f"--{key}", [*own, *others], 1, 0.7)
        hint = f"; did you mean {near[0].lstrip('-')}?" if near else ""
        raise preset.error(setting.line, f"no flag is called {setting.key!r}{hint}")
    option = own.get(name)
    if option is None:
        flag = others[name]
        if flag.n_value:
            return [name, *(setting.value.split() if flag.n_value > 1 else [setting.value])]
        return [name] if preset.switch(setting) else []
    of_router = (
        isinstance(option, GroupedOption) and option.group in OF_ROUTER and option.name != "sleep_idle"
    )
    if of_router or {*ALSO} & {*option.opts}:
        raise preset.error(
            setting.line, f"{setting.key} belongs to the server: give it on the command line"
        )
    if not option.is_flag:
        return [f"{name}={setting.value}"] if name.startswith("--") else [name, setting.value]
    is_on = preset.switch(setting) == (name in option.opts)
    names = option.opts if is_on else option.secondary_opts
    return names[:1]


def _all_names(command: click.Command, words: Sequence[str]) -> list[str]:
    """All names of the flag that a word of the command line gives."""
    name = next((word.partition("=")[0] for word in words), "")
    option = option_flags(command).get(name)
    return [name] if option is None else [*option.opts, *option.secondary_opts]


def seconds(preset: Preset, setting: Setting) -> float:
    """A line's number of seconds. Raises ConfigError."""
    with suppress(ValueError):
        if 0 <= (found := float(setting.value)) < inf:
            return min(86400.0, found)
    raise preset.error(setting.line, f"{setting.key} is {setting.value!r}; want seconds, 0 or more")


def budget_of(options: RouterSettings, vram: int = 0) -> dict[str, int]:
    """Bytes for all models together, by place. vram: most of each GPU, 0: all"""
    free = host_memory()
    host = options.host_memory or max(0, free - min(HOST_SPARE, free // 8))
    return {"host": host} | cards_of(options, vram, {})


def cards_of(options: RouterSettings, vram: int, used: Mapping[str, int]) -> dict[str, int]:
    """The budgets of GPUs beside models that use `used`: other programs come and go."""
    margin, most = options.memory_margin << 20, vram or 1 << 60
    return {
        place: max(0, min(most, free + used.get(place, 0) - margin))
        for place, free in card_memory().items()
    }


def router_of(
    command: click.Command,
    words: Sequence[str],
    settings: ServerSettings,
    options: RouterSettings,
    engine: EngineChoice,
    n_slot: int,
) -> Router:
    """The router of `pyspec server` without a model. Raises ConfigError for sources that can not be used."""
    from pyspec.engine.plan.apart import Planner
    from pyspec.engine.process.ahead import start_ahead

    vram = int(str(engine.settings["vram"]))
    budget, planner = budget_of(options, vram), Planner()
    rows = RowReader(
        command=command, words=words, options=options, budget=budget, planner=planner, n_slot=n_slot
    )
    router = Router(
        rows.read, settings, options, budget,
        measure=partial(cards_of, options, vram) if len(budget) > 1 else None,
        ahead=start_ahead, closing=planner.close, find=find, erase=erase,
    )  # fmt: skip
    said = ", ".join(f"{place} {n / 2**30:.1f} GiB" for place, n in budget.items())
    log.info("%d models; for all of them together: %s", len(router.names), said)
    return router


def find(name: str) -> Download:
    """The files of USER/REPO:QUANT, with the drafter and the projector that a load would take. Raises DownloadError, ConfigError."""
    from pyspec.engine.named import find_sidecar
    from pyspec.hub import Repository, split_name

    repo, quant = split_name(name)
    there = Repository.open(repo)
    chosen = there.choose(quant)

    def fetch() -> None:
        path = str(there.fetch(chosen)[0])
        find_sidecar(name, "", path, "auto")
        projector_beside(name, "", path)

    return Download(there.sizes(), fetch)


def erase(repo: str, file: str) -> None:
    """Delete a file of a repository, with its other parts, from the cache of downloads; without a file, unfinished downloads."""
    from pyspec.hub.cache import cached_repositories, drop_unfinished
    from pyspec.hub.names import SHARD

    if not file:
        drop_unfinished(repo)
    for repository in cached_repositories():
        for one in repository.files if repository.name == repo else ():
            if one.file == file:
                shard = SHARD.match(one.path.name)
                parts = one.path.parent.glob(f"{shard[1]}-*-of-{shard[3]}.gguf") if shard else [one.path]
                for path in list(parts):
                    path.resolve().unlink(missing_ok=True)
                    path.unlink(missing_ok=True)


def alone(name: str, row: RowOptions, settings: ServerSettings, engine: Engine) -> Router:
    """One model that is loaded already, and is unloaded while it is idle."""
    from pyspec.engine.plan.apart import LoadNeed

    n_slot = engine.info.n_slot // int(row.engine.settings["replicas"])  # type: ignore[call-overload]  # a whole number
    model = model_of(name, row, None, n_slot)
    router = Router(lambda: [model], settings, row.models, {}, alone=True)
    router.adopt(name, engine, LoadNeed({}, engine.info.n_ctx))
    return router


def describe(router: Router, urls: list[str]) -> list[str]:
    """A few lines for people, when requests are accepted."""
    listed: list[Any] = router.names
    return [
        f"models   {len(listed)}: {', '.join(listed[:6])}{' ...' if len(listed) > 6 else ''}",
        f"memory   {', '.join(f'{place} {n / 2**30:.1f} GiB' for place, n in router.table.budget.items())}",
        f"url      {urls[0]}  (OpenAI API at {urls[0]}/v1)",
        *(f"         {url}" for url in urls[1:]),
    ]
