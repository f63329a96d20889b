"""`compress` on NVIDIA GPUs: compress.cu. One launch makes rows and, of few tokens, keeps their values; for more tokens a second one keeps them.

Positions, lengths and pages are read on the device: a captured graph serves any batch of as many rows and sequences.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pyspec.cuda import faults
from pyspec.cuda.jit import Arg, KernelFile, Macros
from pyspec.cuda.ops.compress.ref import GUARD, SCORES, VALUES, CompressSpec, Given
from pyspec.slots.batch import Batch
from pyspec.slots.kv import KVPool
from pyspec.slots.kv_types import name_of
from pyspec.slots.parts import rows_per_page
from pyspec.slots.ring import RingRows

KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float8_e4m3fn: 4}
MOST_THREADS, KEEPERS = 512, 128
FEW = 128  # rows up to which two compressors share a launch
FORMS = {
    "compress_rows": "ppppp" + "ppp" + "ppppp" + "p" + "ll" + "iiiiiiii" + "f",
    "compress_keep": "ppppp" + "pppp" + "p" + "ll" + "iiii",
}
BOTH = {
    "compress_both": 2 * "ppppppp" + "p" + "ppppp" + "p" + "l" + "iiiiiiii" + "f",
    "compress_keep_both": 2 * "ppppp" + "pppp" + "p" + "l" + "iiii",
}
# A call's arguments but for freq and the batch
Own = tuple[Tensor, Tensor, Tensor, Tensor, RingRows, KVPool]


def n_group(spec: CompressSpec) -> int:
    """GROUPS of compress.cu: as many as divide a block's tokens and are whole warps of threads; 0 if none do."""
    tokens, lanes = (1 + spec.overlaps) * spec.ratio, spec.dim // 4
    fitting = [
        g
        for g in range(1, tokens + 1)
        if tokens % g == 0 and g * lanes <= MOST_THREADS and g * lanes % 32 == 0
    ]
    return max(fitting, default=0)


def limits(spec: CompressSpec) -> str | None:
    if spec.kv not in KINDS:
        return f"rows are {name_of(spec.kv)}; the kernel takes f32, f16, bf16 and f8_e4m3"
    if spec.dim % 32 or not 0 < spec.dim <= 512:
        return f"rows of {spec.dim} dimensions; the kernel takes multiples of 32 up to 512"
    if spec.n_rot % 2 or not 0 < spec.n_rot <= spec.dim:
        return f"{spec.n_rot} of {spec.dim} dimensions turn; the kernel takes even numbers up to all"
    if n_group(spec) == 0:
        return f"{spec.ratio} tokens of {spec.dim} dimensions are no whole warps of threads"
    return None


def defines(spec: CompressSpec) -> Macros:
    """Macros of compress.cu."""
    names = {
        "ROW_DIM": spec.dim,
        "RATIO": spec.ratio,
        "OVERLAPS": int(spec.overlaps),
        "N_ROT": spec.n_rot,
        "WEIGHED": int(spec.weighed),
        "NORMED": int(spec.normed),
    }
    return {**names, "ROW_GROUPS": n_group(spec), "KV_KIND": KINDS[spec.kv], "OP_ID": GUARD.number}


def _both(specs: tuple[CompressSpec, CompressSpec]) -> Macros:
    spec, beside = specs
    return defines(spec) | {"BESIDE_DIM": beside.dim, "BESIDE_GROUPS": n_group(beside)}


FILE, FILE_OF_BOTH = KernelFile("compress", FORMS, defines), KernelFile("compress", BOTH, _both)


