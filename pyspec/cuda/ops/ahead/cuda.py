"""`ahead` on NVIDIA GPUs: one launch finds the accepted rows of a verify, and one moves each layout behind them (ahead.cu)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pyspec.cuda.context import per_device
from pyspec.cuda.faults import record
from pyspec.cuda.jit import Arg, GpuKind, Kernel, Program, arch_of, compile_cubin
from pyspec.cuda.ops.ahead.ref import MAX_ENDS, NO_TOKEN, Ahead, AheadSpec, Kept
from pyspec.slots.arena import Arena
from pyspec.slots.batch import Batch, Seq, SeqMode, lay_out
from pyspec.slots.table import SlotTable

THREADS = 128
WIDTHS = ((1,), (4,), (2, 1, 5), (17, 3, 1, 16, 40))  # of the check's sequences
# More rows than a graph has, and a sequence for every slot of a large server
MANY = ((3, 5) * 20, (17,) * 64)
NULL = np.int64(0)


def limits(spec: AheadSpec) -> str | None:
    return None if spec.device.type == "cuda" else "runs on NVIDIA GPUs only"


@per_device
def _kernels(device: torch.device) -> tuple[Kernel, Kernel]:
    code = compile_cubin("ahead", arch_of(torch.cuda.get_device_capability(device)))
    return code.kernel("ahead_accept", "ppppp" + "pppp" + "i"), code.kernel(
        "ahead_move", "ppppppp" + "ppp" + "ppppp" + "ll" + "iiiiiii" + "p"
    )


class AheadLaunch:
    """Implements `Ahead`."""

    def __init__(self, spec: AheadSpec) -> None:
        self.device = spec.device
        self._make(spec.n_seq, spec.n_row)
        self.overlap, self.fault = (
            torch.cuda.get_device_capability(spec.device) >= (9, 0),
            record(spec.device),
        )
        self.acceptor, self.mover = _kernels(spec.device)

    def _make(self, n_seq: int, n_row: int) -> None:
        """Buffers for the results of `accept` for so many sequences and rows."""
        self.n = torch.ones(n_seq, dtype=torch.int32, device=self.device)
        self.goes = torch.ones(n_seq, dtype=torch.int32, device=self.device)
        self.last = torch.zeros(n_seq, dtype=torch.int64, device=self.device)
        self.tokens = torch.zeros(n_row, dtype=torch.int64, device=self.device)

    def accept(
        self, best: Tensor, batch: Batch, ends: Tensor | None = None, forced: Tensor | None = None
    ) -> Kept:
        n_seq, n_row = len(batch.seqs), batch.n_row
        if n_seq > len(self.n) or n_row > len(
            self.tokens
        ):  # more than was planned: graphs do not hold these buffers
            self._make(max(n_seq, len(self.n)), max(n_row, len(self.tokens)))
        assert best.dtype == torch.float64
        assert ends is None or (
            ends.dtype == torch.int32 and ends.shape == (n_seq, MAX_ENDS) and ends.is_contiguous()
        )
        kept = Kept(self.n[:n_seq], self.tokens[:n_row], self.last[:n_seq], self.goes[:n_seq])
        beside = (NULL if t is None else t for t in (ends, forced))
        found = kept.n, kept.tokens, kept.last, kept.goes
        args = (best[0], batch.tokens, batch.seq_start, *beside, *found, np.int32(n_row))
        self.acceptor.launch((n_seq,), 32, args)
        return kept

    def move(self, batch: Batch, kept: Kept, drafts: Tensor | None = None) -> Batch:
        self._launch(batch, kept, drafts, True)
        return batch

    def follow(self, batch: Batch, kept: Kept) -> None:
        self._launch(batch, kept, None, False)

    def step(self, batch: Batch) -> Batch:
        self._launch(batch, None, None, True)
        return batch

    def _launch(self, batch: Batch, kept: Kept | None, drafts: Tensor | None, is_moved: bool) -> None:
        n_row, n_page = batch.positions.shape[0], batch.page_table.shape[1]
        of_kept: list[Arg] = [NULL] * 4 if kept is None else [kept.n, kept.tokens, kept.last, kept.goes]
        steps = (0, 0) if drafts is None else drafts.stride()
        n_draft, n_next = (
            0 if drafts is None else drafts.shape[1],
            0 if kept is None else len(kept.tokens),
        )
        n_seq = batch.page_table.shape[0]
        sizes = n_draft, n_row, n_seq, n_next, n_page, batch.page_size, int(is_moved)
        args: list[Arg] = [batch.tokens, batch.positions, batch.kv_rows, batch.hi, batch.out_rows]
        args += [
            batch.seq_fold,
            batch.seq_keep,
            batch.seq_start,
            batch.row_seq,
            batch.page_table,
            *of_kept,
            NULL if drafts is None else drafts,
        ]
        args += [np.int64(n) for n in steps] + [np.int32(n) for n in sizes] + [self.fault]
        self.mover.launch((-(-n_row // THREADS),), THREADS, args, overlap=self.overlap)


def programs(spec: AheadSpec, target: GpuKind) -> list[Program]:
    return [target.program("ahead")]


def bind(spec: AheadSpec) -> AheadLaunch:
    """Bind with result buffers of its own, because two engines may share a stream."""
    return AheadLaunch(spec)


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
        "tokens",
        "positions",
        "kv_rows",
        "hi",
        "lo",
        "out_rows",
        "seq_fold",
        "seq_keep",
        "seq_start",
        "row_seq",
        "page_table",
    )
    return [getattr(batch, name).clone() for name in names]


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
            )
            for i, (q, w) in enumerate(zip(batch.seqs, widths_then, strict=True))
        ]
        moved = op.move(lay_out(table, seqs, device, arena=arena, see_block=see_block), kept, others)
        whole.append(_fields(moved))
        if len(whole) == 2:
            again = [Seq(q.slot, q.n_past + 1, [0] * q.width, n_out=1) for q in batch.seqs]
            followed = lay_out(table, again, device, arena=arena)
            op.follow(followed, kept)
            whole.append(_fields(followed))
            whole.append(_fields(op.step(followed)))
    return whole
