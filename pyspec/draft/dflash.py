"""DFlash drafter: one forward proposes a whole block.

The drafter keeps, for every committed token, keys and values made from the target's tapped layer outputs ("context").
A draft runs one block of B rows: the anchor and B-1 mask tokens; row r proposes the token at its own position. Full
layers see the context and the whole block; sliding layers are causal in the block and windowed. Shorter drafts are cut from
the block, which is itself shorter where many slots draft (`blocks`), and only their rows go through the head. Embedding and head
are the target's unless the file has its own. Rounds without drafts only keep their taps: the context of many rounds is made
in one pass, before the next draft, before pages are filed, or when the place is full. Source: arXiv:2602.06036. `dflash_file` reads
the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyspec.config import EngineSettings
from pyspec.cpu.tensors import picked
from pyspec.cuda.graph import Graphed, copied
from pyspec.cuda.ops.ahead.op import ahead
from pyspec.cuda.ops.ahead.ref import AheadSpec, Kept
from pyspec.cuda.ops.norms.op import norms
from pyspec.cuda.ops.norms.ref import NormsSpec
from pyspec.draft.blocks import FEW_ROWS, FEW_ROWS_CPU, BlockLength
from pyspec.draft.dflash_file import ARCHS, DFlashConfig, check_pair, drafter_tensors, read_config
from pyspec.draft.dflash_net import DFlashNet, attention_in
from pyspec.draft.drafter import OWN_HEAD, Drafter, DraftOptions, DraftPlan, TargetFile, own_memory
from pyspec.draft.draws import Draws, draw_bytes
from pyspec.draft.tap_shift import run_by_shift, verdict
from pyspec.errors import ConfigError
from pyspec.gguf import GGUFFile
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.convolved import Convolved
from pyspec.models.checks import check_read, check_tensors
from pyspec.models.cuts import flaws
from pyspec.models.gathered import shared
from pyspec.models.kernels import kernels, program_of
from pyspec.models.own_vocabulary import D2T
from pyspec.models.part import LoadTypes, Request
from pyspec.models.ropes import flags_of
from pyspec.models.target import Out, Target
from pyspec.models.wants import Want
from pyspec.models.weights import Weights, cuts_of
from pyspec.slots.arena import BUCKETS, Arena, bucket_of, graph_shapes, most_rows, places_of
from pyspec.slots.batch import Batch, Seq, lay_out
from pyspec.slots.drafts import NO_DRAFTS, DraftRequest, Drafts, DraftsAhead
from pyspec.slots.parts import PartMemory
from pyspec.slots.table import Slot, SlotTable

N = TypeVar("N", bound=DFlashNet)

MOST_RANKS = 64  # that divide a drafter; 1: it is whole, on the first one
N_HELD = BUCKETS[-1]  # rows of taps that are kept at most, those of one graph


def held_rows(n_slot: int) -> int:
    """Rows of taps that are kept for later; none where a few rounds would fill the place, because that gains nothing."""
    return N_HELD if 4 * n_slot <= N_HELD else 0


def recognises(file: GGUFFile) -> bool:
    return file.architecture in ARCHS


def plan(file: GGUFFile | None, target: TargetFile, settings: EngineSettings) -> DraftPlan:
    if file is None:
        raise ConfigError("--spec-type dflash needs a draft file (-md)")
    c = read_config(file)
    wants = drafter_tensors(c, file, target.config.n_embd)
    return block_plan(c, file, target, settings, wants)


def requests(c: DFlashConfig, file: GGUFFile, on: LoadTypes) -> Iterator[Request]:
    """The ops that the drafter's layers ask for; its products are those of its file."""
    for i, block in enumerate(c.blocks):
        at = c.place(file, i)
        yield from kernels([program_of(block.forward, at, on)])
        if isinstance(spec := block.specs[0], Attention | Convolved):
            yield from kernels([program_of(attention_in(spec).write, at, on, c.n_embd, 1)])
    yield norms, NormsSpec(on.device, c.n_embd, c.eps)


