"""Drafters that are always wrong, always right, wild, fickle or broken, and a target whose text is known."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from pyspec.cuda.ops.ahead.ref import Kept
from pyspec.draft.drafter import Drafter, DraftPlan
from pyspec.errors import SlotError
from pyspec.models.target import Out
from pyspec.slots.batch import Batch
from pyspec.slots.drafts import DraftRequest, Drafts, DraftsAhead
from pyspec.slots.kv import KvFormat, KVPool
from pyspec.slots.memory import Memory
from pyspec.slots.table import Slot, SlotTable

Text = Callable[[Sequence[int]], int]
N_VOCAB = 300
EOG = frozenset((294, 296))  # of the fixtures' vocabulary


def next_of(tokens: Sequence[int]) -> int:
    """The FakeTarget's next token: a hash of everything before."""
    return zlib.crc32(bytes(b for t in tokens for b in t.to_bytes(2, "little"))) % N_VOCAB


def text_after(prompt: Sequence[int], n: int) -> list[int]:
    """The FakeTarget's text with ignore_eos: end tokens are banned and all others are equal, so 0 wins."""
    tokens = list(prompt)
    for _ in range(n):
        token = next_of(tokens)
        tokens.append(0 if token in EOG else token)
    return tokens[len(prompt) :]


def ending_text_after(prompt: Sequence[int], n: int) -> list[int]:
    """The same with end tokens, and the tokens that would follow them."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(next_of(tokens))
    return tokens[len(prompt) :]


class FakeTarget:
    """Implements `Target`. It stores token ids in place of keys, and reads them back through the page table.

    Its text differs from `text_after` if a single page, row, range or position is wrong.
    """

    n_vocab, n_embd, n_layer = N_VOCAB, 8, 1
    device = torch.device("cpu")
    most_captured_prompt = 0

    def __init__(self, table: SlotTable) -> None:
        self.pool = KVPool(table.n_row, 1, 1, KvFormat.named("f32"), self.device)
        self.pool.k.fill_(float("nan"))
        self.memory = Memory([{"kv": self.pool}], 1)
        self.widths: list[list[int]] = []

    def run(self, batch: Batch, taps: Sequence[int] = ()) -> Out:
        self.widths.append([seq.width for seq in batch.seqs])
        ids = batch.tokens.float().view(-1, 1, 1)
        self.pool.write(batch.kv_rows, ids, torch.zeros_like(ids))
        wanted = set(batch.out_rows.tolist())
        logits = []
        for s in range(len(batch.seqs)):
            pages = batch.page_table[s].tolist()
            for row in range(batch.starts[s], batch.starts[s + 1]):
                if row in wanted:
                    here = range(int(batch.lo[row]), int(batch.hi[row]))
                    at = [
                        pages[p // batch.page_size] * batch.page_size + p % batch.page_size for p in here
                    ]
                    logits.append(self._logits(self.pool.k[torch.tensor(at)].view(-1)))
        rows = torch.zeros(batch.n_row, self.n_embd)
        return Out(
            torch.stack(logits) if logits else torch.zeros(0, N_VOCAB), rows, rows if taps else None
        )

    @staticmethod
    def _logits(seen: Tensor) -> Tensor:
        out = torch.zeros(N_VOCAB)
        if torch.isnan(seen).any():
            return out.fill_(float("nan"))  # it read a row that was never written
        out[next_of([int(t) for t in seen.tolist()])] = 9.0
        return out

    def embed(self, tokens: Tensor) -> Tensor:
        return torch.zeros(tokens.shape[0], self.n_embd)

    def head(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape[0], N_VOCAB)


@dataclass
class FakeDrafter(Drafter):
    """Base of the fakes: counts begin and end, and checks that it observes every committed token."""

    n_draft: int = 5
    open: dict[int, int] = field(default_factory=dict)  # slot: tokens it has observed

    def __post_init__(self) -> None:
        self.plan = DraftPlan(kind="fake", n_draft=self.n_draft)

    def begin(self, slot: Slot, saved: object | None) -> None:
        assert slot.index not in self.open, "begun twice"
        self.open[slot.index] = slot.n_past

    def observe(self, batch: Batch, kept: Sequence[int], out: Out) -> None:
        for seq, n in zip(batch.seqs, kept, strict=True):
            assert 0 <= n <= seq.width
            assert self.open[seq.slot] == seq.n_past, (
                f"slot {seq.slot}: heard {self.open[seq.slot]}, at {seq.n_past}"
            )
            self.open[seq.slot] += n

    def draft(self, asks: Sequence[DraftRequest]) -> list[Drafts]:
        for ask in asks:
            assert self.open[ask.slot.index] == ask.slot.n_past
        return [Drafts(self.guess(ask)) for ask in asks]

    def guess(self, ask: DraftRequest) -> list[int]:
        return []  # no drafts

    def end(self, slot: Slot) -> None:
        del self.open[slot.index]


@dataclass
class Oracle(FakeDrafter):
    """Always right. `text(tokens, n)` gives the n tokens that follow."""

    text: Callable[[Sequence[int], int], list[int]] = text_after

    def guess(self, ask: DraftRequest) -> list[int]:
        return self.text([*ask.slot.tokens, ask.anchor], ask.n_draft)


@dataclass
class Liar(Oracle):
    """Always wrong: every draft is refused whole."""

    def guess(self, ask: DraftRequest) -> list[int]:
        return [(t + 1) % N_VOCAB for t in super().guess(ask)]


@dataclass
class Wild(Oracle):
    """Right until it proposes an invalid token."""

    wild: tuple[int, ...] = (-1, N_VOCAB, 2**31, -(2**63), 2**64)
    n_round: int = 0

    def guess(self, ask: DraftRequest) -> list[int]:
        self.n_round += 1
        at = self.n_round % (ask.n_draft + 1)
        return [
            *super().guess(ask)[:at],
            self.wild[self.n_round % len(self.wild)],
            *super().guess(ask)[at:],
        ]


@dataclass
class Fickle(Oracle):
    """Any length, none and too many included; right for a random stretch."""

    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def guess(self, ask: DraftRequest) -> list[int]:
        right = super().guess(ask)[: self.rng.randint(0, ask.n_draft)]
        return [*right, *self.rng.choices(range(N_VOCAB), k=self.rng.randint(0, 4))]


@dataclass
class Ahead(Fickle):
    """As Fickle, but on the device, behind the rows that a verify keeps; one of seven slots needs the host.

    n_ahead: drafts made ahead, and those that `confirm_ahead` confirmed for the right text
    """

    runs_ahead: ClassVar[bool] = True
    tokens: dict[int, list[int]] = field(default_factory=dict)  # by slot, for which the last drafts were
    slots: dict[int, Slot] = field(default_factory=dict)
    n_ahead: int = 0
    right: int = 0

    def draft_ahead(self, batch: Batch, out: Out, kept: Kept, n_draft: int) -> DraftsAhead | None:
        if self.rng.randrange(7) == 0:
            return None
        n, tokens, drafts = kept.n.tolist(), batch.tokens.tolist(), []
        for s, (seq, first) in enumerate(zip(batch.seqs, batch.starts, strict=False)):
            slot = self.slots[seq.slot]
            assert self.open[seq.slot] == slot.n_past == seq.n_past
            own = [*slot.tokens, *tokens[first : first + n[s]], int(kept.tokens[kept.last[s]])]
            self.tokens[seq.slot] = own
            right = self.text(own, n_draft)[: self.rng.randint(0, n_draft)]
            drafts.append([*right, *self.rng.choices(range(N_VOCAB), k=n_draft)][:n_draft])
            self.n_ahead += 1
        return DraftsAhead(torch.tensor(drafts))

    def confirm_ahead(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            assert self.open[slot.index] == slot.n_past
            assert slot.tokens == self.tokens[slot.index][:-1], (
                f"slot {slot.index} went on from another text"
            )
            self.right += 1

    def begin(self, slot: Slot, saved: object | None) -> None:
        super().begin(slot, saved)
        self.slots[slot.index] = slot


@dataclass
class Broken(Fickle):
    """Fails every third time."""

    n_round: int = 0

    def draft(self, asks: Sequence[DraftRequest]) -> list[Drafts]:
        self.n_round += 1
        if self.n_round % 3 == 0:
            raise SlotError("the drafter has a bad day")
        return super().draft(asks)


FAKES: dict[str, type[Oracle]] = {"oracle": Oracle, "liar": Liar, "wild": Wild, "fickle": Fickle, "broken": Broken, "ahead": Ahead}  # fmt: skip
