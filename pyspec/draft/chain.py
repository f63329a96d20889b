"""A chained drafter: a block that makes the next token's hidden state out of the last one's, called once for every drafted token.

Row p of the block pairs token x_p with the hidden state h_{p-1} and predicts x_{p+1}; row 0 pairs with zeros. The target's hidden
states are exact; behind them the block goes on from its own. Rows of committed tokens are computed once, from the target's
states, in the first pass of the next draft, together with the row of the anchor; the chained rows after it are scratch and are
overwritten. There may be a block for each of the first drafts; the last one makes all behind. A block that reads tokens alone (a draft model) has states of width 0, and its chained rows stay where the target took
their tokens. If it has recurrent layers, its chained rows are records (SeqMode.LATE): those of accepted drafts are folded before the
next exact rows, those of refused ones never. The chain knows a block by `models.target.MtpNet` only. Source: llama.cpp draft-mtp (positions), vLLM (schedule).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pyspec.cpu.tensors import picked
from pyspec.cuda.graph import Graphed, GraphPool, copied
from pyspec.cuda.ops.ahead.op import ahead
from pyspec.cuda.ops.ahead.ref import AheadSpec, Kept
from pyspec.draft.drafter import Drafter, DraftPlan
from pyspec.draft.draws import Drawing, Draws
from pyspec.draft.pending_rows import Pending, without_pictures
from pyspec.models.model import ModelSpec
from pyspec.models.target import MtpNet, Out
from pyspec.models.weight_bytes import row_bytes
from pyspec.slots.arena import BUCKETS, Arena, graph_shapes, most_rows
from pyspec.slots.batch import Batch, Seq, SeqMode, lay_out
from pyspec.slots.drafts import DraftRequest, Drafts, DraftsAhead
from pyspec.slots.kv import KVPool
from pyspec.slots.memory import KV, Checkpoint
from pyspec.slots.parts import PartMemory
from pyspec.slots.prefix import common_prefix
from pyspec.slots.table import Slot, SlotTable

MOST_WAITING = 16  # rows of a silent slot that wait at most: each costs the more the fewer of them are computed at once
PIECE = 512  # rows of a slot that are caught up on at once
LEAST_WAITING = 8  # with so many slots that no graph holds more of each


def most_waiting(n_slot: int) -> int:
    """Rows of a silent slot that wait at most."""
    return max(LEAST_WAITING, min(MOST_WAITING, BUCKETS[-1] // n_slot))


def graph_bytes(n_slot: int, width: int, config: ModelSpec, p_min: float, n_column: int = 0) -> int:
    """Of the graphs of all passes together. width: rows of a slot in a first pass. n_column: tokens of the head, if it is the drafter's own"""
    logits = 4 * n_slot * (n_column or config.n_vocab) * (2 if p_min > 0 else 1)
    return logits + most_rows(n_slot, width) * row_bytes(config.n_ff, config.n_embd)


def _is_plain(name: str, part: PartMemory) -> bool:
    return name == KV and isinstance(part, KVPool) and part.paged


