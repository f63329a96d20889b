"""`pyspec pull`: download a model, its drafter and its projector into the local cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pyspec.cli.choice import projector_beside
from pyspec.cli.meter import pull_lines
from pyspec.cli.options import ModelChoice, begin_log, model_options

if TYPE_CHECKING:
    from pyspec.catalog import Entry, Source


@dataclass(frozen=True)
class Pulled:
    """A file in the cache. `hashed`: its hash was compared with the catalogue's or the hub's, now or at its download."""

    role: str  # target, or the drafter's kind
    path: Path
    bytes: int
    hashed: bool


@click.command()
@model_options
@click.option("-hfd", "--spec-draft-hf", default="", metavar="USER/REPO[:QUANT]", help="A drafter's repository.")  # fmt: skip
@click.option("--spec-type", default="auto", metavar="TYPE", help="Drafter to download, or none.")
@click.option(
    "--no-mmproj",
    is_flag=True,
    help="Leave out the projector beside the model, with which it reads images.",
)
@click.option("--check", is_flag=True, help="Also check the hashes of files that are already here.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def pull(
    ctx: click.Context,
    choice: ModelChoice,
    spec_type: str,
    no_mmproj: bool,
    check: bool,
    as_json: bool,
) -> None:
    """Download a model, its drafter and its projector.

    Resumes interrupted downloads and checks every file against the hub's SHA-256. Example: pyspec pull -hf user/repo:Q8_0
    """
    from pyspec.catalog import resolve
    from pyspec.cli.options import SPEC_TYPES, spec_type_of
    from pyspec.config import EngineSettings
    from pyspec.errors import ConfigError
    from pyspec.hub import expecting
    from pyspec.registry import is_spec_type, split_spec_type

    begin_log(3)
    wanted, _ = split_spec_type(spec_type_of(spec_type))
    if not is_spec_type(wanted):
        raise ConfigError(f"--spec-type is '{spec_type}'; want one of {', '.join(SPEC_TYPES)}")
    if bool(choice.model) == bool(choice.repo):
        raise ConfigError("no model given: want a name of the catalogue, or -hf user/repo")
    if choice.model:
        _entry(choice.model)
    with pull_lines():
        alone = EngineSettings(spec_type="none")
        named = choice
        found = named.looked(lambda: (resolve(named.target())[0], alone))
        if found.advice and not found.quant:
            # it may be for another machine
            click.echo(f"too large for this machine: {found.advice}", err=True)
        choice = replace(named.after(found), mmproj=not no_mmproj)
        by_name = bool(choice.model)
        with expecting(choice.seen):
            files = _of_catalogue(choice.model, wanted) if by_name else _of_repository(choice, wanted)
            if choice.draft_repo:
                files += _drafter(choice.draft_repo)
        done = [_checked(role, paths, check) for role, paths in files]
    from pyspec.cli.ps import reread

    reread()
    if as_json:
        click.echo(json.dumps([asdict(one) | {"path": str(one.path)} for one in done], indent=1))
        return
    from pyspec.cli.tables import row, show, table

    t = table("what", "GB", "hash", "path", right=("GB",))
    for one in done:
        hashed = "right" if one.hashed else "not known"
        row(t, one.role, f"{one.bytes / 1e9:.2f}", hashed, str(one.path))
    show(t)


def _entry(name: str) -> Entry:
    from pyspec.catalog import find
    from pyspec.errors import ConfigError

    entry = find(name)
    if entry is None:
        raise ConfigError(
            f"'{name}' is not in the catalogue (`pyspec models` lists it); name a repository with -hf",
        )
    entry.check()
    return entry


def _of_catalogue(name: str, wanted: str) -> list[tuple[str, list[Path]]]:
    entry = _entry(name)
    assert entry.target is not None
    files = [("target", [_fetch_checked(entry.target)])]
    if entry.draft is not None and wanted in ("auto", entry.draft.kind):
        files.append((entry.draft.kind, [_fetch_checked(entry.draft.source)]))
    return files


def _fetch_checked(source: Source) -> Path:
    """The file; the catalogue's hash is checked before the hub's."""
    from pyspec.errors import DownloadError
    from pyspec.hub import sha256_of

    path = source.fetch()
    if source.sha256 and (got := sha256_of(path)) != source.sha256:
        raise DownloadError(
            f"{path} is not the catalogue's file: its SHA-256 is {got}, want {source.sha256}",
        )
    return path


def _of_repository(choice: ModelChoice, wanted: str) -> list[tuple[str, list[Path]]]:
    from pyspec.engine.named import choose_sidecar
    from pyspec.hub import Repository, sidecars, split_name

    name, quant = split_name(choice.repo)
    there = Repository.open(name)
    names = there.choose(quant, choice.file)
    files = [("target", there.fetch(names))]
    if choice.mmproj and (beside := projector_beside(choice.repo, choice.file, str(files[0][1][0]))):
        files.append(("projector", [beside]))
    if choice.draft_repo:
        return files
    best, said = choose_sidecar(sidecars(there.names, names[0], quant), files[0][1][0], wanted)
    for sentence in said:
        click.echo(sentence, err=True)
    if best is not None:
        files.append((best.kind, there.fetch(there.choose(file=best.file))))
    return files


def _drafter(name: str) -> list[tuple[str, list[Path]]]:
    from pyspec.hub import Repository, split_name

    repo, quant = split_name(name)
    there = Repository.open(repo)
    return [("drafter", there.fetch(there.choose(quant, drafter=True)))]


def _checked(role: str, paths: Sequence[Path], again: bool) -> Pulled:
    """A file with its shards. Downloaded files were hashed on arrival."""
    from pyspec.hub import check_hash
    from pyspec.hub.fetch import SHA256

    for path in paths if again else ():
        check_hash(path)
    is_known = all(SHA256.fullmatch(path.resolve().name) or _is_packaged(path) for path in paths)
    return Pulled(role, paths[0], sum(path.stat().st_size for path in paths), is_known)


def _is_packaged(path: Path) -> bool:
    """True for a file of the package, whose hash the catalogue has."""
    return path.parent == Path(__file__).parents[1] / "demo"
