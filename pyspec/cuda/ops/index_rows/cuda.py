"""`index_rows` on NVIDIA GPUs: index_rows.cu. Rows of queries become operands, tensor cores score every key, a radix select chooses.
Warpgroups multiply if the GPU has them and they take the shape, else warps.

All lengths, positions and pages are read on the device: a captured graph serves any batch of as many rows, sequences and page columns.
Queries are rounded to the pool's type, so scores that are nearly equal may change places; a row's choice depends on its own scores only.
A NaN score comes last and is reported.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyspec.cuda import faults
from pyspec.cuda.jit import GpuKind, KernelFile, Macros, Program
from pyspec.cuda.ops.index_rows.ref import GUARD, IndexSpec
from pyspec.slots.batch import Batch
from pyspec.slots.kv import KVPool
from pyspec.slots.parts import rows_per_page

KINDS = {torch.float16: 1, torch.bfloat16: 2}
MAX_SEQ, PACKERS, CHOOSERS, HELD = 128, 128, 1024, 16 * 1024  # as in index_rows.cu
PADS = 8, 16, 32, 48, 64  # heads that products of warpgroups take
RING = 4  # rows of queries in shared memory for them
MOST_SHARED = 99 * 1024
ALONE = 116 * 1024  # bytes of shared memory with which only one CTA fits a multiprocessor of 9.0
MOST_SCORES = 1 << 25  # of one launch: 128 rows at a context of 1M tokens
FORMS = {
    "index_rows_pack": "ppppppp" + "p" + "ll" + "iiiiiii",
    "index_rows_scores": "pppppp" + "p" + "iiiiiiiiiiii",
    "index_rows_choose": "pppppp" + "iiiiiiii",
}


def limits(spec: IndexSpec) -> str | None:
    if spec.kv not in KINDS:
        return f"keys are {spec.kv}; the kernel takes f16 and bf16"
    if spec.dim % 32 or not 0 < spec.dim <= 128:
        return f"{spec.dim} dimensions; the kernel takes multiples of 32 up to 128"
    if spec.n_rot % 2 or not 0 < spec.n_rot <= spec.dim:
        return f"{spec.n_rot} of {spec.dim} dimensions turn; the kernel takes even numbers up to all"
    if spec.n_head < 1 or shared_bytes(spec) > MOST_SHARED:
        return f"{spec.n_head} heads of {spec.dim} dimensions; the kernel takes {MOST_SHARED // 512 * 128 // spec.dim} at most"
    return None


@dataclass(frozen=True, slots=True)
class Scorer:
    """One build of index_rows_scores. pad: heads of a warpgroup's product, 0 where warps multiply (index_rows_mma.cuh)."""

    pad: int
    threads: int
    keys: int  # of the smallest tile
    resident: int  # CTAs on a multiprocessor
    shared_bytes: int

    def defines(self) -> Macros:
        return {"PAD": self.pad, "RING": RING} if self.pad else {}


