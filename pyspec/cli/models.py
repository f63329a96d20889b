"""`pyspec models`: the catalogue, with sizes, memory, and whether each model is here and fits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from pyspec.cli import verbose_option

if TYPE_CHECKING:
    from pyspec.catalog import Entry
    from pyspec.cli.free_memory import FreeMemory
    from pyspec.hub.cache import CachedFile

SHARE = 0.96  # share of free memory that a load may use: engine/plan/memory_plan.py, RESERVE


@dataclass(frozen=True)
class Listed:
    """One name of the catalogue. bytes, memory: approximate; 0: unknown. fits: "yes", "no" or "?".

    mmproj  the projector on this machine, with which it reads images; "": there is none
    """

    name: str
    bytes: int
    memory: int
    fits: str
    here: bool
    mmproj: str


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@verbose_option
def models(as_json: bool) -> None:
    """List the models that can be given by name.

    Shows sizes, memory (one slot of 8,192 tokens, no drafter), and whether each model is on this machine and fits. Other quantisations of a
    model's repository are named NAME:QUANT.
    """
    from pyspec.catalog import catalogue
    from pyspec.cli.free_memory import free_memory
    from pyspec.hub.cache import cached_repositories
    from pyspec.hub.names import PROJECTORS

    files = [file for repository in cached_repositories() for file in repository.files]
    sight = {f.repo: str(f.path) for f in files if PROJECTORS.search(f.file.lower())}
    entries, here, free = catalogue().values(), _here(files), free_memory()
    found = {entry.name: list(_choices(entry, free, here, sight)) for entry in entries}
    is_smaller = False
    if as_json:
        choices = {e.name: [asdict(c) for c in found[e.name]] for e in entries}
        rows = [asdict(e) | {"runs": e.runs, "choices": choices[e.name]} for e in entries]
        click.echo(json.dumps(rows, indent=2))
        return
    from pyspec.cli.tables import row, show, table

    t = table(
        "name", "GB", "memory", "fits", "here", "images", "drafter", "model", right=("GB", "memory")
    )
    for entry in entries:
        for i, one in enumerate(found[entry.name]):
            title = entry.title if entry.runs else f"{entry.title} (not run yet)"
            about = ("", "") if i else (_drafters(entry), title)
            here_now = "yes" if one.here else "-"
            gives_way = not i and one.fits == "no" and any(o.fits == "yes" for o in found[entry.name])
            fits = "no*" if gives_way else one.fits
            is_smaller = is_smaller or gives_way
            sees = "--mmproj" if one.mmproj else "-"
            row(t, one.name, _gb(one.bytes), _gib(one.memory), fits, here_now, sees, *about)
    show(t)
    if is_smaller:
        click.echo("* the largest quantisation of its repository that fits is taken instead")
    where = "the free memory of this machine is unknown"
    if free:
        where = f"{free.free / 2**30:.1f} GiB free on {free.where}"
    click.echo(f"sizes are approximate, `pyspec fit NAME` computes them exactly; {where}")


def _gb(n: int) -> str:
    return "?" if not n else f"{n / 1e9:.2g}" if n < 1e9 else f"{n / 1e9:.1f}"


def _gib(n: int) -> str:
    return f"{n / 2**30:.1f} GiB" if n else "?"


def _choices(
    entry: Entry, free: FreeMemory | None, here: set[str], sight: dict[str, str]
) -> Iterator[Listed]:
    """The names of an entry: its own, and those of other quantisations."""
    repo = entry.target.repo if entry.target is not None else ""
    for need in entry.needs():
        fits = "?"
        if free is not None and need.memory:
            fits = "yes" if need.memory <= SHARE * free.free else "no"
        fits = fits if entry.runs else "no"
        yield Listed(need.name, need.bytes, need.memory, fits, need.name in here, sight.get(repo, ""))


def _drafters(entry: Entry) -> str:
    kinds = [entry.draft.kind if entry.draft else "", "mtp" if entry.mtp else ""]
    return ", ".join(filter(None, kinds)) or "-"


def _here(files: Sequence[CachedFile]) -> set[str]:
    """Names of the models on this machine."""
    from pyspec.catalog import catalogue
    from pyspec.hub import quant_of

    cached = {(file.repo, quant_of(file.file).lower()) for file in files}
    found = set()
    for entry in catalogue().values():
        source = entry.target
        if source is not None and source.packaged:
            found.add(entry.name)
        elif source is not None:
            quants = {need.name: need.quant.removeprefix("UD-").lower() for need in entry.needs()}
            found |= {name for name, quant in quants.items() if (source.repo, quant) in cached}
    return found
