"""Whether drafts rest: what may not pay is tried by a small share of all time. Arithmetic only: no torch, and no clock.

What something took is a debt, and what it saved pays it (`Account`). While the debt is too large it is not done, and the debt shrinks by a
share of the time that passes. Then it is tried again. So what never pays costs that share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspec.engine.policy.controller import Controller

SHARE = 0.004  # of all time, that may be lost to what does not pay: chosen; tools/replay.py gives the same with 0.001 and 0.016
LIMIT = 2.0  # plain rounds of debt that begin a rest, and that may be saved in advance [0.5: 0.995, 8: the same]
MOST_DEBT = 16.0  # plain rounds: a pause of the machine is not held against it for longer [4: 0.99]
# A drafter that rests: 0.991 of a server without a drafter at 64 streams and 1.2 tokens a round on a card, 0.967 without it; 0.98 is promised.
# In brackets: rounds until drafts come back to 64 slots of tests/engine/test_reading.py, with other values; now 218
REST_AFTER = 128  # choices without a draft that pays until new requests are not read; 0: all requests are read, always [32: 130, 512: 218]
LEAST_READ, READ_ONE_IN = (
    4,
    8,
)  # so many are read, or one in this many; where no more run, all: that costs little, and few could tell of the others [1: 218, of 4: 117]
AWAKE, FORGET = (
    4.0,
    1 / 32,
)  # paying choices until all are read again [1: 215, 16: 230], and what each other choice takes from their number [0 and 1/4: the same]

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
        """ms: taken, or negative: saved. unit: milliseconds of a plain round."""
        self.debt = min(max(self.debt + ms, -LIMIT * unit), MOST_DEBT * unit)
        self.rests = self.rests or self.debt > LIMIT * unit


class DraftReading:
    """Whether the drafter reads new requests. It rests while drafts do not pay.

    A drafter that pairs tokens with the target's hidden states reads every token of a request, prompt and answer, whether it drafts or not:
    with many streams a percent of the time or more. Where no draft has paid for long, that is given away. So it then reads a few requests,
    whose drafts tell when texts or the load have changed, and no others. As soon as drafts pay again it reads all new requests, and the rest
    of those that run.

    n_idle  choices since drafts paid last
    """

    def __init__(self) -> None:
        self.n_idle = 0
        self._paid = AWAKE
        self._tried: set[int] = set()  # slots whose drafts are not judged yet
        self._missing = 0.0  # right drafts that the last ones lack to promise more than none

    def count(self, *, pays: bool) -> None:
        """The controller has chosen for slots that may draft. pays: it drafts because that promises more tokens, and not to learn."""
        self._paid = min(AWAKE, self._paid + 1.0) if pays else max(0.0, self._paid - FORGET)
        self.n_idle = 0 if pays and self._paid >= AWAKE else self.n_idle + 1

    @property
    def rests(self) -> bool:
        return 0 < REST_AFTER <= self.n_idle

    def wants(self, n_read: int, n_busy: int) -> bool:
        """Whether the drafter reads one more request, beside `n_busy` others, `n_read` of which it reads."""
        n_least = max(LEAST_READ, -(-(n_busy + 1) // READ_ONE_IN))
        return not self.rests or n_busy < READ_ONE_IN or n_read < n_least

    def tries(self, slots: Sequence[int], least: float) -> None:
        """These slots draft, to learn or to gain. It would pay in all slots if this share of the first tokens were right."""
        self._tried, self._missing = set(slots), least * len(slots)

    def judge(self, slot: int, n_right: int) -> None:
        """The verdict on a slot's draft."""
        if slot in self._tried:
            self._tried.discard(slot)
            self._missing -= n_right > 0

    @property
    def is_hopeful(self) -> bool:
        """The last drafts went as if they paid: others at once tell whether texts have changed."""
        return self._missing < 0 and not self._tried


class HostDrafts:
    """Decides by measuring whether drafts that the host makes beside the device are worth its time: an account of what it took, which accepted
    drafts pay with the time that they saved. While it rests, no text is looked up or entered. Times of rounds are the controller's, and so is
    the time that passes. Fixed lengths are drafted at any cost.
    """

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
        self.row_ms = max(0.0, c.costs.verify(busy + n_row) - c.costs.verify(busy)) / max(n_row, 1)
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
        if c.force is not None or not busy or not c.costs.verify.has_trusted:
            return 0.0
        return c.costs.verify(busy)
