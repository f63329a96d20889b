"""Decides by measuring whether drafts that the host makes beside the device are worth the host's time: for all slots together, and for each.

Accounts of time: what the host took is a debt, and what accepted drafts saved pays it. While it is too large the host makes no such
drafts, and the debt shrinks by a small share of the time that passes. Then it tries again. So drafts that never pay cost that share.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspec.engine.policy.controller import Controller

SHARE = 0.004  # of all time, that drafts may take which do not pay
LIMIT = 2.0  # plain rounds of debt that begin a rest; of a slot, its part of a round
MOST_DEBT = (
    16.0  # plain rounds: a host that paused for another reason is not held against drafts for longer
)
MOST_CREDIT = 4.0  # plain rounds that drafts may have saved in advance
RESTS = "none: drafts from earlier text took more of the host's time than they saved, and are tried again later"


class Account:
    """A debt in milliseconds. at: when it was settled last, in milliseconds of rounds."""

    __slots__ = ("at", "debt", "rests")

    def __init__(self, at: float = 0.0) -> None:
        self.debt, self.at, self.rests = 0.0, at, False

    def settle(self, now: float) -> None:
        """Time has passed."""
        if self.debt > 0.0:
            self.debt = max(0.0, self.debt - SHARE * (now - self.at))
        self.at = now
        self.rests = self.rests and self.debt > 0.0

    def add(self, ms: float, unit: float) -> None:
        """ms: taken, or negative: saved. unit: milliseconds of a plain round, or of a slot's part of it."""
        self.debt = min(max(self.debt + ms, -MOST_CREDIT * unit), MOST_DEBT * unit)
        self.rests = self.rests or self.debt > LIMIT * unit


class HostDrafts:
    """Times of rounds are the controller's, and so is the time that passes. Fixed lengths are drafted at any cost."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.reset()

    def reset(self) -> None:
        """Forget every account."""
        now = self.controller.ms
        self.all, self.slots = Account(now), [Account(now) for _ in range(self.controller.n_slot)]
        self.unit = self.row_ms = (
            0.0  # of the last `plans`: milliseconds of a plain round, and of a drafted row
        )
        self.busy, self.own = (
            0,
            dict[int, float](),
        )  # own: tokens that the drafter would have given, by slot

    def begin(self, slot: int) -> None:
        """Another text starts in this slot."""
        self.slots[slot] = Account(self.controller.ms)

    @property
    def is_awake(self) -> bool:
        """The host may draft for some slots now. Ask once a round, before `may`."""
        if self.all.rests:
            self.all.settle(self.controller.ms)
        return not self.is_resting

    def may(self, slot: int) -> bool:
        """The host may draft for this slot, if it may for any."""
        account = self.slots[slot]
        if account.rests:
            account.settle(self.controller.ms)
        return not account.rests or self.controller.fixed

    @property
    def is_resting(self) -> bool:
        """The host drafted for no slot when it was asked last."""
        return self.all.rests and not self.controller.fixed

    def is_the_reason(self, slot: int) -> bool:
        """The slot has no drafts because the host makes none for it, and there is no drafter."""
        rests = self.is_resting or (self.slots[slot].rests and not self.controller.fixed)
        return rests and not self.controller.n_own and not self.controller.lanes[slot].n_draft

    def took(self, slots: Sequence[int], ms: float, busy: int) -> None:
        """The host drafted for these slots of `busy` in so many milliseconds, and the device waited. No slots: it entered texts."""
        unit = self._plain_ms(busy)
        if not unit:
            return
        self._add(self.all, ms, unit)
        for slot in slots:
            self._add(self.slots[slot], ms / len(slots), unit / busy)

    def plans(self, busy: int, drafts: Sequence[tuple[int, int]]) -> None:
        """The next verify of `busy` slots has these drafts beside: (slot, tokens)."""
        c, n_row = self.controller, sum(n for _, n in drafts)
        self.unit, self.busy, self.own = self._plain_ms(busy), busy, {}
        self.row_ms = max(0.0, c.verify_ms(busy + n_row) - c.verify_ms(busy)) / max(n_row, 1)
        if drafts and c.n_own:
            slots = [slot for slot, _ in drafts]
            self.own = dict(zip(slots, c.texts.survive(slots).sum(axis=1).tolist(), strict=True))

    def gave(self, slot: int, n_draft: int, n_accepted: int) -> None:
        """A slot's draft of that verify was judged."""
        if self.unit:
            each = self.unit / self.busy
            saved = (n_accepted - self.own.get(slot, 0.0)) * each - n_draft * self.row_ms
            self._add(self.all, -saved, self.unit)
            self._add(self.slots[slot], -saved, each)

    def _add(self, account: Account, ms: float, unit: float) -> None:
        account.settle(self.controller.ms)
        account.add(ms, unit)

    def _plain_ms(self, busy: int) -> float:
        """0.0: not known yet."""
        c = self.controller
        if c.force is not None or not busy or not c.verify_ms.has_trusted:
            return 0.0
        return c.verify_ms(busy) + c.verify_ms.slot_ms * busy
