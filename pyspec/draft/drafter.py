"""The contract of a drafter: its plan before it is loaded, and its calls in the loop.

A drafter is a module with `recognises`, `plan` and `load` (`DrafterModule`), found by its name in `pyspec.registry`. The rest of pyspec
knows no drafter: a load and the memory plan read its `DraftPlan`, and the loop calls a `Drafter`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from pyspec.config import EngineSettings
from pyspec.cuda.collective import Collective
from pyspec.cuda.ops.ahead.ref import Kept
from pyspec.draft.blocks import BlockLength
from pyspec.errors import ConfigError
from pyspec.gguf import GGUFFile
from pyspec.models.model import ModelSpec
from pyspec.models.part import AttentionShape, LoadTypes, Request
from pyspec.models.target import Matrix, Out, Target
from pyspec.models.wants import Want
from pyspec.registry import SUFFIX
from pyspec.slots.arena import Arena
from pyspec.slots.batch import Batch
from pyspec.slots.drafts import DraftDraw, Drafts, DraftsAhead
from pyspec.slots.kv_types import TYPES, KvFormat
from pyspec.slots.memory import Memory, allocate
from pyspec.slots.parts import CacheSizes, LayerParts, PartMemory
from pyspec.slots.table import Slot, SlotTable

OWN_HEAD = "the drafter has a head of its own"

# -- before it is loaded ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Needs:
    """A drafter's wants from the engine, as data that the planner reads before the first round.

    n_draft   most tokens it proposes per slot and round
    taps      target layers whose outputs it reads after each forward
    overhang  KV rows beyond the committed tokens it writes while drafting
    chained   the cost of a draft grows with its length (MTP); otherwise it is paid once (DFlash block)
    block     how long its blocks are; None: its drafts are not blocks
    late      `absorb` leaves batches of one row a sequence for later
    hidden    `observe` reads the target's hidden states, and may keep them
    observes_taps  `observe` reads the taps of every forward; with `late` it does of those it left for later
    n_ctx     tokens of a context, of which it drafts the last ones and none beyond; 0: of any context
    n_trained  tokens of a context that it was trained for; 0: unknown
    tells     `draft` can give the probability of each token (`Drafts.sure`)
    on_host   `draft` works on the host alone, and may find nothing
    draws     how it can draw its tokens: the value of --spec-draft-sampling that it was planned for, or argmax
    """

    n_draft: int
    taps: tuple[int, ...] = ()
    overhang: int = 0
    chained: bool = False
    block: BlockLength | None = None
    late: bool = False
    hidden: bool = False
    observes_taps: bool = False
    n_ctx: int = 0
    n_trained: int = 0
    tells: bool = False
    on_host: bool = False
    draws: str = "argmax"


@dataclass(frozen=True, slots=True)
class TargetFile:
    """The target as a drafter sees it before anything is loaded. device: the one that both will run on."""

    file: GGUFFile
    config: ModelSpec
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


def _no_requests(on: LoadTypes) -> Iterable[Request]:
    return ()


def _fits() -> str:
    return ""


@dataclass(frozen=True, kw_only=True)
class DraftPlan:
    """A drafter as data, for the memory plan and the layout of the loop.

    kind       its name in the registry, or "none"
    needs      the `needs` that it will have
    file       where its weights are: the target's own file if they stand in there, None if it has none
    layers     memory of each of its layers in the target's pages
    attention  shapes of its attention: partial sums of it need room
    wants      the tensors that it reads of its file
    requests   ops that its load asks for, products apart, so that they are compiled and checked in time
    n_held     rows of taps that it keeps for later, all slots together
    n_waiting  rows of one slot that it leaves for later at most, and then computes at once
    n_late     rows of a slot that may wait in records of its recurrent layers, if it has any
    graph_bytes  of its graphs, if it has any: results and temporary memory
    no_copy    why its drafts can not read a copy of the target's head in fewer bits; "": they can
    shared     tensors of its file that it takes from the target, where they are the same
    best_only  of the target's head it wants the best tokens and no more: several ranks find them together
    maps_tokens  it maps the vocabulary of its file to the target's, so the two may differ
    check      refuses what a plan does not look at, because that takes long: called once for a load; adds to `remark`
    remark     the end of the line that names it
    n_suffix   tokens of the longest suffix draft (`suffix_drafts`), which goes beside it; 0: there are none
    n_rank     ranks that divide it by the cuts of `wants`: layers, attention and bytes are those of one; 1: it is whole, on the first rank
    load_share  loads the part of another rank than the first
    """

    kind: str
    needs: Needs
    file: GGUFFile | None = None
    layers: tuple[LayerParts, ...] = ()
    attention: tuple[AttentionShape, ...] = ()
    wants: Mapping[str, Want] = field(default_factory=dict)
    requests: Callable[[LoadTypes], Iterable[Request]] = _no_requests
    n_held: int = 0
    n_waiting: int = 0
    n_late: int = 0
    graph_bytes: int = 0
    no_copy: str = ""
    shared: tuple[str, ...] = ()
    best_only: bool = False
    maps_tokens: bool = False
    check: Callable[[], str] = _fits
    remark: str = ""
    n_suffix: int = 0
    n_rank: int = 1
    load_share: Callable[[DraftPlan, Target, SlotTable, DraftOptions], DraftShare] | None = None

    @property
    def n_draft(self) -> int:
        """Tokens of the longest draft, by the drafter or by suffixes."""
        return max(self.needs.n_draft, self.n_suffix)

    @property
    def note(self) -> str:
        """One line that names the drafter."""
        if self.kind == "none":
            return f"speculation: off {self.remark}"
        suffixes = f"up to {self.n_suffix} tokens a round"
        if self.kind == SUFFIX:
            return f"speculation: {SUFFIX}, {suffixes}"
        own = f"speculation: {self.kind}, up to {self.needs.n_draft} tokens a round{self.remark}"
        if self.needs.draws != "argmax":
            own += f"; {self.needs.draws} drafts where requests are sampled"
        return f"{own}; {SUFFIX}, {suffixes}" if self.n_suffix else own


NO_DRAFTER = DraftPlan(
    kind="none",
    needs=Needs(0),
    no_copy="nothing drafts",
    remark=f"(no drafter); --spec-type {SUFFIX} needs no file",
)
ONLY_SUFFIXES = DraftPlan(kind=SUFFIX, needs=Needs(0), no_copy="suffix drafts need no head")


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """Choices of the whole load that count for a drafter, too.

    dense  the dtype matrices are unpacked to; None: they stay packed
    wide   packed matrices have an f16 copy for wide batches
    head   read in place of the target's head; one of its own goes before it
    best   where several ranks read the target's head together: rows [row, n_embd] f32 -> their best tokens [row] int64
    lead   sends a divided drafter's commands to the other ranks
    arena  on another rank than the first: where batches lie that the first one has in an arena
    """

    settings: EngineSettings
    dense: torch.dtype | None
    wide: bool = False
    head: Matrix | None = None
    best: Callable[[Tensor], Tensor] | None = None
    lead: DraftLead | None = None
    arena: Arena | None = None

    @property
    def kv(self) -> KvFormat:
        return draft_format(self.settings)


def draft_format(s: EngineSettings) -> KvFormat:
    """The types of a drafter's keys and values: those of the target where settings name no others."""
    own = KvFormat.named(s.kv_type, s.kv_type_v)
    k = own.k if s.draft_kv_type is None else TYPES[s.draft_kv_type]
    v = own.v if s.draft_kv_type is None else k
    return KvFormat(k, v if s.draft_kv_type_v is None else TYPES[s.draft_kv_type_v])


