"""The cache of experts: rounds tell their experts, and frequent ones come to the card behind them.

An account judges it: extra time of rounds with copies is a debt, paid by the time of the host that the placement of the start would have
taken. While the debt is too large no expert moves.
"""

from __future__ import annotations

import numpy as np

from pyspec.device.expert_uploads import ExpertUploads
from pyspec.device.expert_use import ExpertUse
from pyspec.device.worker import is_device_error
from pyspec.engine.policy.costs import Account
from pyspec.engine.policy.residents import Keys, Residents, UseCounts, swaps
from pyspec.repeats import limited

log = limited(__name__)

SHARE = 0.25  # of the link's time
MOST = 16  # experts that come together: each takes the host's thread a tenth of a millisecond
LEAST = 1.0  # uses more than the expert that leaves, in the counts' half-life, that one must have
LONG = 4096.0  # half-life, in rounds, of the counts that the next start begins with
KEPT = 0.98  # of a mean, each time
HOST = 42e9  # bytes a second of experts that a usual host computes with
EXACT = "--exact keeps each expert where it is"
PLACED = "they move where --moe-cache-mib N asks for it"
LOSES = "experts on their way took more time than they saved"


class Mean:
    """Of late values."""

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, x: float) -> None:
        self.value = KEPT * self.value + (1 - KEPT) * x if self.value else x


class ExpertCache:
    """Decides which experts have the slots of `uploads`.

    frozen        why no expert moves now; "": they do
    hits, misses  distinct experts of the target's rounds; n_upload: those that have come
    host, link    bytes of experts a second: that the host computes with, and that come to the card
    """

    def __init__(self, uploads: ExpertUploads, frozen: str = "") -> None:
        self.uploads, self.lane = uploads, uploads.layers[0].lane
        firsts = np.array(uploads.firsts)
        self.residents = Residents(firsts, uploads.residents(), uploads.bytes)
        self._bytes = np.repeat(uploads.bytes, np.diff(firsts))
        self.counts, self.long = UseCounts(len(self._bytes)), UseCounts(len(self._bytes), LONG)
        self.fixed = self.residents.there.copy()
        self.account, self.moves, self.frozen = Account(), not frozen, frozen
        self.hits = self.misses = self.n_upload = 0
        self.host, self.link, self._room = HOST, uploads.layers[0].link, 0.0
        self._busy_ns = self.lane.busy_ns
        # time of rounds without and with copies, less the host's, over the usual time
        self._beside = Mean(), Mean()

    def landed(self, use: ExpertUse, ms: float, usual_ms: float) -> None:
        """A round of these took so long. usual_ms: rounds of its size; 0.0: its time teaches nothing. A failure ends moves, and no request."""
        try:
            self._landed(use, ms, usual_ms)
        except Exception as e:
            if is_device_error(e):
                raise
            log.exception("the cache of experts failed, so experts stay where they are")
            self._end(f"a decision failed: {e}")

    def _landed(self, use: ExpertUse, ms: float, usual_ms: float) -> None:
        self.hits, self.misses = self.hits + use.hits, self.misses + use.misses
        had_copies = self._take_arrived()
        self.counts.add(use.keys, use.prompts)
        self.long.add(use.keys, use.prompts)
        missed = use.keys[use.is_miss]
        if usual_ms and not len(use.prompts):
            self._judge(use.keys, missed, ms, usual_ms, had_copies=had_copies)
        self._busy_ns = self.lane.busy_ns
        if self.uploads.failed is not None and self.moves:
            self._end(f"experts could not come to the card: {self.uploads.failed}")
        most = MOST * max(self.uploads.bytes)
        self._room = min(self._room + SHARE * self.link * 1e-3 * ms, most)
        if not self.moves or self.account.rests or self.uploads.is_busy:
            return
        pays = max(LEAST, self.host / self.link)
        chosen = swaps(self.residents, self.counts, missed, int(self._room), pays)[:MOST]
        if chosen:
            self._room -= sum(self.uploads.bytes[swap.layer] for swap in chosen)
            self.uploads.begin(chosen)

    def _take_arrived(self) -> bool:
        """Whether experts have been on their way since the last round."""
        uploads = self.uploads
        arrived, uploads.arrived = uploads.arrived, []
        for swap in arrived:
            self.residents.put(swap)
        if arrived and uploads.ms:
            n_byte = sum(uploads.bytes[swap.layer] for swap in arrived)
            self.link = KEPT * self.link + (1 - KEPT) * 1e3 * n_byte / uploads.ms
        uploads.ms, self.n_upload = 0.0, self.n_upload + len(arrived)
        return bool(arrived) or uploads.is_busy

    def _judge(self, used: Keys, missed: Keys, ms: float, usual_ms: float, *, had_copies: bool) -> None:
        n_byte = int(self._bytes[missed].sum())
        took_ns = self.lane.busy_ns - self._busy_ns
        if n_byte and took_ns > 0 and not had_copies:
            self.host = KEPT * self.host + (1 - KEPT) * 1e9 * n_byte / took_ns
        without = int(self._bytes[used[~self.fixed[used]]].sum())  # of misses, had nothing moved
        saved_ms = 1e3 * (without - n_byte) / self.host
        self._beside[had_copies].add(max(ms - 1e3 * n_byte / self.host, 0.0) / usual_ms)
        rests, (plain, copying) = self.account.rests, (mean.value for mean in self._beside)
        extra_ms = (copying - plain) * usual_ms if had_copies and plain else 0.0
        self.account.add(max(extra_ms, 0.0) - saved_ms, usual_ms)
        self.account.passes(ms)
        if self.account.rests != rests and self.moves:
            self.frozen = LOSES if self.account.rests else ""
            log.info("the cache of experts %s", f"rests: {LOSES}" if self.frozen else "goes on")

    def _end(self, why: str) -> None:
        self.moves, self.frozen = False, why
        log.warning("experts stay where they are from now on: %s", why)

    # -- for the next start --------------------------------------------------------------------------------------

    def known(self) -> list[float]:
        """How often each expert was used of late, in the order of layers."""
        return self.long.known()

    def recall(self, counts: list[float]) -> None:
        """Begin with the most frequent experts of an earlier start. Before the first round. Raises ValueError for impossible counts."""
        self.long.recall(counts)
        if not self.moves:
            return
        firsts, slots = self.residents.firsts.tolist(), self.residents.slots
        best = [
            a + np.argsort(-self.long[np.arange(a, b)], kind="stable")[: len(own)]
            for a, b, own in zip(firsts, firsts[1:], slots, strict=False)
        ]
        try:
            self.uploads.fill([own.tolist() for own in best])
        except Exception as e:
            if is_device_error(e):
                raise
            self._end(f"experts could not come to the card: {e}")
        self.residents = Residents(self.residents.firsts, self.uploads.residents(), self.uploads.bytes)
        self.fixed = self.residents.there.copy()
