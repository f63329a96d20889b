"""Checks a model before its download, from the heads of its files: a load's refusals, and alternatives that fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from pyspec.catalog import catalogue
from pyspec.engine.plan.fit import FitReport, fit
from pyspec.engine.plan.look_apart import Named, Plan
from pyspec.engine.plan.memory_plan import size
from pyspec.errors import PyspecError
from pyspec.gguf import has_head
from pyspec.hub import Repository, heads_only, models_of, quant_of, shards_of
from pyspec.hub.names import SHARD

MOST_TRIES = 3  # files whose heads are read for one that fits


def look(plan: Plan, named: Named) -> str:
    """Raise for a model that a load would refuse (UnknownArchitecture, PairError and others). If it does not fit, return that with an alternative;
    "" if it fits, or if all its files are local, because the load reports the same.

    plan  the target's file and the settings of the load; called with downloads reduced to heads
    """
    with (
        TemporaryDirectory(prefix="pyspec-look-") as folder,
        heads_only(Path(folder), has_head) as heads,
        _without(folder),
    ):
        path, settings = plan()
        if not heads.fetched:
            return ""
        report = fit(path, settings)
        if report.asked.total <= report.usable:
            return ""
        d = report.description
        asked = f"-np {d.settings.np} -c {d.n_ctx}"
        return (
            f"{path.name} needs {size(report.asked.total)} with {asked}, and {size(report.usable)} may be used on {d.device}. "
            f"{instead(report, named)}"
        )


@contextmanager
def _without(folder: str) -> Iterator[None]:
    """Errors name files as their repository does, without the folder of their heads."""
    try:
        yield
    except PyspecError as e:
        e.args = tuple(arg.replace(f"{folder}/", "") if isinstance(arg, str) else arg for arg in e.args)
        raise


def instead(report: FitReport, named: Named) -> str:
    """One sentence with alternatives: fewer slots or tokens, another quantisation of the repository, a smaller model of the catalogue."""
    if (best := report.best()) is not None:
        return f"This fits: -np {best.np} -c {best.n_ctx}"
    try:
        if (other := smaller_quant(report, named)) is not None:
            return f"This fits, from the same repository: {other}"
    except PyspecError:  # the repository is not available, but the catalogue is
        pass
    if (model := smaller_model(report.usable)) is not None:
        return f"No quantisation of it fits here; this model does: {model} (`pyspec models`)"
    return "A smaller model is needed (`pyspec models` lists some)"


def smaller_quant(report: FitReport, named: Named) -> str | None:
    """The argument for the largest other file of the repository that fits by its head. Raises PyspecError."""
    if not named.repository:
        return None
    there = Repository.open(named.repository)
    d = report.description
    tries = 0
    for name, n_bytes in _models(there.sizes()):
        ratio = n_bytes / d.file.n_bytes
        least = min(f.plan.total for f in report.fits)
        if (
            ratio >= 1
            or least - report.asked.weights * (1 - ratio) > report.usable
            or tries == MOST_TRIES
        ):
            continue
        tries += 1
        quant = quant_of(name)
        if not quant or there.choose(quant)[0] != name:
            continue
        try:
            other = fit(
                there.fetch(shards_of(name, there.names))[0], d.settings, report.free if d.assumed else 0
            )
        except PyspecError:  # of unsupported types, for example
            continue
        if (best := other.best()) is not None:
            more = "" if other.asked.total <= other.usable else f" -np {best.np} -c {best.n_ctx}"
            return f"{named.with_quant(quant)}{more} ({n_bytes / 1e9:.1f} GB)"
    return None


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