class DrafterModule(Protocol):
    """The module behind a drafter's name."""

    def recognises(self, file: GGUFFile) -> bool:
        """Whether it can draft with this file: one that was given for it, or the target's own."""
        ...

    def plan(self, file: GGUFFile | None, target: TargetFile, settings: EngineSettings) -> DraftPlan:
        """Everything that can be refused is refused here, with the numbers: nothing has been allocated yet.

        file  the one that was given for the drafter, if any
        """
        ...

    def load(self, plan: DraftPlan, target: Target, table: SlotTable, options: DraftOptions) -> Drafter:
        """The drafter, on the target's device, as it was planned."""
        ...


def refuse_file(kind: str, file: GGUFFile | None) -> None:
    """For drafters that have no weights: a file that was given is a mistake."""
    if file is not None:
        raise ConfigError(f"a draft file is given, but --spec-type is {kind}; drop one of them")


def own_memory(plan: DraftPlan, table: SlotTable, options: DraftOptions, device: torch.device) -> Memory:
    """Memory of the drafter's layers; pages have the target's numbers."""
    n_slot, width = len(table.slots), plan.n_draft + 1
    sizes = CacheSizes(
        n_slot, table.n_alloc_row, table.page_size, width, kv=options.kv, n_late=plan.n_late
    )
    return allocate(plan.layers, sizes, device)