def block_plan(
    c: DFlashConfig,
    file: GGUFFile,
    target: TargetFile,
    settings: EngineSettings,
    wants: Mapping[str, Want],
    kind: str = "dflash",
    requests: Callable[[Any, GGUFFile, LoadTypes], Iterable[Request]] = requests,
) -> DraftPlan:
    """The plan of a drafter whose drafts are blocks. wants: the tensors of its file; requests: the ops of its configuration"""
    check_pair(c, file, target.config)
    check_tensors(file, wants, c.alias)
    check_read(file, (*wants, D2T), len(c.windows), c.alias)
    n_rank = ranks_of(c, file, wants, settings)
    c = c.share(n_rank)
    n, most = settings.n_draft_max, c.most
    block = BlockLength(c.block, FEW_ROWS_CPU if target.device.type == "cpu" else FEW_ROWS)
    n_held = held_rows(settings.np)
    has_head = "output.weight" in file.tensors
    is_drawn = settings.draft_sampling != "argmax"
    best_only = not has_head and not c.adds_scores and settings.draft_p_min <= 0 and not is_drawn
    return DraftPlan(
        kind=kind,
        n_draft=min(n or most, most),
        taps=c.taps,
        block=block,
        n_trained=c.n_trained,
        tells=_tells(c, settings, n_rank, best_only=best_only),
        draws=settings.draft_sampling,
        file=file,
        layers=tuple(block.memory() for block in c.blocks),
        attention=(c.attention,),
        wants=wants,
        requests=partial(requests, c, file),
        n_held=n_held,
        graph_bytes=_graph_bytes(c, block, settings.np, min(n or most, most), n_held)
        + draw_bytes(settings, min(n or most, most), target.config.n_vocab),
        no_copy=OWN_HEAD if has_head else c.adds_scores,
        best_only=best_only,
        n_rank=n_rank,
        remark=f", n_draft {n} lowered to {most} (block {c.block})" if n > most else "",
    )


def ranks_of(
    c: DFlashConfig, file: GGUFFile, wants: Mapping[str, Want], settings: EngineSettings
) -> int:
    """Ranks that divide the drafter: those of the target, or 1 if it does not divide by them or the first one reads a whole head."""
    n = settings.tp
    is_whole = (
        not c.divides
        or "output.weight" in file.tensors
        or settings.draft_head not in ("auto", "full")
        or (settings.draft_p_min > 0 and not c.tells_in_parts)
        or settings.draft_sampling != "argmax"
    )
    return 1 if not 1 < n <= MOST_RANKS or is_whole or next(flaws(file, cuts_of(wants), n), "") else n


def _tells(c: DFlashConfig, settings: EngineSettings, n_rank: int, *, best_only: bool) -> bool:
    """Whether drafts tell their probabilities. Those that depend on the drafts before may not cut drafts that are judged by their own."""
    if c.adds_scores and settings.draft_sampling == "probabilistic":
        return False
    return c.tells_in_parts if n_rank > 1 else settings.tp == 1 or not best_only


def block_shapes(
    n_slot: int, block: BlockLength, n_draft: int, most: int
) -> dict[tuple[int, int], tuple[int, int]]:
    """By rows and places of a graph: (slots, rows of each) of one draft that finds it. n_draft: of the longest; most: rows of the largest graph."""
    found = {}
    for n in range(1, n_slot + 1):
        for rows in {block.rows(n, length) for length in range(1, n_draft + 1)}:
            if (bucket := bucket_of(n * rows, most)) is not None:
                places = next((places for places in places_of(n_slot, bucket) if places >= n), n_slot)
                found[bucket, places] = n, rows
    return found


def _graph_bytes(c: DFlashConfig, block: BlockLength, n_slot: int, n_draft: int, n_held: int) -> int:
    """Of the graphs of blocks, which keep their rows, and of the graphs that make context of held taps."""
    shapes = block_shapes(n_slot, block, n_draft, most_rows(n_slot, max(n_draft + 1, c.block)))
    kept = 4 * c.n_embd * sum(bucket for bucket, _ in shapes)
    row = c.row_bytes
    taken_in = n_held * (4 * len(c.taps) * c.n_embd + row)
    return kept + max((bucket for bucket, _ in shapes), default=0) * row + taken_in


