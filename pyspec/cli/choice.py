"""The model that the user named: looked up, checked and loaded from here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from pyspec import progress
from pyspec.config import settings_from
from pyspec.errors import ConfigError, DoesNotFit

if TYPE_CHECKING:
    from pyspec.config import EngineSettings
    from pyspec.engine.api import Engine
    from pyspec.engine.named import Named
    from pyspec.engine.plan.look_apart import HeadsRead
    from pyspec.hub import Repository
    from pyspec.hub.heads import Seen

    PairOf = Callable[[], tuple[Path, EngineSettings]]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """The model as named by the user, before any lookup.

    seen  entity tags of the files whose heads were read: others are not downloaded
    """

    model: str = ""
    repo: str = ""
    file: str = ""
    draft: str = ""
    draft_repo: str = ""
    look: bool = True  # check the head of a remote file before downloading it
    mmproj: bool = True  # take the projector beside a model of `repo`, if none is named
    seen: Seen = field(default_factory=dict)

    @property
    def named(self) -> str:
        """The name as typed."""
        return self.model or self.repo

    @property
    def name(self) -> Named:
        """The name for a look."""
        from pyspec.engine.named import Named

        return Named(self.model, self.repo, self.file)

    def check(self) -> None:
        """Raise ConfigError for an impossible choice: no model or two, a missing file, an unknown name. Uses no network."""
        from pyspec.catalog import lookup
        from pyspec.hub import split_name

        if bool(self.model) == bool(self.repo):
            what = "no model given: want a GGUF file, a name, or -hf"
            what = "-m and -hf exclude each other" if self.model else what
            raise ConfigError(f"{what}; `pyspec models` lists names")
        self._check_beside()
        for repo in filter(None, (self.repo, self.draft_repo)):
            split_name(repo)
        for named in filter(None, (self.model, self.draft)):
            lookup(named)

    def check_unnamed(self) -> None:
        """Raise ConfigError for files that go with a model, where none is named."""
        self._check_beside()
        if self.draft or self.draft_repo:
            raise ConfigError(
                "a drafter goes with a model: name the model, or put both into a section of --models-preset"
            )

    def _check_beside(self) -> None:
        if self.file and not self.repo:
            raise ConfigError("-hff names a file of a repository: name the repository with -hf")
        if self.draft and self.draft_repo:
            raise ConfigError("-md and -hfd exclude each other")

    def is_here(self) -> bool:
        """True if nothing needs a download: local files and packaged models. Call `check` first."""
        from pyspec.catalog import Entry, lookup

        found = [lookup(named) for named in filter(None, (self.model, self.draft))]
        entries = [entry for entry in found if isinstance(entry, Entry)]
        is_packaged = all(e.target is not None and e.target.packaged for e in entries)
        return not (self.repo or self.draft_repo) and is_packaged

    def locate(self) -> None:
        """Find remote files in their repositories' lists, so that a missing network, name or quantisation is reported within a second and without
        torch. Call `check` first. Raises DownloadError, ConfigError."""
        from pyspec.catalog import Entry, lookup
        from pyspec.hub import Repository, split_name

        for named in filter(None, (self.model, self.draft)):
            if isinstance(entry := lookup(named), Entry) and entry.target is not None:
                entry.target.locate()
        for name, is_drafter in ((self.repo, False), (self.draft_repo, True)):
            if name:
                repo, quant = split_name(name)
                file = "" if is_drafter else self.file
                Repository.open(repo).choose(quant, file, drafter=is_drafter)

    def look_before(self, plan: PairOf, *, apart: bool = False) -> ModelChoice:
        """Refuse a remote model that does not run or fit here, by the heads of its files, before the download. Raises PyspecError.

        Returns the model to load: with another quantisation, where none was named and only another one fits.

        plan   the target's file and the settings of the load
        apart  check in a separate process; `plan` is pickled
        """
        found = self.looked(plan, apart=apart)
        if found.advice and not found.quant:
            raise DoesNotFit(f"{found.advice}. Nothing was downloaded; --no-look downloads it anyway")
        return self.after(found)

    def after(self, found: HeadsRead) -> ModelChoice:
        """The model to load after a look; says so if it is another one."""
        if not found.quant:
            return replace(self, seen=found.seen)
        log.warning("%s", found.advice)
        other = self.name.with_quant(found.quant)
        if self.model:
            return replace(self, model=other, seen=found.seen)
        return replace(self, repo=other.removeprefix("-hf "), seen=found.seen)

    def looked(self, plan: PairOf, *, apart: bool = False) -> HeadsRead:
        """What the heads of a remote model's files say. Raises PyspecError for one that does not run."""
        from pyspec.engine.plan.look_apart import HeadsRead, looked

        self.check()
        if not self.look or self.is_here():
            return HeadsRead()
        progress.report("head of the file")
        self.locate()
        return looked(plan, self.name, apart=apart)

    def target(self) -> str:
        """A path or a catalogue name; with -hf, downloaded first. Raises ConfigError, DownloadError."""
        from pyspec.hub import expecting

        self.check()
        with expecting(self.seen):
            return str(_from_hub(self.repo, self.file)) if self.repo else self.model

    def drafter(self) -> str:
        """A path, or "auto" if none was named. Raises ConfigError, DownloadError."""
        if self.draft_repo:
            return str(_from_hub(self.draft_repo, "", drafter=True))
        if not self.draft:
            return "auto"
        from pyspec.catalog import resolve

        return str(resolve(self.draft)[0])

    def pair(self) -> tuple[Path, Path | None]:
        """The files of the model and of its drafter, the catalogue's if none was named."""
        from pyspec.catalog import resolve

        path, paired = resolve(self.target())
        return path, paired if (draft := self.drafter()) == "auto" else Path(draft)


