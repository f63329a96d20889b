"""What the loop asks of a drafter. Drafters are objects the loop calls, never branches it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from pyspec.cuda.ops.ahead.ref import Kept
from pyspec.models.target import Out
from pyspec.slots.arena import Arena
from pyspec.slots.batch import Batch
from pyspec.slots.parts import PartMemory
from pyspec.slots.table import Slot


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter wants from the rest, as data the planner reads before the first round.

    n_draft   most tokens it proposes per slot and round
    taps      target layers whose outputs it reads after each forward
    overhang  KV rows beyond the committed tokens it writes while drafting
    chained   the cost of a draft grows with its length (MTP); otherwise it is paid once (DFlash block)
    late      `absorb` leaves batches of one row a sequence for later
    hidden    `observe` reads the target's hidden states
    """

    n_draft: int
    taps: tuple[int, ...] = ()
    overhang: int = 0
    chained: bool = False
    late: bool = False
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Draft at most `n_draft` tokens after `anchor`, the slot's last sampled token (position slot.n_past)."""

    slot: Slot
    anchor: int
    n_draft: int


class Drafter(Protocol):
    """State per slot only; a slot's state is tagged with the slot's generation."""

    name: str
    needs: Needs

    def begin(self, slot: Slot, saved: object | None) -> None:
        """A request starts on `slot`, whose first slot.n_past tokens are reused: their rows stand in the slot's pages.

        `saved` is what `checkpoint` returned for exactly these tokens in some slot, or None if there is nothing of the kind.
        It may be handed out again: nobody changes it.
        """
        ...

    def absorb(self, batch: Batch, out: Out) -> None:
        """Device work on every row of the forward, before anybody knows which are kept. May be captured in a graph."""
        ...

    def observe(self, batch: Batch, kept: Sequence[int], out: Out) -> None:
        """The target ran `batch`; of sequence s the first kept[s] rows are committed. Keeps the draft state fresh.

        Called after every forward, drafted or not, before the slots' tokens are extended. The hidden states of `out` are its to
        keep if it needs them; the rest is overwritten next.
        """
        ...

    def draft(self, asks: Sequence[DraftRequest]) -> list[list[int]]:
        """Proposals per ask, each at most its n_draft long; shorter and empty ones are allowed."""
        ...

    def checkpoint(self, slot: Slot) -> object | None:
        """What `begin` needs to continue from the slot's present length, beyond its KV pages.

        The pages are filed next: the drafter's rows of all committed tokens must stand there when this returns.
        """
        ...

    def end(self, slot: Slot) -> None:
        """The request is over. Exactly once per `begin`."""
        ...


@runtime_checkable
class PagedDrafter(Protocol):
    """A drafter with caches of its own, whose pages have the target's numbers."""

    def pools(self) -> Iterable[PartMemory]: ...


@runtime_checkable
class LookaheadDrafter(Protocol):
    """A drafter that can go on from what the device keeps of a verify, before the host has read it."""

    def draft_ahead(self, batch: Batch, out: Out, kept: Kept, n_draft: int) -> Tensor | None:
        """Drafts [seq, n_draft] int64, on the device, for every sequence of the verify that ran `batch`, behind the rows that are
        `kept` of it. None if it can not: the host asks for drafts when it has read the verify.

        Each slot stands where the verify began. Nothing it knows of a slot changes before `confirm_ahead`: these drafts may turn out to
        be for tokens that the slot never has.
        """
        ...

    def confirm_ahead(self, slots: Sequence[Slot]) -> None:
        """The verify is observed and committed: what `draft_ahead` made was for the tokens that these slots have now."""
        ...


@runtime_checkable
class GraphedDrafter(Protocol):
    """A drafter whose passes can run as CUDA graphs."""

    def use_graphs(self, make_arena: Callable[[], Arena]) -> None:
        """Lay batches out in arenas of its own from now on."""
        ...

    def capture(self) -> None:
        """Capture the graphs of every number of slots now. All slots are idle; what it leaves in them is forgotten."""
        ...