# -- calls of the loop -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Draft at most `n_draft` tokens after `anchor`, the slot's last sampled token (position slot.n_past).

    tells  with the probability of each, where the drafter can
    draw   None: the most likely tokens
    """

    slot: Slot
    anchor: int
    n_draft: int
    tells: bool = False
    draw: DraftDraw | None = None


class Drafter(Protocol):
    """State per slot only; a slot's state is tagged with the slot's generation."""

    name: str
    needs: Needs

    def begin(self, slot: Slot, saved: object | None) -> None:
        """A request starts on `slot`, whose first slot.n_past tokens are reused: their rows stand in the slot's pages.

        `saved` is a result of `checkpoint` for exactly these tokens in some slot, or None if there is none.
        It may be handed out again, so it is never changed.
        """
        ...

    def absorb(self, batch: Batch, out: Out) -> None:
        """Device work on every row of the forward, before it is known which rows are kept. May be captured in a graph. Of several ranks the logits are
        this one's columns; in `observe` they are whole, or none (Out.whole)."""
        ...

    def observe(self, batch: Batch, kept: Sequence[int], out: Out) -> None:
        """The target ran `batch`; of sequence s the first kept[s] rows are committed. Keeps the draft state fresh.

        Called after every forward, drafted or not, before the slots' tokens are extended. The hidden states of `out` are its to
        keep if it needs them; the rest is overwritten next.
        """
        ...

    def draft(self, requests: Sequence[DraftRequest]) -> Sequence[Drafts]:
        """Proposals per request, each at most its n_draft long; shorter and empty ones are allowed. Their tokens are the target's."""
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

    def pools(self) -> Iterable[PartMemory]:
        """Every cache that has pages, so that a page is copied whole."""
        ...


@runtime_checkable
class PortableDrafter(Protocol):
    """A drafter whose share of a checkpoint can be kept in a file; of any other the share is left out, and it begins anew."""

    @property
    def share_shape(self) -> tuple[int, ...]:
        """Dimensions of a share, in f32."""
        ...

    def share_tensor(self, saved: object) -> Tensor:
        """The result of `checkpoint`, as a tensor."""
        ...

    def share_of(self, n_past: int, packed: Tensor) -> object:
        """The share, at so many tokens, that `share_tensor` made this of; `begin` takes it."""
        ...


