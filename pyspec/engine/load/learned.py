"""What a controller has learned, kept in the cache folder for the next start of the same model, drafter, machine and settings.

It holds how common levels of acceptance are, the times of rounds and drafts by size, and of experts in the host's memory how often they were used
and what they cost. It is an estimate and decides how much is drafted and which experts begin on the card, never a text. A file that is damaged,
of another version or of anything else is not read, and the next one takes its place.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from pyspec.cache import cache_root, write_json
from pyspec.cuda.machine import machine
from pyspec.engine.loop.expert_cache import ExpertCache
from pyspec.engine.plan.describe import Description
from pyspec.engine.policy.controller import Controller
from pyspec.engine.policy.costs import Timer
from pyspec.engine.policy.row_costs import NO_EXPERTS, Brought, Factors
from pyspec.version import __version__

log = logging.getLogger(__name__)

LEAST = 128  # rounds that are worth a file
MOST_FILES, MOST_BYTES = 64, 1 << 20  # in the folder, and of a file
MOST_MS, MOST_SIZE = 1e6, 1 << 20  # of a round that is believed, and of its rows


class LearnedDrafting:
    """Reads the file into a controller, and writes it. Nothing is raised: without the file a start learns as the first one did."""

    def __init__(
        self, controller: Controller, key: dict[str, Any], experts: ExpertCache | None = None
    ) -> None:
        self.controller, self.experts = controller, experts
        self.key = json.loads(json.dumps(key, default=_plain))
        name = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()[:40]
        self.path, self._n_kept = cache_root() / "learned" / f"{name}.json", controller.n_round

    @classmethod
    def of(
        cls, d: Description, controller: Controller, experts: ExpertCache | None = None
    ) -> LearnedDrafting | None:
        """None where nothing may be kept: without a warm-up an engine starts bare, and made-up acceptance teaches nothing."""
        s = d.settings
        teaches = d.draft.n_draft or experts is not None
        if not s.warm_up or s.synth_len or s.synth_rates or not teaches:
            return None
        files = [*d.file.paths, *(d.draft.file.paths if d.draft.file is not None else ())]
        about = [(path.resolve(), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        versions = (__version__, torch.__version__)
        return cls(
            controller,
            {"versions": versions, "files": about, "settings": asdict(s), "kind": d.draft.kind}
            | {"placement": [asdict(place) for place in (d.placement, d.draft_placement)]}
            | asdict(machine(d.device)),
            experts,
        )

    def recall(self) -> None:
        """Load the learned values. Call it after the warm-up."""
        try:
            if self.path.stat().st_size > MOST_BYTES:
                raise ValueError("it is too large")
            kept = json.loads(self.path.read_text())
            if kept["key"] != self.key:
                raise ValueError("it is of another start")
            times = [_times(kept[name]) for name in ("verify_ms", "draft_ms")]
            texts = _numbers(kept["acceptance"])
            factors = _factors(kept["expert_ms"])
            if self.experts is not None:
                self.experts.recall(kept["experts"])  # refuses impossible values, as the next one
            self.controller.texts.recall(texts)
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            log.debug("what %s has learned is not read: %s", self.path, e)
            return
        verify, rows = self.controller.costs.verify, self.controller.rows
        verify.recount(rows.factors, factors)
        rows.factors = factors
        for timer, known, brought in zip(self._timers, times, (factors.usual, NO_EXPERTS), strict=True):
            timer.recall(known, brought)
        log.info("drafts begin with what an earlier start has learned of this model and drafter")

    @property
    def _timers(self) -> tuple[Timer, Timer]:
        return self.controller.costs.verify, self.controller.costs.draft

    def keep(self) -> None:
        """Write the current values if any has changed. Runs on the engine's thread."""
        if self.controller.n_round - self._n_kept < LEAST:
            return
        self._n_kept = self.controller.n_round
        verify, draft = self._timers
        content = {"key": self.key, "verify_ms": verify.known(), "draft_ms": draft.known()}
        if self.experts is not None:
            content["experts"] = self.experts.known()
        miss_ms, hit_ms, usual = self.controller.rows.factors
        content |= {"acceptance": self.controller.texts.known(), "expert_ms": [miss_ms, hit_ms, *usual]}
        write_json(self.path, content)
        try:
            files = sorted(self.path.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
            for path in files[:-MOST_FILES]:
                path.unlink(missing_ok=True)
        except OSError as e:
            log.debug("old files in %s stay: %s", self.path.parent, e)


def _plain(x: object) -> object:
    """What JSON has no word for. Sets have another order in each process."""
    return sorted(x) if isinstance(x, frozenset) else str(x)


def _times(kept: dict[str, float]) -> dict[int, float]:
    times = {int(size): float(ms) for size, ms in kept.items()}
    if not all(0 < size <= MOST_SIZE and 0 < ms < MOST_MS for size, ms in times.items()):
        raise ValueError("a time can not be")
    return times


def _factors(kept: list[float]) -> Factors:
    if len(kept) != 4 or not all(0 <= float(x) < MOST_MS for x in kept):
        raise ValueError("a factor can not be")
    miss_ms, hit_ms, misses, hits = map(float, kept)
    return Factors(miss_ms, hit_ms, Brought(misses, hits))


def _numbers(kept: dict[str, list[float]]) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
    found = {str(name): np.array(values, np.float64) for name, values in kept.items()}
    if not all(np.isfinite(values).all() for values in found.values()):
        raise ValueError("a number is not finite")
    return found
