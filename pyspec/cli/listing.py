"""`pyspec list`: the models on this machine and their drafters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pyspec.cli import verbose_option
from pyspec.ranges import printable

if TYPE_CHECKING:
    from pyspec.hub.cache import CachedFile, CachedRepository


@dataclass(frozen=True)
class Here:
    """A file on this machine, and the name or flag to load it with."""

    type: str  # "demo", "-hf user/repo:Q8_0"
    file: str
    bytes: int
    what: str  # target, a drafter's kind, "projector", or "unfinished"
    pair: str  # of a target: its drafter's file
    path: str
    mmproj: str = ""  # of a target: the projector's file, with which it reads images


@click.command("list")
@click.argument("folder", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@verbose_option
def list_models(folder: Path | None, as_json: bool) -> None:
    """List the models on this machine.

    Packaged models and those in the Hugging Face cache, each with its drafter; with FOLDER, the GGUF files below it.
    """
    found = [*_packaged(), *_cached()] if folder is None else list(_below(folder))
    if as_json:
        click.echo(json.dumps([asdict(one) for one in found], indent=1))
        return
    from pyspec.cli.tables import row, show, table

    t = table("type", "file", "GB", "what", "drafter", "images", right=("GB",))
    for one in found:
        sees = "yes" if one.mmproj else "-"
        row(t, one.type, one.file, f"{one.bytes / 1e9:.2f}", one.what, one.pair or "-", sees)
    show(t)
    from pyspec.cli.ps import routers

    for url, rows in routers().items() if folder is None else ():
        served = ", ".join(f"{one['id']} ({one['status']['value']})" for one in rows)
        click.echo(f"served at {url}: {printable(served)}")
    if n := sum(one.what == "unfinished" for one in found):
        click.echo(f"{n} unfinished: `pyspec pull -hf` resumes them", err=True)


def _packaged() -> Iterator[Here]:
    from pyspec.catalog import catalogue

    for entry in catalogue().values():
        if entry.target is not None and entry.target.packaged:
            draft = entry.draft.source.packaged if entry.draft else ""
            yield Here(
                entry.name,
                entry.target.packaged,
                entry.target.bytes,
                "target",
                draft,
                str(entry.target.fetch()),
            )


def _below(folder: Path) -> Iterator[Here]:
    for path in sorted(folder.rglob("*.gguf")):
        size, what = path.stat().st_size, _what(path.name)
        yield Here(str(path), path.name, size, what, "", str(path.absolute()))


def _what(file: str) -> str:
    from pyspec.hub.names import PROJECTORS, kind_of

    return kind_of(file) or ("projector" if PROJECTORS.search(file.lower()) else "target")


def _cached() -> Iterator[Here]:
    from pyspec.hub.cache import cached_repositories

    repositories = list(cached_repositories())
    files = {(f.repo, f.file) for r in repositories for f in r.files}
    for repository in repositories:
        for file in repository.files:
            yield _here(repository, file, files)
        if repository.unfinished:
            yield Here(f"-hf {repository.name}", "", repository.unfinished, "unfinished", "", "")


def _here(repository: CachedRepository, file: CachedFile, files: set[tuple[str, str]]) -> Here:
    from pyspec.hub import quant_of
    from pyspec.hub.names import choose_projector

    what = _what(file.file)
    if what == "projector":
        return Here(f"--mmproj {file.path}", file.file, file.bytes, what, "", str(file.path))
    if what != "target":
        return Here(f"-hfd {file.repo}", file.file, file.bytes, what, "", str(file.path))
    named = _name_of(file)
    quant = quant_of(file.file)
    pair = _pair(repository, file, files, named)
    typed = named or f"-hf {file.repo}{f':{quant}' if quant else ''}"
    mmproj = choose_projector(file.file, [f.file for f in repository.files])
    return Here(typed, file.file, file.bytes, what, pair, str(file.path), mmproj)


def _name_of(file: CachedFile) -> str:
    """The catalogue name of a file, NAME:QUANT for another quantisation of its repository; "" if it has none."""
    from pyspec.catalog import catalogue
    from pyspec.hub import models_of, quant_of

    for entry in catalogue().values():
        if entry.target is None or entry.target.repo != file.repo or not models_of([file.file]):
            continue
        quant = quant_of(file.file)
        own = entry.quant.removeprefix("UD-").lower()
        if entry.target.file == file.file or quant.lower() == own:
            return entry.name
        return f"{entry.name}:{quant}" if quant else ""
    return ""


def _pair(
    repository: CachedRepository,
    file: CachedFile,
    files: set[tuple[str, str]],
    named: str,
) -> str:
    """The drafter on this machine that goes with a target: the catalogue's, else the sidecar that a load would take."""
    from pyspec.catalog import find
    from pyspec.engine.named import BEHIND_MTP
    from pyspec.hub import sidecars
    from pyspec.registry import drafters

    entry = find(named)
    if entry is not None and entry.draft is not None:
        source = entry.draft.source
        return source.file if (source.repo, source.file) in files else ""
    beside = sidecars([f.file for f in repository.files], file.file)
    known = [s for s in beside if s.kind in drafters()]
    give_way = ("mtp", *BEHIND_MTP)  # to a block in the target's file
    return next((s.file for s in known if s.kind not in give_way or not _has_own_block(file.path)), "")


def _has_own_block(path: Path) -> bool:
    from pyspec.engine.named import has_mtp
    from pyspec.errors import ModelError

    try:
        return has_mtp(path)
    except ModelError:  # an unreadable file is listed all the same
        return False
