"""A model as it was named, and the drafter beside it in its repository: the chosen file, and the reasons against the others."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyspec.registry import RESERVED, drafters

if TYPE_CHECKING:
    from pyspec.hub import Sidecar

log = logging.getLogger(__name__)

BEHIND_MTP = ("dspark", "eagle3")  # kinds that give way to MTP


@dataclass(frozen=True)
class Named:
    """A model's name: of the catalogue (`model`, perhaps with a colon and a quantisation), or of a repository (`repo`, likewise, or with
    the name of a `file`)."""

    model: str = ""
    repo: str = ""
    file: str = ""

    @property
    def is_open(self) -> bool:
        """Whether it leaves the quantisation to pyspec."""
        return not self.file and ":" not in (self.model or self.repo)

    @property
    def repository(self) -> str:
        """Its repository; "" for a local file."""
        from pyspec.catalog import find

        entry = find(self.model) if self.model else None
        if entry is not None and entry.target is not None:
            return entry.target.repo
        from pyspec.hub import split_name

        return split_name(self.repo)[0] if self.repo else ""

    def with_quant(self, quant: str) -> str:
        """The argument for another quantisation."""
        return (
            f"{self.model.partition(':')[0]}:{quant}" if self.model else f"-hf {self.repository}:{quant}"
        )


def find_sidecar(name: str, file: str, target: str, spec_type: str) -> str:
    """Path of the drafter beside the -hf target, downloaded if necessary; "auto" if none is taken.

    Raises DownloadError, ConfigError.
    """
    from pyspec.hub import Repository, sidecars, split_name

    repo, quant = split_name(name)
    there = Repository.open(repo)
    found = sidecars(there.names, there.choose(quant, file)[0], quant)
    best, said = choose_sidecar(found, Path(target), spec_type)
    for sentence in said:
        log.info("%s", sentence)
    return "auto" if best is None else str(there.fetch(there.choose(file=best.file))[0])


def choose_sidecar(
    found: Sequence[Sidecar],
    target: Path,
    spec_type: str,
) -> tuple[Sidecar | None, list[str]]:
    """The sidecar to draft with, and a sentence about each.

    spec_type  "auto", "none" or the requested drafter
    """
    best, said = None, []
    known = drafters()
    for one in found:
        if one.kind not in known:
            why = f"this version has no {one.kind}"
        elif spec_type not in (one.kind, "auto"):
            why = "--spec-type is none" if spec_type in RESERVED else f"--spec-type is {spec_type}"
        elif best is not None:
            why = f"{best.kind} goes first; --spec-type {one.kind} takes this one"
        elif one.kind == "mtp" and has_mtp(target):
            why = "the target's file has the block in it"
        elif spec_type == "auto" and one.kind in BEHIND_MTP and has_mtp(target):
            why = f"the block in the target's file goes first; --spec-type {one.kind} takes this one"
        else:
            best, why = one, ""
        verdict = f"not taken, {why}" if why else f"taken as {one.kind} drafter, {one.why}"
        said.append(f"{one.file}: {verdict}")
    return best, said


def has_mtp(path: Path) -> bool:
    """True if a model's file has an MTP block. Raises ModelError."""
    from pyspec.gguf import open_gguf

    with open_gguf(path) as file:
        return file.has_mtp
