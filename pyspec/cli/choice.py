"""What the user wants loaded, as typed: looked up, checked and loaded from here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspec.config import settings_from
from pyspec.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from pyspec.config import EngineSettings
    from pyspec.engine.api import Engine


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
