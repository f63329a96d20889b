"""Decides by measuring whether drafts that the host makes beside the device are worth its time: an account of what it took, which accepted
drafts pay with the time that they saved. While it rests, no text is looked up or entered.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspec.engine.policy.account import Account
from pyspec.engine.policy.controller import Controller

RESTS = "none: drafts from earlier text took more of the host's time than they saved, and are tried again later"


class HostDrafts:
    """Times of rounds are the controller's, and so is the time that passes. Fixed lengths are drafted at any cost."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.reset()

    def reset(self) -> None:
        """Forget what was counted."""
        self.account = Account(self.controller.ms)
        # of the last `plans`: milliseconds of a plain round, and of a drafted row; slots; tokens that the drafter would have given, by slot
        self.unit = self.row_ms = 0.0
        self.busy, self.own = 0, dict[int, float]()

    @property
    def is_awake(self) -> bool:
        """The host may draft now. Ask once a round."""
        self.account.settle(self.controller.ms)
        return not self.is_resting

    @property
    def is_resting(self) -> bool:
        """The host did not draft when it was asked last."""
        return self.account.rests and not self.controller.fixed

    def is_the_reason(self, slot: int) -> bool:
        """The slot has no drafts because the host makes none, and there is no drafter."""
        return self.is_resting and not self.controller.n_own and not self.controller.lanes[slot].n_draft

    def took(self, ms: float, busy: int) -> None:
        """The host drafted for `busy` slots, or entered texts, in so many milliseconds, and the device waited."""
        if unit := self._plain_ms(busy):
            self._add(ms, unit)

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
            self._add(-saved, self.unit)

    def _add(self, ms: float, unit: float) -> None:
        self.account.settle(self.controller.ms)
        self.account.add(ms, unit)

    def _plain_ms(self, busy: int) -> float:
        """0.0: not known yet."""
        c = self.controller
        if c.force is not None or not busy or not c.verify_ms.has_trusted:
            return 0.0
        return c.verify_ms(busy) + c.verify_ms.slot_ms * busy
