"""`ahead` on NVIDIA GPUs: one launch finds the accepted rows of a verify, and one moves each layout behind them (ahead.cu)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyspec.cuda.jit import KernelFile
from pyspec.cuda.ops.ahead.ref import MAX_ENDS, NO_TOKEN, Ahead, AheadSpec, IntoBuffers, Kept, moved
from pyspec.slots.arena import Arena
from pyspec.slots.batch import Batch, Seq, SeqMode, lay_out
from pyspec.slots.table import SlotTable

THREADS = 128
WIDTHS = ((1,), (4,), (2, 1, 5), (17, 3, 1, 16, 40))  # of the check's sequences
# More rows than a graph has, and a sequence for every slot of a large server
MANY = ((3, 5) * 20, (17,) * 64)
ACCEPT = "ppppp" + "pppp" + "i"
MOVE = "pppppppp" + "ppp" + "ppppp" + "ll" + "iiiiiii" + "p"
FILE: KernelFile[AheadSpec] = KernelFile("ahead", {"ahead_accept": ACCEPT, "ahead_move": MOVE})


class AheadLaunch(IntoBuffers):
    def __init__(self, spec: AheadSpec) -> None:
        super().__init__(spec)
        self.acceptor, self.mover = FILE.kernels(spec.device, spec)

    def accept(
        self, best: Tensor, batch: Batch, ends: Tensor | None = None, forced: Tensor | None = None
    ) -> Kept:
        kept = self.buffers.room(best, batch, ends)
        given = best[0], batch.tokens, batch.seq_start, ends, forced
        found = kept.n, kept.tokens, kept.last, kept.goes
        self.acceptor.launch((len(batch.seqs),), 32, (*given, *found, batch.n_row))
        return kept

    def _launch(self, batch: Batch, kept: Kept | None, drafts: Tensor | None, *, moves: bool) -> None:
        of_kept = (None,) * 4 if kept is None else (kept.n, kept.tokens, kept.last, kept.goes)
        sizes = *self._sizes(batch, kept, drafts), batch.page_size, int(moves)
        args = *moved(batch), *of_kept, drafts, *sizes, self.fault
        self.mover.launch((-(-len(batch.positions) // THREADS),), THREADS, args, overlap=True)


bind = AheadLaunch


def verify(
    widths: Sequence[int], device: torch.device, gen: torch.Generator
) -> tuple[Batch, SlotTable, Arena]:
    """A verify of sequences of `widths` at ragged positions, in an arena, in which tokens are few and so often right."""
    table = SlotTable(len(widths), 40 * len(widths), 8)
    arena = Arena(len(widths), 40, device)
    seqs = []
    for slot, width in zip(table.slots, widths, strict=True):
        table.acquire(slot, 200)
        slot.tokens.extend([1] * int(torch.randint(0, 60, (), generator=gen)))
        tokens = torch.randint(0, 2, (width,), generator=gen).tolist()
        seqs.append(Seq(slot.index, slot.n_past, tokens, n_out=width))
    return lay_out(table, seqs, device, arena=arena), table, arena


def _fields(batch: Batch) -> list[Tensor]:
    names = (
        "tokens positions rope_at kv_rows hi lo out_rows seq_fold seq_keep seq_start row_seq page_table"
    )
    return [getattr(batch, name).clone() for name in names.split()]


def check(launch: Ahead, reference: Ahead, spec: AheadSpec) -> str | None:
    """Drafts that are right from none to all, ends among them, and every kind of layout behind them."""
    gen = torch.Generator().manual_seed(0)
    for widths in (*WIDTHS * 4, *MANY):
        found = [_run(op, widths, spec.device, gen.get_state()) for op in (launch, reference)]
        torch.rand(100, generator=gen)
        for what, own, other in zip(
            ("accepted", "moved", "followed", "stepped", "moved a block"), *found, strict=True
        ):
            if not all(torch.equal(a, b) for a, b in zip(own, other, strict=True)):
                return f"rows {what} of sequences of {widths} differ from the reference's"
    return None


def _run(op: Ahead, widths: Sequence[int], device: torch.device, state: Tensor) -> list[list[Tensor]]:
    gen, n = torch.Generator(), len(widths)
    gen.set_state(state)
    batch, table, arena = verify(widths, device, gen)
    best = torch.randint(0, 2, (2, batch.tokens.shape[0]), generator=gen).double().to(device)
    ends = torch.full((n, MAX_ENDS), NO_TOKEN, dtype=torch.int32)
    ends[torch.rand(n, generator=gen) < 0.3, 3] = 1
    forced = torch.randint(0, 6, (n,), generator=gen).int().to(device)
    out = []
    for beside in ((None, None), (ends.to(device), None), (None, forced), (ends.to(device), forced)):
        kept = op.accept(best, batch, *beside)
        out += [kept.n.clone(), kept.tokens.clone(), kept.last.clone(), kept.goes.clone()]
    drafts = torch.arange(n * 64, device=device).view(64, n).T
    modes = SeqMode.VERIFY, SeqMode.KEEP, SeqMode.LATE
    whole = [out]
    for widths_then, others, see_block in (
        ([1 + w % 5 for w in widths], drafts, False),
        ([6] * n, None, True),
    ):
        seqs = [
            Seq(
                q.slot,
                q.n_past,
                [9] * w,
                SeqMode.KEEP if modes[i % 3] else SeqMode.VERIFY,
                n_out=w,
                n_fold=i % 2,
                slack=q.width,
                shift=i % 3,
            )
            for i, (q, w) in enumerate(zip(batch.seqs, widths_then, strict=True))
        ]
        then = op.move(lay_out(table, seqs, device, arena=arena, see_block=see_block), kept, others)
        whole.append(_fields(then))
        if len(whole) == 2:
            again = [Seq(q.slot, q.n_past + 1, [0] * q.width, n_out=1) for q in batch.seqs]
            followed = lay_out(table, again, device, arena=arena)
            op.follow(followed, kept)
            whole.append(_fields(followed))
            whole.append(_fields(op.step(followed)))
    return whole