@runtime_checkable
class LookaheadDrafter(Protocol):
    """A drafter that can go on from the rows that the device keeps of a verify, before the host has read them."""

    def draft_ahead(self, batch: Batch, out: Out, kept: Kept, n_draft: int) -> DraftsAhead | None:
        """Drafts on the device for every sequence of the verify that ran `batch`, behind the rows that are `kept` of it. None if it can not: the host asks for drafts when it has read the verify.

        Each slot stands where the verify began. Nothing it knows of a slot changes before `confirm_ahead`: these drafts may turn out to
        be for tokens that the slot never has.
        """
        ...

    def confirm_ahead(self, slots: Sequence[Slot]) -> None:
        """The verify is observed and committed: the drafts of `draft_ahead` were for the tokens that these slots have now."""
        ...


@runtime_checkable
class FollowingDrafter(Protocol):
    """A drafter that can draft behind tokens of which only the device knows some: the first one behind a prompt."""

    def draft_behind(self, slots: Sequence[Slot], kept: Kept, n_draft: int) -> DraftsAhead | None:
        """Drafts on the device for every slot, behind one token of each: the one that follows the row of the slot in `kept`. All tokens before
        it are observed and committed. None if it can not: the host asks for drafts when it knows all tokens.

        Nothing it knows of a slot changes before `LookaheadDrafter.confirm_ahead`, but for rows of committed tokens.
        """
        ...


@runtime_checkable
class WindowedDrafter(Protocol):
    """A drafter whose drafts can see less than the whole text."""

    def set_window(self, slot: Slot, n: int) -> None:
        """From now on the request's drafts see the last `n` tokens, or all if it is 0. A draft that is made ahead may see some more."""
        ...


@runtime_checkable
class JoiningDrafter(Protocol):
    """A drafter that can begin in the middle of a text."""

    @property
    def can_join(self) -> bool:
        """It reads every token of a request, which takes its time, and needs none of them."""
        ...

    def hide(self, slot: Slot, n: int) -> None:
        """It has no rows of the text's first `n` tokens: the request's drafts see none of them."""
        ...


@runtime_checkable
class GraphedDrafter(Protocol):
    """A drafter whose passes can run as CUDA graphs."""

    def use_graphs(self, make_arena: Callable[[], Arena]) -> None:
        """Lay batches out in arenas of its own from now on."""
        ...

    def capture(self) -> None:
        """Capture the graphs of every number of slots now. All slots are idle, and forget the rows of these calls."""
        ...


# -- a drafter that ranks divide ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DraftCommand:
    """A command of the first rank's part to the others'. Each drafter has its own, as plain integers."""


class DraftLead(Protocol):
    """Sends commands to the other ranks. has_accepted: they have counted the kept rows of the verify that ran last."""

    ranks: Collective
    has_accepted: bool

    def send(self, command: DraftCommand) -> None:
        """Send a command to all of them, in order."""
        ...

    def together(self, command: DraftCommand) -> AbstractContextManager[None]:
        """Have them run a command beside the body. An exception in the body ends all ranks."""
        ...


@runtime_checkable
class DividedDrafter(Protocol):
    """The first rank's part of a drafter that ranks divide. The target's memory has its pages (`Memory.beside`)."""

    lead: DraftLead

    def forget(self) -> None:
        """Free its graphs, which hold sums of ranks. Nothing is captured after this."""
        ...


class DraftShare(Protocol):
    """Another rank's part. It decides nothing.

    drafts  [seq, n] int64: the tokens that all ranks found last
    """

    needs: Needs
    drafts: Tensor | None

    def absorb(self, batch: Batch, out: Out) -> None:
        """As of `Drafter`."""
        ...

    def obey(self, command: DraftCommand, kept: Kept | None) -> None:
        """Run one command. kept: the rows of the last verify, as this rank has counted them."""
        ...


@runtime_checkable
class CheckedDrafter(Protocol):
    """A drafter that can check, on the target's text, whether it reads the layers it was trained on."""

    def check(self, target: Target, slot: Slot, tokens: Sequence[int]) -> str | None:
        """A warning, or None. tokens: greedy text of the target. `slot` is seated, empty, and emptied again afterwards."""
        ...
