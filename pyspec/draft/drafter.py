"""The contract of a drafter: its plan before it is loaded, and its calls in the loop.

A drafter is a module with `recognises`, `plan` and `load` (`DrafterModule`), found by its name in `pyspec.registry`. The rest of pyspec
knows no drafter: a load and the memory plan read its `DraftPlan`, and the loop calls a `Drafter`. One that reads nothing but tokens is a
`HostDrafter` (host.py), which `OnHost` brings to the loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from pyspec.config import EngineSettings
from pyspec.cuda.movable import EMPTIED, movable
from pyspec.cuda.ops.ahead.ref import Kept
from pyspec.draft.blocks import BlockLength
from pyspec.draft.host import HostDrafter
from pyspec.errors import ConfigError
from pyspec.gguf import GGUFFile
from pyspec.models.model import ModelSpec
from pyspec.models.part import AttentionShape, LoadTypes, Request
from pyspec.models.placement import ON_CARD, Placement
from pyspec.models.target import Matrix, Out, Target
from pyspec.models.wants import Want
from pyspec.registry import SUFFIX
from pyspec.slots.arena import Arena
from pyspec.slots.batch import Batch
from pyspec.slots.drafts import DraftRequest, Drafts, DraftsAhead
from pyspec.slots.kv_types import TYPES, KvFormat
from pyspec.slots.memory import Memory, allocate
from pyspec.slots.parts import CacheSizes, LayerParts, PartMemory
from pyspec.slots.table import Slot, SlotTable

OWN_HEAD = "the drafter has a head of its own"

# -- before it is loaded ---------------------------------------------------------------------------------------------


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
    """A drafter as data, for the memory plan and for the loop.

    kind       its name in the registry, or "none"
    n_draft    most tokens that it proposes per slot and round
    taps       target layers whose outputs it reads after each forward
    observes   what `observe` reads of every forward, and may keep: "hidden", "taps", or "" for neither
    block      how long its blocks are; None: its drafts are not blocks
    n_held     rows of taps that it keeps for later, all slots together: `absorb` leaves batches of one row a sequence, `observe` reads their taps
    n_waiting  rows of one slot that it leaves for later at most, and then computes at once; 0: it is no chain
    n_ctx      tokens of a context, of which it drafts the last ones and none beyond; 0: of any context
    n_trained  tokens of a context that it was trained for; 0: unknown
    tells      `draft` can give the probability of each token (`Drafts.sure`)
    draws      how it can draw its tokens: the value of --spec-draft-sampling that it was planned for, or argmax
    file       where its weights are: the target's own file if they stand in there, None if it has none
    layers     memory of each of its layers in the target's pages
    attention  shapes of its attention: partial sums of it need room
    wants      the tensors that it reads of its file
    requests   ops that its load asks for, products apart, so that they are compiled and checked in time
    n_late     rows of a slot that may wait in records of its recurrent layers, if it has any
    graph_bytes  of its graphs, if it has any: results and temporary memory
    no_copy    why its drafts can not read a copy of the target's head in fewer bits; "": they can
    shared     tensors of its file that it takes from the target, where they are the same
    best_only  of the target's head it wants the best tokens and no more: several ranks find them together
    maps_tokens  it maps the vocabulary of its file to the target's, so the two may differ
    placeholder  the target's token that it reads for a row of a picture; None: it reads the row as the target does, or no tokens
    check      refuses what a plan does not look at, because that takes long: called once for a load; adds to `remark`
    remark     the end of the line that names it
    n_suffix   tokens of the longest suffix draft (`suffix_drafts`), which goes beside it; 0: there are none
    n_rank     ranks that divide it by the cuts of `wants`, and call it alike: layers, attention and bytes are those of one, and the target's memory
               has its pages (`Memory.beside`); 1: it is whole, on the first rank
    """

    kind: str
    n_draft: int = 0
    taps: tuple[int, ...] = ()
    observes: Literal["hidden", "taps", ""] = ""
    block: BlockLength | None = None
    n_held: int = 0
    n_waiting: int = 0
    n_ctx: int = 0
    n_trained: int = 0
    tells: bool = False
    draws: str = "argmax"
    file: GGUFFile | None = None
    layers: tuple[LayerParts, ...] = ()
    attention: tuple[AttentionShape, ...] = ()
    wants: Mapping[str, Want] = field(default_factory=dict)
    requests: Callable[[LoadTypes], Iterable[Request]] = _no_requests
    n_late: int = 0
    graph_bytes: int = 0
    no_copy: str = ""
    shared: tuple[str, ...] = ()
    best_only: bool = False
    maps_tokens: bool = False
    placeholder: int | None = None
    check: Callable[[], str] = _fits
    remark: str = ""
    n_suffix: int = 0
    n_rank: int = 1

    @property
    def is_divided(self) -> bool:
        return self.n_rank > 1

    @property
    def longest(self) -> int:
        """Tokens of the longest draft, by the drafter or by suffixes."""
        return max(self.n_draft, self.n_suffix)

    @property
    def is_chain(self) -> bool:
        """The cost of a draft grows with its length (MTP); otherwise it is paid once (DFlash's block)."""
        return self.n_waiting > 0

    @property
    def overhang(self) -> int:
        """Rows of keys and values beyond the committed tokens that it writes while drafting."""
        if self.block is not None:
            return self.block.trained
        return self.n_draft + 1 if self.is_chain else 0

    @property
    def note(self) -> str:
        """One line that names the drafter."""
        if self.kind == "none":
            return f"speculation: off {self.remark}"
        suffixes = f"up to {self.n_suffix} tokens a round"
        if self.kind == SUFFIX:
            return f"speculation: {SUFFIX}, {suffixes}"
        own = f"speculation: {self.kind}, up to {self.n_draft} tokens a round{self.remark}"
        if self.draws != "argmax":
            own += f"; {self.draws} drafts where requests are sampled"
        return f"{own}; {SUFFIX}, {suffixes}" if self.n_suffix else own


NO_DRAFTER = DraftPlan(
    kind="none", no_copy="nothing drafts", remark=f"(no drafter); --spec-type {SUFFIX} needs no file"
)
ONLY_SUFFIXES = DraftPlan(kind=SUFFIX, no_copy="suffix drafts need no head")


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """Choices of the whole load that count for a drafter, too.

    dense  the dtype matrices are unpacked to; None: they stay packed
    wide   packed matrices have an f16 copy for wide batches
    head   read in place of the target's head; one of its own goes before it
    best   where several ranks read the target's head together: rows [row, n_embd] f32 -> their best tokens [row] int64
    placement  its feed-forwards that are in host memory
    """

    settings: EngineSettings
    dense: torch.dtype | None
    wide: bool = False
    head: Matrix | None = None
    best: Callable[[Tensor], Tensor] | None = None
    placement: Placement = ON_CARD

    @property
    def kv(self) -> KvFormat:
        return draft_format(self.settings)

    @property
    def of_weights(self) -> dict[str, Any]:
        """What `Weights` of a drafter's file take of the load, by name."""
        return {"dense": self.dense, "wide": self.wide, "placement": self.placement}


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
    n_slot, width = len(table.slots), plan.longest + 1
    sizes = CacheSizes(
        n_slot, table.n_alloc_row, table.page_size, width, kv=options.kv, n_late=plan.n_late
    )
    with movable(device, EMPTIED):
        return allocate(plan.layers, sizes, device)


# -- calls of the loop -----------------------------------------------------------------------------------------------


class Drafter(ABC):
    """Base class of drafters: what a drafter can not do has a default here, so the loop asks none for its kind.

    It has state per slot only; a slot's state is tagged with the slot's generation.

    plan         as it was planned
    on_host      `draft` works on the host alone, and may find nothing
    runs_ahead   `draft_ahead`, `draft_behind` and `confirm_ahead` are its own
    has_windows  `set_window` is its own: its drafts can see less than the whole text
    has_share    its share of a checkpoint can be kept in a file; else it is left out there, and the drafter begins anew
    checks       `check` is its own
    """

    plan: DraftPlan
    on_host = False
    runs_ahead = False
    has_windows = False
    has_share = False
    checks = False

    @property
    def name(self) -> str:
        return self.plan.kind

    # -- a request -----------------------------------------------------------------------------------------------

    def begin(self, slot: Slot, saved: object | None) -> None:
        """A request starts on `slot`, whose first slot.n_past tokens are reused: their rows stand in the slot's pages.

        `saved` is a result of `checkpoint` for exactly these tokens in some slot, or None if there is none.
        It may be handed out again, so it is never changed.
        """

    def checkpoint(self, slot: Slot) -> object | None:
        """What `begin` needs to continue from the slot's present length, beyond its KV pages.

        The pages are filed next: the drafter's rows of all committed tokens must stand there when this returns.
        """
        return None

    def end(self, slot: Slot) -> None:
        """The request is over. Exactly once per `begin`."""

    @property
    def can_join(self) -> bool:
        """It can begin in the middle of a text: it reads every token of a request, which takes its time, and needs none of them."""
        return False

    def hide(self, slot: Slot, n: int) -> None:
        """Of one that can join: it has no rows of the text's first `n` tokens, and the request's drafts see none of them."""

    def set_window(self, slot: Slot, n: int) -> None:
        """From now on the request's drafts see the last `n` tokens, or all if it is 0. A draft that is made ahead may see some more."""

    # -- a round -------------------------------------------------------------------------------------------------

    def absorb(self, batch: Batch, out: Out) -> None:
        """Device work on every row of the forward, before it is known which rows are kept. May be captured in a graph. Of several ranks the logits are
        this one's columns; in `observe` they are whole, or none (Out.whole)."""

    def observe(self, batch: Batch, kept: Sequence[int], out: Out) -> None:
        """The target ran `batch`; of sequence s the first kept[s] rows are committed. Keeps the draft state fresh.

        Called after every forward, drafted or not, before the slots' tokens are extended. What of `out` the plan `observes` is its to
        keep; the rest is overwritten next.
        """

    @abstractmethod
    def draft(self, requests: Sequence[DraftRequest]) -> Sequence[Drafts]:
        """Proposals per request, each at most its n_draft long; shorter and empty ones are allowed. Their tokens are the target's."""

    def draft_ahead(self, batch: Batch, out: Out, kept: Kept, n_draft: int) -> DraftsAhead | None:
        """Drafts on the device for every sequence of the verify that ran `batch`, behind the rows that are `kept` of it, before the host has read
        them. None if it can not: the host asks for drafts when it has read the verify.

        Each slot stands where the verify began. Nothing it knows of a slot changes before `confirm_ahead`: these drafts may turn out to
        be for tokens that the slot never has.
        """
        return None

    def draft_behind(self, slots: Sequence[Slot], kept: Kept, n_draft: int) -> DraftsAhead | None:
        """Drafts on the device for every slot, behind one token of each that only the device knows: the one that follows the row of the slot in
        `kept`, the first one behind a prompt. All tokens before it are observed and committed. None if it can not: the host asks for
        drafts when it knows all tokens.

        Nothing it knows of a slot changes before `confirm_ahead`, but for rows of committed tokens.
        """
        return None

    def confirm_ahead(self, slots: Sequence[Slot]) -> None:
        """The verify is observed and committed: the drafts of `draft_ahead` were for the tokens that these slots have now."""

    # -- its memory ----------------------------------------------------------------------------------------------

    def pools(self) -> Iterable[PartMemory]:
        """Every cache of its own that has pages, so that a page is copied whole. Pages have the target's numbers."""
        return ()

    @property
    def share_shape(self) -> tuple[int, ...]:
        """Dimensions of its share of a checkpoint in a file, in f32."""
        return ()

    def share_tensor(self, saved: object) -> Tensor:
        """The result of `checkpoint`, as a tensor. TypeError without `has_share`."""
        raise TypeError(f"{self.name} keeps no share of a checkpoint in files")

    def share_of(self, n_past: int, packed: Tensor) -> object:
        """The share, at so many tokens, that `share_tensor` made this of; `begin` takes it. TypeError without `has_share`."""
        raise TypeError(f"{self.name} keeps no share of a checkpoint in files")

    # -- before the first round, and behind the last one ------------------------------------------------------------

    def use_graphs(self, make_arena: Callable[[], Arena | None]) -> None:
        """Lay batches out in arenas of its own from now on, so that its passes can run as CUDA graphs."""

    def capture(self) -> None:
        """Capture the graphs of every number of slots now. All slots are idle, and forget the rows of these calls."""

    def check(self, target: Target, slot: Slot, tokens: Sequence[int]) -> str | None:
        """Check, on the target's text, whether it reads the layers it was trained on. Returns a warning, or None.

        tokens: greedy text of the target. `slot` is seated, empty, and emptied again afterwards.
        """
        return None

    def forget(self) -> None:
        """Of a divided one: free its graphs, which hold sums of ranks. Nothing is captured after this."""


# -- a drafter on the host ---------------------------------------------------------------------------------------------


class OnHost(Drafter):
    """Calls a `HostDrafter`, which sees nothing of the device."""

    on_host = True

    def __init__(self, kind: str, drafter: HostDrafter) -> None:
        self.plan, self.drafter = host_plan(kind, drafter.n_draft), drafter

    def begin(self, slot: Slot, saved: object | None) -> None:
        self.drafter.begin(slot)

    def draft(self, requests: Sequence[DraftRequest]) -> Sequence[Drafts]:
        return self.drafter.draft(requests)

    def end(self, slot: Slot) -> None:
        self.drafter.end(slot)


def host_plan(kind: str, n_draft: int) -> DraftPlan:
    """The plan of a drafter on the host."""
    return DraftPlan(kind=kind, n_draft=n_draft, no_copy=f"{kind} drafts need no head")


@dataclass(frozen=True)
class HostModule:
    """The module of a `HostDrafter` as a `DrafterModule`: it is for no file, and needs no memory of a device."""

    kind: str
    module: Any

    def recognises(self, file: GGUFFile) -> bool:
        """Never: it drafts for any target, but only if it is asked for by name."""
        return False

    def plan(self, file: GGUFFile | None, target: TargetFile, settings: EngineSettings) -> DraftPlan:
        """ConfigError for a file: it has no weights."""
        refuse_file(self.kind, file)
        return host_plan(self.kind, settings.n_draft_max or self.module.N_DRAFT)

    def load(self, plan: DraftPlan, target: Target, table: SlotTable, options: DraftOptions) -> Drafter:
        return OnHost(self.kind, self.module.host_drafter(plan.n_draft, options.settings))