def projector_beside(name: str, file: str, target: str) -> Path | None:
    """Path of the projector beside the -hf target, downloaded if necessary; None if there is none, or if pyspec can not run it: the model reads
    text then, and a line says why. Raises DownloadError, ConfigError."""
    from pyspec.hub import Repository, split_name
    from pyspec.hub.names import choose_projector

    repo, quant = split_name(name)
    there = Repository.open(repo)
    found = choose_projector(there.choose(quant, file)[0], there.names)
    if not found:
        return None
    if why := _flaw_of(there, found, target):
        log.warning("%s is not taken, so no images are read: %s", found, why)
        return None
    log.info("%s: taken as projector, so images are read; --no-mmproj leaves it out", found)
    return there.fetch([found])[0]


def _flaw_of(there: Repository, projector: str, target: str) -> str:
    """Why a projector can not go with a model, by the head of its file; "" if it can."""
    from pyspec.errors import ModelError, PairError
    from pyspec.gguf import open_gguf
    from pyspec.hub import heads_only
    from pyspec.hub.heads import current
    from pyspec.vision.pixels import pillow
    from pyspec.vision.projector import read_projector

    try:
        pillow()
        with TemporaryDirectory() as folder, nullcontext() if current() else heads_only(Path(folder)):
            read = read_projector(there.fetch([projector])[0])
        with open_gguf(Path(target)) as model:
            read.check_pair(model)
    except (ConfigError, ModelError, PairError) as e:
        return str(e)
    return ""


def _from_hub(name: str, file: str, *, drafter: bool = False) -> str:
    from pyspec.hub import from_hub, split_name

    repo, quant = split_name(name)
    return str(from_hub(repo, quant, file, drafter=drafter))


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """The engine as described by the user, with the names of EngineSettings where they are the same."""

    choice: ModelChoice
    np: int
    ctx: int
    settings: Mapping[str, object]

    def check(self, np: int = 0) -> None:
        """Raise ConfigError for invalid settings, before the slow import of torch."""
        settings_from({"np": np or self.np, "ctx": self.ctx, **self.settings})

    def load(self, np: int = 0, *, isolated: bool = False) -> Engine:
        """Load the engine, with `np` slots if given, in its own process if `isolated`. Raises PyspecError."""
        choice = self.choice.look_before(partial(self.plan, np), apart=isolated)
        from pyspec.hub import expecting

        with expecting(choice.seen):
            target, draft, values = replace(self, choice=choice)._looked_up(np)
        from pyspec.engine.api import Engine

        progress.report("start of the engine")
        return Engine.open(target, draft, values, isolated=isolated)

    def plan(self, np: int = 0) -> tuple[Path, EngineSettings]:
        """The target's file and the settings of `load`. Raises PyspecError."""
        target, draft, values = self._looked_up(np)
        from pyspec.engine.arguments import pair_of
        from pyspec.engine.named import Named

        return pair_of(Named(target), draft, values)

    def _looked_up(self, np: int) -> tuple[str, str, dict[str, object]]:
        from pyspec.catalog import resolve

        target, draft = self.choice.target(), self.choice.drafter()
        if self.choice.repo and draft == "auto":
            from pyspec.engine.named import find_sidecar
            from pyspec.registry import split_spec_type

            spec_type, _ = split_spec_type(str(self.settings["spec_type"]))
            draft = find_sidecar(self.choice.repo, self.choice.file, target, spec_type)
        resolve(target)
        self.check(np)
        values: dict[str, object] = {"np": np or self.np, "ctx": self.ctx, **self.settings}
        if self.choice.repo and self.choice.mmproj and not values["mmproj"]:
            values["mmproj"] = projector_beside(self.choice.repo, self.choice.file, target)
        return target, draft, values