class Chain(Drafter):
    """Drafts by one call of its block for every token.

    is_recurrent  its block has recurrent layers
    modes         of exact rows, of chained ones
    first_key     as of its block
    hidden_rows   by slot, rows at the begin of its text that were never computed: no other row sees them
    """

    runs_ahead = has_share = True
    is_recurrent, first_key = False, 0
    hidden_rows: Mapping[int, int] = {}
    modes = (SeqMode.VERIFY, SeqMode.VERIFY)

    def __init__(
        self,
        block: MtpNet,
        plan: DraftPlan,
        table: SlotTable,
        device: torch.device,
        p_min: float,
        n_vocab: int = 0,
        later: Sequence[MtpNet] = (),
    ) -> None:
        """n_vocab: of the target; without it each draft is the most likely token. later: the blocks of drafts behind the first, if they
        have their own; `block` makes their keys of its rows."""
        self.plan = plan
        self.most_waiting = plan.n_waiting
        self.block = block
        self.table = table
        self.device = device
        self.p_min = p_min
        self.ahead = ahead.bind(AheadSpec(self.device))
        self.memory, self.first_key = block.memory, block.first_key
        if self.memory.states:
            self.is_recurrent, self.modes = True, (SeqMode.KEEP, SeqMode.LATE)
        self.states: list[Pending | None] = [None] * len(table.slots)
        # Of the first pass, of the chained ones, of rows that are late
        self.arenas: list[Arena | None] = [None] * 3
        pool = GraphPool()  # all of them leave their results in the tensors below
        self._first, self._late = Graphed(self._start, pool=pool), Graphed(self._compute, pool=pool)
        steps = [partial(self._step, net=net) for net in later or (None,)]
        self._steps = tuple(
            Graphed(step, pool=pool) for step in steps
        )  # the last one as often as wanted
        # from one pass to the next, at fixed places for graphs; a first pass catches up on most_waiting rows at most
        n_row = max(len(table.slots) * (self.most_waiting + 1), most_rows(len(table.slots), self._width))
        self.tokens = torch.zeros(n_row, dtype=torch.int64, device=self.device)
        self.probs = torch.ones(n_row, device=self.device)
        self.hidden = torch.zeros(n_row, block.n_hidden, device=self.device)
        to_target = block.best.to_target
        self.drawing = (
            None
            if plan.draws == "argmax" or not n_vocab
            else Drawing.of(n_vocab, to_target, self.device)
        )
        n_own = n_vocab if to_target is None else len(to_target)
        n_kept = len(table.slots) * n_own if self.drawing is not None else 0
        self.logits, self.n_logit = torch.zeros(n_kept, device=self.device), n_own
        # Tokens by pass
        self.steps = torch.zeros(plan.longest, len(table.slots), dtype=torch.int64, device=self.device)

    @property
    def _width(self) -> int:
        """Rows of a slot in a first pass, most of the time at most."""
        return max(self.plan.n_draft + 1, self.most_waiting)

    def begin(self, slot: Slot, saved: object | None) -> None:
        self._show(slot)
        if isinstance(saved, Pending):
            self.states[slot.index] = Pending(slot.generation, saved.n_row, saved.hidden)
        elif self.is_recurrent:
            self._begin_state(slot, saved)
        else:  # cold start, or no hidden state at the reuse boundary: zeros cost one weaker row, never the text
            hidden = torch.zeros(1, self.block.n_hidden, device=self.device)
            self.states[slot.index] = Pending(slot.generation, slot.n_past, hidden)
        if not self.is_recurrent and self.memory.needs_state:
            beside = saved.beside if isinstance(saved, Pending) else None
            if beside is None:
                self.memory.reset(slot.index)
            else:
                self.memory.restore(slot.index, beside)

    def _begin_state(self, slot: Slot, saved: object | None) -> None:
        """Recurrent layers begin with a checkpoint of these tokens, or read them again."""
        n_row, i = 0, slot.index
        if isinstance(saved, Checkpoint):
            self.memory.restore(i, saved)
            n_row = saved.n_past
        else:
            self.memory.reset(i)
        self.states[i] = Pending(
            slot.generation, n_row, torch.zeros(slot.n_past - n_row + 1, 0, device=self.device)
        )

    def _state(self, slot: Slot) -> Pending:
        state = self.states[slot.index]
        assert state is not None and state.generation == slot.generation, (
            f"pending rows of slot {slot.index} are stale"
        )
        return state

    @torch.inference_mode()
    def observe(self, batch: Batch, kept: Sequence[int], out: Out) -> None:
        hidden, heard = self.block.states_of(out), []
        for s, seq in enumerate(batch.seqs):
            state = self._state(self.table.slots[seq.slot])
            if self.plan.placeholder is None:
                sources = {} if batch.pictures is None else batch.pictures.sources
                state.pictures.hear(seq, sources, state.n_row)
            # right after a draft nothing is pending: the one row there is was that of the anchor, which is exact
            is_pending = state.n_row <= seq.n_past
            n_right = 0 if is_pending else common_prefix(state.guess, seq.tokens[1 : kept[s]])
            state.n_row, state.n_fold, state.guess = state.n_row + n_right, state.n_fold + n_right, ()
            state.add(hidden, batch.starts[s] + n_right, batch.starts[s] + kept[s], after=is_pending)
            heard.append((state, seq, kept[s]))
        if not any(state.n_hidden > self.most_waiting for state, _, _ in heard):
            return
        late = []  # prompt chunks, and slots that have not drafted for a while; slots that would soon be late come along
        for state, seq, n in heard:
            if state.n_hidden > 1 and 2 * state.n_hidden > self.most_waiting:
                old = self.table.slots[seq.slot].tokens[state.n_row : seq.n_past]
                # Right after a draft the anchor's row is there
                new = seq.tokens[max(0, state.n_row - seq.n_past) : n]
                late.append((state, Seq(seq.slot, state.n_row, [*old, *new])))
        self._bring_up(late)

    def _bring_up(self, late: Sequence[tuple[Pending, Seq]]) -> None:
        """Compute the rows of committed tokens that wait: all but the newest hidden state of each have theirs."""
        while late:
            self._compute_rows([(state, replace(seq, tokens=seq.tokens[:PIECE])) for state, seq in late])
            late = [
                (state, replace(seq, n_past=seq.n_past + PIECE, tokens=seq.tokens[PIECE:]))
                for state, seq in late
                if seq.width > PIECE
            ]

    def _compute_rows(self, late: Sequence[tuple[Pending, Seq]]) -> None:
        if wanted := [(state, cut) for state, seq in late if (cut := self._within(seq)).width]:
            seqs = [replace(seq, mode=self.modes[0], n_fold=state.n_fold) for state, seq in wanted]
            rows = self._lay_out(seqs, self.arenas[2])
            hidden = [state.hidden[: seq.width] for state, seq in wanted]
            if rows.bucket is None:
                self.block.forward(rows, torch.cat(hidden))
            else:
                torch.cat(hidden, out=self.hidden[: rows.n_row])
                self._late(rows)
            for state, _ in wanted:
                state.n_fold = 0
        for state, seq in late:
            state.n_row, state.hidden = state.n_row + seq.width, state.hidden[seq.width :].clone()

    @property
    def can_join(self) -> bool:
        """Rows of its layers stand in pages and nowhere else, and each is seen by later ones alone."""
        parts = [part for layer in self.memory.layers for part in layer.items()]
        return self.block.n_hidden > 0 and bool(parts) and all(_is_plain(*part) for part in parts)

    def hide(self, slot: Slot, n: int) -> None:
        self._state(slot)
        most = max(n, self.hidden_rows.get(slot.index, 0))
        self.hidden_rows = {**self.hidden_rows, slot.index: most}

    def _lay_out(self, seqs: Sequence[Seq], arena: Arena | None) -> Batch:
        if hidden := self.hidden_rows:
            seqs = [replace(q, first_key=hidden[q.slot]) if q.slot in hidden else q for q in seqs]
        rows: dict[int, Tensor] = {}
        if self.plan.placeholder is None:
            waiting = [state.pictures for q in seqs if (state := self.states[q.slot]) is not None]
            rows = {handle: x for own in waiting for handle, x in own.rows.items()}
            seqs = [
                q if (state := self.states[q.slot]) is None else state.pictures.placed(q) for q in seqs
            ]
        seqs = [without_pictures(q, self.plan.placeholder or 0, rows) for q in seqs]
        return lay_out(
            self.table, seqs, self.device, arena=arena, first_key=self.first_key, pictures=rows
        )

    def _within(self, seq: Seq) -> Seq:
        """Its rows in the part of a context behind which drafts are made: no draft sees those beyond."""
        most = self.plan.n_ctx
        return replace(seq, tokens=seq.tokens[: max(0, most - seq.n_past)]) if most else seq

    @torch.inference_mode()
    def draft(self, requests: Sequence[DraftRequest]) -> list[Drafts]:
        drafts: dict[int, list[int]] = {r.slot.index: [] for r in requests}
        live = [r for r in requests if r.n_draft > 0 and not self._has_drafted(r, drafts)]
        q = self._chain(live, drafts) if live else {}
        return [Drafts(drafts[r.slot.index], q.get(r.slot.index)) for r in requests]

    def _has_drafted(self, r: DraftRequest, drafts: dict[int, list[int]]) -> bool:
        """Recurrent layers have the anchor's row already, because its draft was never verified: give what is left of that draft."""
        state = self._state(r.slot)
        if not self.is_recurrent or state.n_row <= r.slot.n_past:
            return False
        drafts[r.slot.index] = [*state.guess[: r.n_draft]]
        return True

    def _chain(self, live: list[DraftRequest], drafts: dict[int, list[int]]) -> dict[int, Tensor]:
        """All slots draft as far as the one that asked for most; nothing is read back before the end, or before p_min.

        Returns the probabilities of slots that need them.
        """
        self._bring_up([late for r in live if (late := self._too_late(r.slot)) is not None])
        seqs = []
        for r in live:
            slot, state = r.slot, self._state(r.slot)
            # Drafted before, but never verified: the anchor's row again
            state.n_row = min(state.n_row, slot.n_past)
            rows = [*slot.tokens[state.n_row :], r.anchor]
            seqs.append(Seq(slot.index, state.n_row, rows, self.modes[0], n_out=1, n_fold=state.n_fold))
        n_row = sum(seq.width for seq in seqs)
        torch.cat([self._state(r.slot).hidden for r in live], out=self.hidden[:n_row])
        self._first(self._lay_out(seqs, self.arenas[0]))
        # The anchor's row is exact, too: its token is final, its hidden state was the target's
        for r in live:
            state = self._state(r.slot)
            state.n_row, state.hidden, state.guess = r.slot.n_past + 1, state.hidden[-1:], ()
            state.n_fold = 0
        n = len(live)
        most = max(r.n_draft for r in live)
        done = 1
        draws = Draws.of(live, most, self.drawing)
        self._keep(n, 0, draws)
        sure = [self.probs[:n] >= self.p_min] if self.p_min > 0 else []
        rest = self._chained([r.slot for r in live], most) if most > 1 else None
        while done < most and (not sure or bool(sure[-1].any())):
            assert rest is not None
            self._pass(rest, done, draws)
            if sure:
                sure.append(sure[-1] & (self.probs[:n] >= self.p_min))
            done += 1
        lengths = torch.stack(sure).sum(0).tolist() if sure else [done] * n
        steps = self.steps[:done].tolist()
        for i, (r, length) in enumerate(zip(live, lengths, strict=True)):
            drafts[r.slot.index] = [step[i] for step in steps[: min(length, r.n_draft)]]
            if not self.block.n_hidden:  # of the last draft there is no row
                self._state(r.slot).guess = [step[i] for step in steps[:-1]]
        return {} if draws is None else draws.kept(live)

    def _too_late(self, slot: Slot) -> tuple[Pending, Seq] | None:
        """A slot's rows that are too many for a first pass: all of a prefix whose state was not kept."""
        state = self._state(slot)
        if state.n_hidden <= self.most_waiting + 1:
            return None
        return state, Seq(slot.index, state.n_row, slot.tokens[state.n_row :])

    def _chained(self, slots: Sequence[Slot], n: int, widths: Sequence[int] = ()) -> Batch:
        """The layout of the passes after the first, which move it on: `n` drafts behind each slot's tokens. Their own tokens are
        on the device. widths: of a verify behind whose kept rows it will be moved."""
        slack = [n - 1 + width for width in widths or [0] * len(slots)]
        n_fold = int(self.is_recurrent and bool(widths))  # the number of kept rows, once it is moved
        seqs = [
            Seq(slot.index, slot.n_past, [0], self.modes[1], 1, n_fold, more)
            for slot, more in zip(slots, slack, strict=True)
        ]
        return self._lay_out(seqs, self.arenas[1])

    def _keep(self, n: int, done: int, draws: Draws | None) -> None:
        """Keep the tokens of draft number `done` of n slots, which are drawn first if they are to be."""
        if draws is not None:
            logits, best = self.logits[: n * self.n_logit].view(n, -1), self.tokens[:n]
            copied(draws.take(done, logits, best), best)
        copied(self.tokens[:n], self.steps[done, :n])

    def _pass(self, batch: Batch, done: int, draws: Draws | None = None) -> None:
        """Draft number `done`, after those before."""
        n = len(batch.seqs)
        self._steps[min(done, len(self._steps)) - 1](batch)
        self._keep(n, done, draws)
        if self.is_recurrent:
            batch.seq_fold[:n] += 1  # its rows are records, which the next pass folds

    @torch.inference_mode()
    def draft_ahead(self, batch: Batch, out: Out, kept: Kept, n_draft: int) -> DraftsAhead | None:
        """The first pass has all rows of the verify, each with the token behind it; rows behind the kept ones are scratch."""
        slots = [self.table.slots[seq.slot] for seq in batch.seqs]
        if self.p_min > 0 or any(self._state(slot).n_row != slot.n_past + 1 for slot in slots):
            return None
        if batch.n_row > len(self.hidden):  # a verify of so many rows has no place here
            return None
        states = [self._state(slot) for slot in slots]
        seqs = [
            Seq(slot.index, slot.n_past + 1, [0] * q.width, n_out=1, n_fold=state.n_fold)
            for q, slot, state in zip(batch.seqs, slots, states, strict=True)
        ]
        for slot, state in zip(slots, states, strict=True):  # these are committed rows, whatever is kept
            state.n_fold, state.begun = 0, slot.n_past
        first = self._lay_out(seqs, self.arenas[0])
        self.ahead.follow(first, kept)
        copied(self.block.states_of(out)[: batch.n_row], self.hidden[: batch.n_row])
        self._first(first)
        copied(self.tokens[: len(slots)], self.steps[0, : len(slots)])
        if n_draft > 1:
            rest = self.ahead.move(
                self._chained(slots, n_draft, [seq.width for seq in batch.seqs]), kept
            )
        for done in range(1, n_draft):
            self._pass(rest, done)
        return DraftsAhead(self.steps[:n_draft, : len(slots)].T)

    @torch.inference_mode()
    def draft_behind(self, slots: Sequence[Slot], kept: Kept, n_draft: int) -> DraftsAhead | None:
        """The passes of `draft`: the first one has the rows that wait, and the anchors' as the device has them."""
        if self.p_min > 0 or self.is_recurrent:
            return None
        self._bring_up([late for slot in slots if (late := self._too_late(slot)) is not None])
        seqs = []
        for slot in slots:
            state = self._state(slot)
            state.n_row = min(state.n_row, slot.n_past)  # as in `draft`
            seqs.append(
                Seq(slot.index, state.n_row, [*slot.tokens[state.n_row :], 0], self.modes[0], n_out=1)
            )
        first = self._lay_out(seqs, self.arenas[0])
        n = len(slots)
        anchors = first.seq_start[1 : n + 1].long() - 1
        first.tokens.index_copy_(0, anchors, kept.tokens[kept.last])
        torch.cat([self._state(slot).hidden for slot in slots], out=self.hidden[: first.n_row])
        self._first(first)
        copied(self.tokens[:n], self.steps[0, :n])
        rest = self._chained(slots, n_draft) if n_draft > 1 else None
        for done in range(1, n_draft):
            assert rest is not None
            self._pass(rest, done)
        return DraftsAhead(self.steps[:n_draft, :n].T)

    def confirm_ahead(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            state = self._state(slot)
            state.n_row, state.hidden, state.guess = slot.n_past + 1, state.hidden[-1:], ()
            state.n_fold = slot.n_past - state.begun if self.is_recurrent else 0

    def _start(self, batch: Batch) -> None:
        """The first pass: exact rows up to the anchor's, `self.hidden` given by the host."""
        hidden = self.block.forward(batch, self.hidden[: batch.tokens.shape[0]])
        self._pick(picked(hidden, batch.out_rows[: batch.n_place]))

    def _compute(self, batch: Batch) -> None:
        """Exact rows from which nothing is drafted, `self.hidden` given by the host."""
        self.block.forward(batch, self.hidden[: batch.tokens.shape[0]])

    def _step(self, batch: Batch, net: MtpNet | None = None) -> None:
        """A chained pass: a row a slot, after the pass before and one position farther on. net: in place of the first block"""
        n, batch = batch.tokens.shape[0], self.ahead.step(batch)
        forward = (net or self.block).forward
        self._pick(forward(replace(batch, tokens=self.tokens[:n]), self.hidden[:n]), net)

    def _pick(self, hidden: Tensor, net: MtpNet | None = None) -> None:
        n = hidden.shape[0]
        logits = (net or self.block).propose(hidden, self.tokens[:n])
        if self.block.n_hidden:
            copied(hidden, self.hidden[:n])
        if self.p_min > 0:
            self.probs[:n] = logits.softmax(-1).amax(-1)
        if self.drawing is not None:  # draws come behind the graph, on request
            m, self.n_logit = min(n, len(self.table.slots)), logits.shape[1]
            copied(logits[:m], self.logits[: m * self.n_logit].view(m, -1))

    def use_graphs(self, make_arena: Callable[[], Arena | None]) -> None:
        self.arenas = [make_arena() for _ in self.arenas]

    @torch.inference_mode()
    def capture(self) -> None:
        n_slot, width = len(self.table.slots), self._width
        first = graph_shapes(
            n_slot, width, most=BUCKETS[-1] if self.arenas[0] is None else self.arenas[0].n_row
        )
        following = [(n, n) for n in sorted({min(n_slot, b) for b in BUCKETS})]
        # where rows wait they are not few: a slot that catches up has at least half of the rows that may wait
        late = [
            x
            for x in (
                []
                if not self.memory.parts
                else graph_shapes(n_slot, BUCKETS[-1], least=max(1, self.most_waiting // 2))
            )
            if x[0] >= self.most_waiting
        ]
        if self.table.n_page < max(
            n_seq * self.table.pages_for(-(-n_row // n_seq)) for n_row, n_seq in [*first, *late]
        ):
            return  # too few pages to try them all: they are captured as they come
        kept, scratch = self.modes
        passes = [
            (self._first, first, kept, self.arenas[0], 1),
            *((step, following, scratch, self.arenas[1], 1) for step in self._steps),
            (self._late, late, kept, self.arenas[2], 0),
        ]
        for graphed, shapes, mode, arena, n_out in passes:
            for n_row, n_seq in sorted(shapes, reverse=True):
                shares = [n_row // n_seq + (i < n_row % n_seq) for i in range(n_seq)]
                seqs = [Seq(i, 0, [0] * n, mode, n_out) for i, n in enumerate(shares)]
                for _ in range(2):
                    graphed(self._lay_out(seqs, arena))
        for graphed, *_ in passes:
            graphed.seal()

    @torch.inference_mode()
    def checkpoint(self, slot: Slot) -> object | None:
        state = self._state(slot)
        if self.is_recurrent and state.n_row > slot.n_past:
            return None  # the anchor is in the state already, which would have to be read again
        n_row = min(state.n_row, slot.n_past)  # a row beyond is the anchor's, which is not committed yet
        if tokens := slot.tokens[n_row:]:
            self._bring_up([(state, Seq(slot.index, n_row, tokens))])
        state.n_row, state.hidden = slot.n_past, state.hidden[-1:].clone()
        if self.is_recurrent:
            return self._kept_state(slot, state)
        # where no hidden state is read the pages have all there is
        if not self.block.n_hidden:
            return None
        kept = Pending(state.generation, state.n_row, state.hidden)
        if self.memory.needs_state:
            kept.beside = self.memory.checkpoint(slot.index, slot.n_past)
        return kept

    def _kept_state(self, slot: Slot, state: Pending) -> Checkpoint:
        for layer in self.memory.states.values():
            layer.fold(layer, slot.index, state.n_fold)
        state.n_fold = 0
        return self.memory.checkpoint(slot.index, slot.n_past)

    @property
    def share_shape(self) -> tuple[int, ...]:
        if self.is_recurrent:
            return (sum(t.numel() for t in self.memory.saved_like(1)),)
        return 1, self.block.n_hidden

    def share_tensor(self, saved: object) -> Tensor:
        if isinstance(saved, Checkpoint):
            return torch.cat([t.flatten() for t in saved.tensors])
        assert isinstance(saved, Pending)
        return saved.hidden

    def share_of(self, n_past: int, packed: Tensor) -> object:
        packed = packed.to(self.device)
        if not self.is_recurrent:
            return Pending(-1, n_past, packed)
        like = self.memory.saved_like(n_past)
        parts = packed.split([t.numel() for t in like])
        return Checkpoint(n_past, [part.view(t.shape) for part, t in zip(parts, like, strict=True)])

    def pools(self) -> Iterable[PartMemory]:
        return self.memory.paged

    def end(self, slot: Slot) -> None:
        self.states[slot.index] = None
        self._show(slot)

    def _show(self, slot: Slot) -> None:
        if slot.index in self.hidden_rows:
            self.hidden_rows = {i: n for i, n in self.hidden_rows.items() if i != slot.index}