def record_bytes(spec: IndexSpec) -> int:
    """Largest RECORD in index_rows.cu: a row's queries and weights, with heads padded to those of a product."""
    n_head = next((pad for pad in PADS if pad >= spec.n_head), -(-spec.n_head // 8) * 8)
    return n_head * (2 * spec.dim + 4)


def scorer_of(spec: IndexSpec, capability: tuple[int, int]) -> Scorer:
    if (
        capability == (9, 0)
        and spec.kv is torch.float16
        and spec.dim % 64 == 0
        and spec.n_head <= PADS[-1]
    ):
        pad = next(pad for pad in PADS if pad >= spec.n_head)
        row_bytes = -(-pad * (2 * spec.dim + 4) // 1024) * 1024
        return Scorer(pad, 4 * 128 + 32, 64, 1, RING * row_bytes + 1024)
    return Scorer(0, 128, 128, 3, shared_bytes(spec))


def shared_bytes(spec: IndexSpec) -> int:
    """sizeof(Shared) in index_rows_mma.cuh."""
    record = -(-spec.n_head // 8) * 8 * (2 * spec.dim + 4)
    return -(-(2 * record + 4 * (4 * MAX_SEQ + MAX_SEQ // 32 + 3)) // 16) * 16


def rows_at_once(spec: IndexSpec, n_row: int, n_key: int) -> int:
    """Rows of one launch, with at most `n_key` scores each."""
    return max(1, min(n_row, MOST_SCORES // max(n_key, 1)))


def scratch_bytes(spec: IndexSpec, n_row: int, n_token: int) -> int:
    """Scratch bytes of a call, for `n_row` rows of contexts up to `n_token`."""
    n_key = max(1, n_token // spec.ratio)
    return rows_at_once(spec, n_row, n_key) * (record_bytes(spec) + 4 * n_key)


def defines(spec: IndexSpec, scorer: Scorer) -> Macros:
    """Macros of index_rows.cu."""
    own: Macros = {"HEADS": spec.n_head, "DIM": spec.dim, "N_ROT": spec.n_rot}
    return own | {"KV_KIND": KINDS[spec.kv], "OP_ID": GUARD.number} | scorer.defines()


FILE = KernelFile[tuple[IndexSpec, Scorer]]("index_rows", FORMS, lambda key: defines(*key))


def aligned(x: Tensor) -> Tensor:
    """Rows that begin at 16 bytes. There may be gaps between rows, but not within one."""
    whole = x[0].is_contiguous() if len(x) else True
    return x if whole and x.stride(0) % 4 == 0 and x.data_ptr() % 16 == 0 else x.contiguous()


class IndexLaunch:
    """Same call as the reference."""

    def __init__(self, spec: IndexSpec) -> None:
        self.spec, self.scorer = spec, scorer_of(spec, torch.cuda.get_device_capability(spec.device))
        self.pack, score, choose = FILE.kernels(spec.device, (spec, self.scorer))
        self.score = score.allow_shared(self.scorer.shared_bytes)
        self.choose = choose.allow_shared(ALONE if self.scorer.pad else 4 * HELD)
        n_sm = torch.cuda.get_device_properties(spec.device).multi_processor_count
        self.n_alone, self.grid = n_sm if self.scorer.pad else 0, self.scorer.resident * n_sm
        self.fault = faults.record(spec.device)

    def __call__(self, q: Tensor, w: Tensor | None, freq: Tensor, pool: KVPool, batch: Batch) -> Tensor:
        q, w = aligned(q), w if w is None or w.stride(1) == 1 else w.contiguous()
        self._check(q, w, freq, pool, batch)
        n_row, n_col = q.shape[0], batch.page_table.shape[1]
        out = torch.empty(n_row, self.spec.top_k, dtype=torch.int32, device=q.device)
        if not n_row:
            return out
        n_token = n_col * batch.page_size
        if batch.bucket is None and batch.max_hi:  # no graph, so the host's lengths may size it
            n_token = min(n_token, max(batch.max_hi))
        n_key = max(1, n_token // self.spec.ratio)
        per = rows_at_once(self.spec, n_row, n_key)
        packed = torch.empty(per * record_bytes(self.spec), dtype=torch.uint8, device=q.device)
        scores = torch.empty(per * n_key, dtype=torch.float32, device=q.device)
        for first in range(0, n_row, per):
            size = first, min(per, n_row - first), n_key
            self._rows((q, w, freq), pool, batch, (packed, scores, out), size)
        return out

    def _rows(
        self,
        given: tuple[Tensor, Tensor | None, Tensor],
        pool: KVPool,
        batch: Batch,
        space: tuple[Tensor, Tensor, Tensor],
        size: tuple[int, int, int],
    ) -> None:
        """Some rows of the batch: those whose scores fit at once."""
        (packed, scores, out), (first, n, n_key), (q, w, freq) = space, size, given
        spec, scorer = self.spec, self.scorer
        (n_seq, n_col), n_row, ratio = batch.page_table.shape, q.shape[0], spec.ratio
        per_page = rows_per_page(batch.page_size, ratio)
        n_page = pool.k.shape[0] // per_page
        places = n_col, batch.page_size, ratio, per_page, n_page, spec.top_k, first
        layout, rows = (batch.page_table, batch.positions), batch.row_seq
        if n_key > spec.top_k:  # otherwise no row has to choose
            grid = (n, -(-record_bytes(spec) // (16 * PACKERS)))
            steps = q.stride(0), 0 if w is None else w.stride(0)
            packing = q, w, freq, *layout, rows, packed, self.fault, *steps, *places
            self.pack.launch(grid, PACKERS, packing, overlap=True)
            ctas, shared = (min(self.grid, n * -(-n_key // scorer.keys)),), scorer.shared_bytes
            read = packed, pool.k, *layout, batch.seq_start, scores, self.fault, *places, n, n_row
            for first_seq in range(0, n_seq, MAX_SEQ):
                args = *read, first_seq, min(MAX_SEQ, n_seq - first_seq), n_key
                self.score.launch(ctas, scorer.threads, args, shared, overlap=True)
        choosing = scores, *layout, rows, out, self.fault, *places, n_key
        # two rows on a multiprocessor would take twice as long, so each gets one of its own if there are free ones
        room = ALONE if 1 < n <= self.n_alone else 4 * min(HELD, n_key)
        self.choose.launch((n,), CHOOSERS, choosing, room, overlap=True)

    def _check(self, q: Tensor, w: Tensor | None, freq: Tensor, pool: KVPool, batch: Batch) -> None:
        """Assert dtypes, shapes and layouts, which only our own code can get wrong."""
        spec, n = self.spec, q.shape[0]
        assert q.dtype == torch.float32 and freq.dtype == torch.float64
        assert freq.shape == (spec.n_rot // 2,) and freq.is_contiguous()
        assert q.shape[1:] == (spec.n_head, spec.dim)
        assert w is None or (w.shape == (n, spec.n_head) and w.dtype == torch.float32)
        assert pool.k.shape[1:] == (1, spec.dim) and pool.k.dtype is spec.kv and pool.k.is_contiguous()
        assert pool.tokens_per_row == spec.ratio
        assert all(
            t.dtype == torch.int64 and t.is_contiguous() for t in (batch.page_table, batch.positions)
        )
        assert len(batch.positions) == len(batch.row_seq) == n


def programs(spec: IndexSpec, target: GpuKind) -> list[Program]:
    return FILE.programs((spec, scorer_of(spec, target.capability)), target)


bind = IndexLaunch
