"""Checks a model before its download, from the heads of its files: a load's refusals, and alternatives that fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from pyspec.catalog import catalogue
from pyspec.engine.plan.fit import FitReport, fit, holds
from pyspec.engine.plan.look_apart import HeadsRead, Named, Plan
from pyspec.engine.plan.memory_plan import size
from pyspec.errors import PyspecError
from pyspec.gguf import has_head
from pyspec.hub import Repository, heads_only, models_of, quant_of, shards_of
from pyspec.hub.names import SHARD

MOST_TRIES = 3  # files whose heads are read for one that fits


def look(plan: Plan, named: Named) -> HeadsRead:
    """Raise for a model that a load would refuse (UnknownArchitecture, PairError and others). If it does not fit, return that with an alternative,
    or the quantisation to take instead; nothing of both if it fits, or if all its files are local, because the load reports the same.

    plan  the target's file and the settings of the load; called with downloads reduced to heads
    """
    with (
        TemporaryDirectory(prefix="pyspec-look-") as folder,
        heads_only(Path(folder), has_head) as heads,
        _without(folder),
    ):
        path, settings = plan()
        seen = dict(heads.seen)
        if not seen:
            return HeadsRead()
        report = fit(path, settings)
        if report.fits_as_asked:
            return HeadsRead(seen=seen)
        d = report.description
        asked = f"-np {d.settings.np} -c {d.n_ctx}"
        needs = f"{path.name} needs {size(report.asked.total)} with {asked}, and {size(report.usable)} may be used on {d.device}"
        if not holds(report.host, report.host_free):
            needs += f", and of host memory {report.host}, of which {size(report.host_free)} are free"
        if named.is_open and (other := quant_as_asked(report, named)) is not None:
            said = f"{needs}: {other.named} is taken, from the same repository"
            return HeadsRead(said, quant=other.quant, seen=dict(heads.seen))
        return HeadsRead(f"{needs}. {instead(report, named)}", seen=seen)


@contextmanager
def _without(folder: str) -> Iterator[None]:
    """Errors name files as their repository does, without the folder of their heads."""
    try:
        yield
    except PyspecError as e:
        e.args = tuple(arg.replace(f"{folder}/", "") if isinstance(arg, str) else arg for arg in e.args)
        raise


def instead(report: FitReport, named: Named) -> str:
    """One sentence with alternatives: fewer slots or tokens, no weights in host memory, another quantisation of the repository, a smaller model of the catalogue."""
    if (best := report.best()) is not None:
        return f"This fits: -np {best.np} -c {best.n_ctx}"
    if report.without:
        return f"This fits: {report.without}"
    known = ""  # of the repository's other files; of a single local file nothing is known
    try:
        if (other := smaller_quant(report, named)) is not None:
            return f"This fits, from the same repository: {other}"
        known = "No file of the repository fits here; " if named.repository else ""
    except PyspecError:  # the repository is not available, but the catalogue is
        pass
    if (model := smaller_model(report.usable)) is not None:
        return f"{known or 'By its size '}this model {'does' if known else 'fits'}: {model} (`pyspec models`)"
    return "A smaller model is needed (`pyspec models` lists some)"


@dataclass(frozen=True)
class Other:
    """Another file of a repository, with the plan of its head."""

    quant: str
    named: str  # the argument for it
    n_bytes: int
    report: FitReport


def quant_as_asked(report: FitReport, named: Named) -> Other | None:
    """The largest other file of the repository that holds the requested slots and context; None if it is not available."""
    try:
        return next(
            (o for o in _others(report, named, report.asked.total) if o.report.fits_as_asked), None
        )
    except PyspecError:  # the reasons against the model that was named count
        return None


def smaller_quant(report: FitReport, named: Named) -> str | None:
    """The argument for the largest other file of the repository that fits by its head. Raises PyspecError."""
    for other in _others(report, named, min(f.plan.total for f in report.fits)):
        if (best := other.report.best()) is not None:
            more = "" if other.report.fits_as_asked else f" -np {best.np} -c {best.n_ctx}"
            return f"{other.named}{more} ({other.n_bytes / 1e9:.1f} GB)"
    return None


def _others(report: FitReport, named: Named, needed: int) -> Iterator[Other]:
    """Smaller files of the repository that may fit by their size, the largest first; those that no load would take are left out.

    needed  bytes of the plan that has to fit, with the weights of the named file. Raises PyspecError.
    """
    if not named.repository:
        return
    d, there = report.description, Repository.open(named.repository)
    tries = 0
    for name, n_bytes in _models(there.sizes()):
        ratio = n_bytes / d.file.n_bytes
        too_large = needed - report.asked.weights * (1 - ratio) > report.usable
        if ratio >= 1 or too_large or tries == MOST_TRIES:
            continue
        tries += 1
        quant = quant_of(name)
        if not quant or there.choose(quant)[0] != name:
            continue
        try:
            path = there.fetch(shards_of(name, there.names))[0]
            own = fit(path, d.settings, report.free if d.assumed else 0)
        except PyspecError:  # of unsupported types, for example
            continue
        yield Other(quant, named.with_quant(quant), n_bytes, own)


def _models(sizes: dict[str, int]) -> Iterator[tuple[str, int]]:
    """(file, bytes of all shards) of a repository's models, the largest first."""
    models = models_of(list(sizes))
    whole = {
        name: sum(sizes[shard] for shard in shards_of(name, models))
        for name in models
        if (shard := SHARD.match(name)) is None or shard[2] == "00001"
    }
    yield from sorted(whole.items(), key=lambda pair: -pair[1])


def smaller_model(usable: int) -> str | None:
    """The largest model of the catalogue that fits by its known size, with its quantisation; None if only the demo does."""
    able = [
        (entry.params, need.bytes, need.name)
        for entry in catalogue().values()
        for need in entry.needs()
        if entry.runs and need.quant and 0 < need.memory <= usable
    ]
    return max(able)[2] if able else None
