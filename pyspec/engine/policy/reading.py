"""Whether the drafter reads new requests. Arithmetic only: no torch, and no clock.

A drafter that pairs tokens with the target's hidden states reads every token of a request, prompt and answer, whether it drafts or not: with
many streams a percent of the time or more. Where no draft has paid for long, that is given away. So it then reads a few requests, whose drafts
tell when texts or the load have changed, and no others. As soon as drafts pay again it reads all new requests, and the rest of those that run.
"""

from __future__ import annotations

from collections.abc import Sequence

REST_AFTER = 128  # choices without a draft that pays until new requests are not read; 0: all requests are read, always
FEW = 8  # so many requests at once are all read: that costs little, and few could tell of the others
LEAST_READ, READ_ONE_IN = 4, 8  # of more, so many are read, or one in this many
AWAKE, FORGET = (
    4.0,
    1 / 32,
)  # paying choices until all are read again, and what each other choice takes from their number


class DraftReading:
    """It rests while drafts do not pay.

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
        return not self.rests or n_busy < FEW or n_read < n_least

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