class DFlash(Drafter):
    """Drafts a whole block by one forward."""

    runs_ahead = has_windows = checks = True

    def __init__(
        self, net: DFlashNet, plan: DraftPlan, table: SlotTable, device: torch.device, p_min: float
    ) -> None:
        self.net = net
        self.plan = plan
        self.table = table
        self.device = device
        self.p_min = p_min
        self.ahead = ahead.bind(AheadSpec(device))
        n_slot = len(table.slots)
        # Taps of rounds without drafts
        self.held = torch.zeros(plan.n_held, net.n_feature, device=device)
        self.n_held = 0
        # Where in `held` those of the slot's last tokens are
        self.late: list[list[int]] = [[] for _ in table.slots]
        self.arena: Arena | None = None
        self.block, self.inject = Graphed(net.forward), Graphed(self._inject)
        self.n_context = [0] * n_slot  # tokens of the slot that have context rows, or taps in `held`
        self.generation = [-1] * n_slot
        self.windows = [0] * n_slot  # tokens that the slot's drafts see; 0: all

    @property
    def length(self) -> BlockLength:
        assert self.plan.block is not None
        return self.plan.block

    def use_graphs(self, make_arena: Callable[[], Arena | None]) -> None:
        self.arena = make_arena()

    @torch.inference_mode()
    def capture(self) -> None:
        n_slot = len(self.table.slots)
        for n, rows in self._shapes():
            seqs = [Seq(i, 0, [self.net.c.mask_id] * rows) for i in range(n)]
            for _ in range(2):
                self.block(lay_out(self.table, seqs, self.device, see_block=True, arena=self.arena))
        self.block.seal()
        # for libraries, which prepare themselves once
        for n_draft in sorted({1, self.plan.n_draft // 2 or 1, self.plan.n_draft}):
            n_row, n_embd = n_slot * self.net.c.block, self.net.c.n_embd
            given = torch.zeros(n_row, dtype=torch.int64, device=self.device)
            self._tokens(torch.zeros(n_row, n_embd, device=self.device), n_slot, n_draft, given)
        for n_row, n_seq in (
            sorted(graph_shapes(n_slot, BUCKETS[-1]), reverse=True) if self.plan.n_held else ()
        ):
            shares = [n_row // n_seq + (i < n_row % n_seq) for i in range(n_seq)]
            if self.table.n_page < n_seq * self.table.pages_for(shares[0]):
                return  # too small a pool to try them all: they are captured as they come
            seqs = [Seq(i, 0, [0] * n) for i, n in enumerate(shares)]
            for _ in range(2):
                self.inject(lay_out(self.table, seqs, self.device, arena=self.arena))
        self.inject.seal()

    def _shapes(self) -> list[tuple[int, int]]:
        """(slots, rows of each) of drafts: one for every graph, and all slots' longest, which may be too many rows for one."""
        n_slot = len(self.table.slots)
        most = BUCKETS[-1] if self.arena is None else self.arena.n_row
        found = block_shapes(n_slot, self.length, self.plan.n_draft, most)
        shapes = [found[key] for key in sorted(found, reverse=True)]
        return [*shapes, (n_slot, self.length.rows(n_slot, self.plan.n_draft))]

    def begin(self, slot: Slot, saved: object | None) -> None:
        self._forget(slot)
        self.windows[slot.index] = 0
        self.n_context[slot.index], self.generation[slot.index] = slot.n_past, slot.generation

    @torch.inference_mode()
    def absorb(self, batch: Batch, out: Out) -> None:
        """Context rows for all rows. Those of refused drafts lie beyond the slot's length and are never read.

        In a round without drafts `observe` keeps the taps instead.
        """
        assert out.taps is not None
        if not (self.plan.n_held and batch.single):
            self.net.inject(out.taps, batch.kv_rows, batch.positions)

    def observe(self, batch: Batch, kept: Sequence[int], out: Out) -> None:
        late = self.plan.n_held > 0 and batch.single
        # These rows have their context already; held taps are always of a slot's last tokens
        if not late:
            self.catch_up()
        for s, seq in enumerate(batch.seqs):
            slot = self.table.slots[seq.slot]
            assert (
                self.generation[seq.slot] == slot.generation and self.n_context[seq.slot] == seq.n_past
            ), (
                f"draft context of slot {seq.slot} ends at {self.n_context[seq.slot]}, its tokens at {seq.n_past}"
            )
            self.n_context[seq.slot] += kept[s]
            if late:
                first = self.n_held + batch.starts[s]
                self.late[seq.slot] += range(first, first + kept[s])
        if late:
            self._hold(out, batch.n_row)

    @torch.inference_mode()
    def _hold(self, out: Out, n_row: int) -> None:
        """Keep the taps of a forward, which the next one overwrites, and have room for another one's."""
        assert out.taps is not None
        copied(out.taps[:n_row], self.held[self.n_held : self.n_held + n_row])
        self.n_held += n_row
        if self.n_held + len(self.late) > len(self.held):
            self.catch_up()

    def catch_up(self) -> None:
        """Context rows for every token whose taps are held."""
        if not self.n_held:
            return
        seqs = []
        for slot, at in zip(self.table.slots, self.late, strict=True):
            if at:
                assert self.generation[slot.index] == slot.generation, (
                    f"taps of slot {slot.index} are stale"
                )
                # no token is looked at here: in their place stands where the taps are
                seqs.append(Seq(slot.index, self.n_context[slot.index] - len(at), at))
        with torch.inference_mode():
            self.inject(lay_out(self.table, seqs, self.device, arena=self.arena))
        self.late, self.n_held = [[] for _ in self.late], 0

    def _inject(self, batch: Batch) -> None:
        """Context rows from held taps; padding reads those of some row and writes to the null row."""
        self.net.inject(picked(self.held, batch.tokens), batch.kv_rows, batch.positions)

    def _forget(self, slot: Slot) -> None:
        """Drop the slot's held taps: their context will not be read."""
        self.late[slot.index] = []
        if not any(self.late):
            self.n_held = 0

    @torch.inference_mode()
    def draft(self, requests: Sequence[DraftRequest]) -> list[Drafts]:
        live = [r for r in requests if r.n_draft > 0]
        if not live:
            return [NO_DRAFTS for _ in requests]
        for r in live:
            assert self.n_context[r.slot.index] == r.slot.n_past, f"slot {r.slot.index} drafts blind"
        self.catch_up()
        most = max(r.n_draft for r in live)
        batch = self._lay_out([r.slot for r in live], [r.anchor for r in live], most)
        tells = self.plan.tells and any(r.tells for r in live)
        draws = Draws.of(live, most, self.net.drawing)
        block = self.block(batch)
        tokens, probs = self._tokens(block, len(live), most, batch.tokens, tells=tells, draws=draws)
        q = {} if draws is None else draws.kept(live)
        flat, sure = _read(tokens, probs)
        drafts = {}
        for i, r in enumerate(live):
            first = i * most
            own = None if sure is None else sure[first : first + r.n_draft]
            n = next((at for at, p in enumerate(own or ()) if p < self.p_min), r.n_draft)
            of_slot = q.get(r.slot.index)
            given = own if self.plan.tells else None
            drafts[r.slot.index] = Drafts(flat[first : first + n], of_slot, sure=given).first(n)
        return [drafts.get(r.slot.index, NO_DRAFTS) for r in requests]

    def _lay_out(
        self,
        slots: Sequence[Slot],
        anchors: Sequence[int],
        n_draft: int,
        slack: Sequence[int] = (),
        back: int = 0,
    ) -> Batch:
        masks = [self.net.c.mask_id] * (self.length.rows(len(slots), n_draft) - 1)
        seqs = [
            Seq(
                slot.index,
                slot.n_past - back,
                [anchor, *masks],
                slack=more,
                first_key=self._first_key(slot),
            )
            for slot, anchor, more in zip(slots, anchors, slack or [0] * len(slots), strict=True)
        ]
        return lay_out(self.table, seqs, self.device, see_block=True, arena=self.arena)

    def _first_key(self, slot: Slot) -> int:
        window = self.windows[slot.index]
        return max(0, slot.n_past - window) if window else 0

    def set_window(self, slot: Slot, n: int) -> None:
        self.windows[slot.index] = n

    @torch.inference_mode()
    def draft_ahead(self, batch: Batch, out: Out, kept: Kept, n_draft: int) -> DraftsAhead | None:
        slots = [self.table.slots[seq.slot] for seq in batch.seqs]
        # a batch of one row a sequence has left its taps for later
        has_context = all(self.n_context[slot.index] == slot.n_past for slot in slots)
        if self.p_min > 0 or self.n_held or (self.plan.n_held and batch.single) or not has_context:
            return None
        return self._moved(slots, kept, n_draft, [seq.width for seq in batch.seqs])

    @torch.inference_mode()
    def draft_behind(self, slots: Sequence[Slot], kept: Kept, n_draft: int) -> DraftsAhead | None:
        if self.p_min > 0 or any(self.n_context[slot.index] != slot.n_past for slot in slots):
            return None
        self.catch_up()
        return self._moved(slots, kept, n_draft, [1] * len(slots), back=1)

    def _moved(
        self, slots: Sequence[Slot], kept: Kept, n_draft: int, widths: Sequence[int], back: int = 0
    ) -> DraftsAhead:
        """Drafts of blocks that the device moves behind the kept ones of `widths` rows, which began `back` positions before the slots' ends."""
        blocks = self._lay_out(slots, [0] * len(slots), n_draft, widths, back)
        moved = self.ahead.move(blocks, kept)
        tokens, _ = self._tokens(self.block(moved), len(slots), n_draft, moved.tokens)
        return DraftsAhead(tokens.view(len(slots), n_draft))

    def _tokens(
        self,
        block: Tensor,
        n_seq: int,
        n_draft: int,
        given: Tensor,
        *,
        tells: bool = False,
        draws: Draws | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """[seq * n_draft]: the drafts of each block, and their probabilities if they are wanted. given [row] int64: the blocks' input,
        whose first tokens are the anchors."""
        n_row = self.length.rows(n_seq, n_draft)
        rows = block[: n_seq * n_row].view(n_seq, n_row, -1)
        anchors = given[: n_seq * n_row : n_row].contiguous()
        tells = tells or self.p_min > 0
        return self.net.drafts(rows, n_draft, anchors, tells=tells, draws=draws)

    def checkpoint(self, slot: Slot) -> object | None:
        if self.late[slot.index]:
            self.catch_up()
        return None  # the pages have all there is

    def check(self, target: Target, slot: Slot, tokens: Sequence[int]) -> str | None:
        n_draft = self.plan.n_draft
        return verdict(run_by_shift(self.net, n_draft, target, self.table, slot, tokens))

    def pools(self) -> Iterable[PartMemory]:
        # those of a divided one stand beside the target's
        return () if self.plan.is_divided else self.net.memory.paged

    def forget(self) -> None:
        self.block.forget()
        self.inject.forget()

    def end(self, slot: Slot) -> None:
        self._forget(slot)
        self.generation[slot.index] = -1


def _read(tokens: Tensor, probs: Tensor | None) -> tuple[list[int], list[float] | None]:
    """Both on the host, by one transfer."""
    if probs is None:
        return tokens.tolist(), None
    both = torch.stack([tokens.double(), probs.double()]).tolist()
    return [int(token) for token in both[0]], both[1]


def load(plan: DraftPlan, target: Target, table: SlotTable, options: DraftOptions) -> DFlash:
    net = bind(plan, target, table, options)
    return DFlash(net, plan, table, target.device, options.settings.draft_p_min)


def bind(plan: DraftPlan, target: Target, table: SlotTable, options: DraftOptions) -> DFlashNet:
    """The layers of this rank on the target's device."""
    assert plan.file is not None
    return bound(DFlashNet, read_config(plan.file), plan, target, table, options)


def bound(
    kind: Callable[..., N],
    c: DFlashConfig,
    plan: DraftPlan,
    target: Target,
    table: SlotTable,
    options: DraftOptions,
) -> N:
    """kind: DFlashNet or one made of it. Its layers on this rank, with memory of their own."""
    assert plan.file is not None
    device, ranks = target.device, target.ranks if plan.n_rank > 1 else None
    rope, cuts = flags_of(options.settings), cuts_of(plan.wants)
    of = options.of_weights
    weights = Weights(plan.file, device, alias=c.alias, ranks=ranks, cuts=cuts, rope=rope, **of)
    memory = own_memory(plan, table, options, device)
    net = kind(c.share(plan.n_rank), weights, memory, target, options.head)
    if ranks is not None:
        net.parts = shared(target.output)
        assert net.parts is not None, "ranks divide a drafter that reads the target's head"
        target.memory.beside = list(memory.paged)
    elif plan.best_only:
        net.find_best = options.best
    return net
