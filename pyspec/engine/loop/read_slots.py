"""Slots whose requests the drafter reads: all, or a few while its drafts do not pay (`DraftReading`).

A request that is not read has no draft state and never drafts, so its text, pages and checkpoints are those of an engine without a drafter. The
prefix cache marks its pages (`Node.n_unread`): the drafter sees nothing of them in a later request. When drafts pay again, the drafter
joins the requests that run where they stand.
"""

from __future__ import annotations

from collections.abc import Iterable

from pyspec.device.worker import Worker
from pyspec.draft.drafter import Drafter
from pyspec.engine.policy.controller import Controller
from pyspec.repeats import limited
from pyspec.slots.batch import Seq
from pyspec.slots.prefix import unread_end
from pyspec.slots.table import Slot

log = limited(__name__)


class ReadSlots:
    """Begins and joins requests for the drafter.

    unread    slots whose requests it does not read; the controller reads this set, too
    disk      where pages go without their marks: with one every request is read
    """

    def __init__(self, worker: Worker, controller: Controller) -> None:
        self.worker, self.controller = worker, controller
        self.unread = controller.unread
        self.disk: object | None = None
        self._logged_rest = False  # the log says that it rests
        self._hidden: dict[int, int] = {}  # by slot: tokens at the begin that it has no rows of
        self._joined: set[int] = set()  # slots of which it has seen no token yet since it joined

    @property
    def joining(self) -> Drafter | None:
        """The drafter, if it can begin in the middle of a text."""
        drafter = self.worker.drafter
        return drafter if drafter is not None and drafter.can_join else None

    def begin(self, slot: Slot, saved: object | None, n_unread: int) -> None:
        """Begin a request, or leave it unread. saved: the drafter's share of the cached prefix, of which it has not read the first `n_unread`
        tokens."""
        self.end(slot)  # of a request that did not begin well
        busy = [s.index for s in self.worker.table.slots if s.busy and s is not slot]
        n_read = sum(index not in self.unread for index in busy)
        may_rest = self.joining is not None and self.disk is None
        if may_rest and not self.controller.reading.wants(n_read, len(busy)):
            if not self._logged_rest:
                log.info("drafts have not paid for long: the drafter reads few of the new requests")
            self._logged_rest = True
            self.unread.add(slot.index)
            return
        self._log_if_awake()
        self._start(slot, saved, n_unread)

    def _log_if_awake(self) -> None:
        if self._logged_rest and not self.controller.reading.rests:
            self._logged_rest = False
            log.info("drafts pay again: the drafter reads all requests that may draft")

    def _start(self, slot: Slot, saved: object | None, n_unread: int) -> None:
        assert self.worker.drafter is not None
        self.worker.drafter.begin(slot, saved)
        self._hide(slot, n_unread)

    def _hide(self, slot: Slot, n: int) -> None:
        if n > self._hidden.get(slot.index, 0):
            self._hidden[slot.index] = n
            if self.joining is not None:
                self.joining.hide(slot, n)

    def join(self, slot: Slot) -> None:
        """Read the request from here on."""
        self._log_if_awake()
        self.unread.discard(slot.index)
        self._joined.add(slot.index)
        self._start(slot, None, slot.n_past)

    def may_draft(self, slot: Slot) -> bool:
        """It has the hidden state of the last token: False between joining a request and its next round."""
        return slot.index not in self._joined

    def observed(self, seqs: Iterable[Seq]) -> None:
        """It has seen the rows of these sequences."""
        if self._joined:
            self._joined.difference_update(seq.slot for seq in seqs)

    def n_unread(self, slot: Slot) -> int:
        """Tokens at the begin of the slot's text of which the drafter has no rows."""
        return slot.n_past if slot.index in self.unread else self._hidden.get(slot.index, 0)

    def filed(self, slot: Slot) -> None:
        """The slot reads pages of other requests where they have the same tokens: their rows may not be the drafter's."""
        if self.worker.table.has_unread and slot.index not in self.unread:
            self._hide(slot, unread_end(slot.nodes))

    def end(self, slot: Slot) -> None:
        """The slot's request has ended."""
        self.unread.discard(slot.index)
        self._joined.discard(slot.index)
        self._hidden.pop(slot.index, None)