class CompressLaunch:
    """Same call as the reference. beside: run beside the last launched product, which is `late` and whose results it does not read."""

    runs_beside = True

    def __init__(self, spec: CompressSpec) -> None:
        self.spec, self.width = spec, (1 + spec.overlaps) * spec.dim
        self.rows, self.keep = FILE.kernels(spec.device, spec)
        self.threads, self.fault = n_group(spec) * spec.dim // 4, faults.record(spec.device)

    def with_beside(self, beside: CompressLaunch) -> BothLaunch | None:
        """A launch that also makes `beside`'s rows of the same tokens; None if the two differ in more than their width."""
        is_like = replace(self.spec, dim=beside.spec.dim) == beside.spec
        return BothLaunch(self, beside) if is_like else None

    def __call__(self, *given: *Given, beside: bool = False) -> None:
        values, scores, places, norm, freq, ring, pool, batch = given
        if not self.spec.weighed:  # its build reads none
            scores, places = values, values.new_empty(self.spec.ratio, self.width)
        norm = values.new_empty(self.spec.dim) if norm is None else norm  # likewise
        assert scores is not None and places is not None
        values, scores = self._rows(values), self._rows(scores)
        self._check((values, scores, places), norm, freq, ring, pool, batch)
        n_row, planes = len(values), self._planes(ring)
        if not n_row:
            return
        per_page, n_direct = rows_per_page(batch.page_size, self.spec.ratio), ring.slack + 1
        n_page = pool.k.shape[0] // per_page
        read = values, scores, places, norm, freq, *planes, pool.k, batch.positions, batch.kv_rows
        seqs = batch.row_seq, batch.seq_start, batch.seq_slot, self.fault
        sizes = values.stride(0), scores.stride(0), len(planes[0]), ring.n_row, n_direct, n_row
        args = *read, *seqs, *sizes, batch.page_size, per_page, n_page, int(beside), self.spec.eps
        self.rows.launch((n_row,), self.threads, args, overlap=True)
        if n_row > n_direct:  # some sequence may have more
            self._keep((values, scores, places), ring, batch)

    def _keep(self, given: tuple[Tensor, Tensor, Tensor], ring: RingRows, batch: Batch) -> None:
        """Keep the tokens' values, for sequences of more rows than the first launch keeps."""
        values, scores, _ = given
        planes, n_row, b = self._planes(ring), len(values), batch
        read = *given, *planes, b.positions, b.row_seq, b.seq_start, b.seq_slot, self.fault
        sizes = values.stride(0), scores.stride(0), len(planes[0]), ring.n_row, ring.slack + 1, n_row
        self.keep.launch((n_row,), KEEPERS, (*read, *sizes), overlap=True)

    def _planes(self, ring: RingRows) -> list[Tensor]:
        """Values and scores; values alone stand for both where there are no scores."""
        return [ring.rows[name] for name in (VALUES, SCORES if self.spec.weighed else VALUES)]

    def _rows(self, x: Tensor) -> Tensor:
        """Rows that begin at 16 bytes; they may lie apart."""
        is_fit = x.stride(1) == 1 and x.stride(0) % 4 == 0 and x.data_ptr() % 16 == 0
        return x if is_fit else x.contiguous()

    def _check(
        self,
        given: tuple[Tensor, Tensor, Tensor],
        norm: Tensor,
        freq: Tensor,
        ring: RingRows,
        pool: KVPool,
        batch: Batch,
    ) -> None:
        """Assert dtypes, shapes and layouts, which only our own code can get wrong."""
        (values, scores, places), spec, n = given, self.spec, len(given[0])
        assert places.shape == (spec.ratio, self.width) and norm.shape == (spec.dim,)
        assert values.shape == scores.shape == (n, self.width)
        assert all(x.dtype == torch.float32 for x in (values, scores, places, norm))
        assert places.is_contiguous() and norm.is_contiguous()
        assert freq.dtype == torch.float64 and freq.shape == (spec.n_rot // 2,) and freq.is_contiguous()
        for plane in self._planes(ring):
            assert plane.dtype == torch.float32 and plane.is_contiguous()
            assert plane.shape[2:] == (self.width,)
        assert ring.window >= (1 + spec.overlaps) * spec.ratio
        assert pool.k.shape[1:] == (1, spec.dim) and pool.k.dtype is spec.kv and pool.k.is_contiguous()
        assert pool.tokens_per_row == spec.ratio
        assert len(batch.positions) == len(batch.kv_rows) == len(batch.row_seq) == n


class BothLaunch:
    """Two compressors of the same tokens, where rows are few; others run one after the other."""

    def __init__(self, main: CompressLaunch, beside: CompressLaunch) -> None:
        self.main, self.beside = main, beside
        self.rows, self.keep = FILE_OF_BOTH.kernels(main.spec.device, (main.spec, beside.spec))
        self.threads = max(main.threads, beside.threads)

    def __call__(self, one: Own, other: Own, freq: Tensor, batch: Batch, beside: bool = False) -> None:
        launches, given = (self.main, self.beside), (one, other)
        pointers: list[Arg] = []
        kept: list[Arg] = []
        steps, sizes, n_row = set(), set(), len(one[0])
        for launch, (values, scores, places, norm, ring, pool) in zip(launches, given, strict=True):
            values, scores = launch._rows(values), launch._rows(scores)
            launch._check((values, scores, places), norm, freq, ring, pool, batch)
            per_page = rows_per_page(batch.page_size, launch.spec.ratio)
            planes = [ring.rows[VALUES], ring.rows[SCORES]]
            steps |= {values.stride(0), scores.stride(0)}
            sizes.add(
                (len(planes[0]), ring.n_row, ring.slack + 1, per_page, pool.k.shape[0] // per_page)
            )
            pointers += [values, scores, places, norm, *planes, pool.k]
            kept += [values, scores, places, *planes]
        n_slot, n_ring, n_direct, per_page, n_page = next(iter(sizes))
        if not 0 < n_row <= FEW or len(steps) > 1 or len(sizes) > 1:
            for launch, (values, scores, places, norm, ring, pool) in zip(launches, given, strict=True):
                launch(values, scores, places, norm, freq, ring, pool, batch, beside=beside)
            return
        b, step = batch, next(iter(steps))
        seqs = b.row_seq, b.seq_start, b.seq_slot, self.main.fault
        counts = step, n_slot, n_ring, n_direct, n_row
        pages = b.page_size, per_page, n_page, int(beside), self.main.spec.eps
        args = *pointers, freq, b.positions, b.kv_rows, *seqs, *counts, *pages
        self.rows.launch((n_row, 2), self.threads, args, overlap=True)
        if n_row > n_direct:  # some sequence may have more
            self.keep.launch((n_row, 2), KEEPERS, (*kept, b.positions, *seqs, *counts), overlap=True)


bind = CompressLaunch
