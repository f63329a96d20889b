"""`sparse_attend` on NVIDIA GPUs: sparse_attend.cu. Parts of rows on tensor cores, their sums, then the ring.

All lengths, positions and pages are read on the device: a captured graph serves any batch of as many rows, sequences and page columns.
Queries and weights are rounded to the ring's type, as `attend` does it. A row's bits depend on its own keys only; heads are shared
out over CTAs by the number of rows, which changes none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyspec.cuda import faults
from pyspec.cuda.jit import Arg, GpuKind, Kernel, KernelFile, Macros, Program, arch_of
from pyspec.cuda.kernel_context import current
from pyspec.cuda.ops.attend.cuda import room_of
from pyspec.cuda.ops.index_rows.cuda import KINDS, aligned
from pyspec.cuda.ops.rows.cuda import BLOCKED, RowBuffer, Rows
from pyspec.cuda.ops.sparse_attend.ref import GUARD, ROWS, Given, KeyTail, SparseSpec
from pyspec.slots.batch import Batch
from pyspec.slots.kv import KVPool
from pyspec.slots.parts import rows_per_page

MAX_ROW, MAX_PART = 256, 16  # rows of a launch, parts of a row: as in sparse_attend.cu
SPLIT = 128  # rows up to which each is split by its keys alone; with more rows each is one part
LONG_ROW = 1024  # rows of a launch then
ANY = 1 << 30  # rows
MOST_FLOATS = 34 << 20  # of the parts of one launch: LONG_ROW of 64 heads
MAX_WINDOW = 1024
FORMS = {
    "sparse_keys": "pppppp" + "l" + "i" + "f",
    "sparse_parts": "ppppp" + "pppppp" + "pp" + "p" + "l" + "i" * 15 + "ff",
    "sparse_merge": "ppppp" + "ppppp" + "ppp" + "ppp" + "i" * 17 + "f",
    "sparse_ring": "ppppppp" + "iii",
}
COSTS = {16: 1.0, 32: 1.3, 64: 1.6}  # of a part, by the heads of a CTA; guessed
SUB = 64  # keys that are weighed at once
BESIDE_ROWS = 8  # rows up to which the batch's keys are made beside a product; 0: never
LONG_KEYS = 64  # of a tile of 64 heads: there is room for the next one, too


@dataclass(frozen=True, slots=True)
class SparseBuild:
    """One build of sparse_attend.cu: heads of a CTA, keys of a tile, warps, keys of a unit, tiles in shared memory, rows of a launch."""

    dim: int
    n_rot: int
    kv: torch.dtype
    heads: int
    keys: int
    warps: int
    unit: int
    buffers: int = 1
    rows: int = MAX_ROW

    @property
    def shared_bytes(self) -> int:
        """sizeof(Shared) in sparse_attend.cu."""
        m_warps = max(1, self.heads // 32)
        halves = (self.heads + self.buffers * self.keys) * (self.dim + 8) + self.heads * (self.keys + 8)
        floats = (
            self.heads * (self.warps // m_warps + self.keys // 16 + 2 + 2 * (self.keys // SUB))
            + self.n_rot
            + 2 * self.rows
            + 1
            + self.warps
        )
        return -(-(2 * halves + 8 * self.buffers * self.keys + 4 * floats) // 16) * 16

    def defines(self) -> Macros:
        return {
            "DIM": self.dim,
            "N_ROT": self.n_rot,
            "HEADS": self.heads,
            "KEYS": self.keys,
            "SUB": SUB,
            "UNIT": self.unit,
            "WARPS": self.warps,
            "BUFFERS": self.buffers,
            "MAX_ROW": self.rows,
            "KV_KIND": KINDS[self.kv],
            "OP_ID": GUARD.number,
            "SHARED_BYTES": self.shared_bytes,
            "MIN_BLOCKS": 1,
        }


def builds(spec: SparseSpec, arch: str) -> list[SparseBuild]:
    """Builds by the heads of a CTA, the fewest first. All have units of as many keys, so a row's bits do not depend on the build."""
    room = room_of(arch)
    keys = 128 if room > 200 * 1024 else 64
    found, dim = [], spec.dim
    for heads in COSTS:
        m_warps = max(1, heads // 32)
        fitting = [
            w
            for w in (8, 4, 2)
            if dim % (16 * w) == 0 and w % m_warps == 0 and keys * m_warps % (16 * w) == 0
        ]
        if not fitting or (heads > 16 and (fitting[0] < 8 or spec.n_head <= heads // 2)):
            continue
        ahead = _two_tiles(spec, arch, keys) if heads == 64 else None
        build = ahead or SparseBuild(dim, spec.n_rot, spec.kv, heads, keys, fitting[0], keys)
        if build.shared_bytes <= room - 1024:
            found.append(build)
    return found


def _two_tiles(spec: SparseSpec, arch: str, unit: int) -> SparseBuild | None:
    """64 heads, and the next tile's keys on their way while one is multiplied; None where that does not fit."""
    both = SparseBuild(spec.dim, spec.n_rot, spec.kv, 64, LONG_KEYS, 8, unit, 2, LONG_ROW)
    fits = spec.dim % 128 == 0 and spec.n_head > 32 and both.shared_bytes <= room_of(arch) - 1024
    return both if fits else None


def long_build(spec: SparseSpec, arch: str) -> SparseBuild:
    """The build for rows of one part each: the one with most heads."""
    return builds(spec, arch)[-1]


def n_tiles(spec: SparseSpec, keys: int, n_list: int) -> int:
    """Tiles of `keys` keys of a row with `n_list` compressed ones."""
    return -(-spec.window // keys) + -(-n_list // keys)


def rows_at_once(spec: SparseSpec, n_row: int, max_part: int) -> int:
    """Rows of one launch, with at most `max_part` parts each."""
    return max(
        1,
        min(
            n_row,
            LONG_ROW if n_row > SPLIT else MAX_ROW,
            MOST_FLOATS // (max_part * spec.n_head * (spec.dim + 2)),
        ),
    )


def scratch_bytes(spec: SparseSpec, n_row: int, n_token: int) -> int:
    """Scratch bytes of a call, for `n_row` rows of contexts up to `n_token` and any choice of rows."""
    n_list = n_token // spec.ratio if spec.ratio else 0
    max_part = min(n_tiles(spec, 64, n_list), MAX_PART)
    return 4 * rows_at_once(spec, n_row, max_part) * max_part * spec.n_head * (spec.dim + 2)


def limits(spec: SparseSpec) -> str | None:
    if spec.kv not in KINDS:
        return f"keys are {spec.kv}; the kernel takes f16 and bf16"
    if spec.dim % 32 or not 0 < spec.dim <= 512 or (spec.dim > 128 and spec.dim % 128):
        return f"heads are {spec.dim} wide; the kernel takes 32, 64, 96, and multiples of 128 up to 512"
    if spec.n_rot % 2 or not 0 < spec.n_rot <= spec.dim:
        return f"{spec.n_rot} of {spec.dim} dimensions turn; the kernel takes even numbers up to all"
    if not 0 < spec.window <= MAX_WINDOW:
        return f"a window of {spec.window} tokens; the kernel takes up to {MAX_WINDOW}"
    return None


FILE = KernelFile("sparse_attend", FORMS, SparseBuild.defines)


def _waves(build: SparseBuild, n_part: int, n_head: int, n_sm: int) -> float:
    """How long `n_part` parts take, more or less."""
    return -(-n_part * -(-n_head // build.heads) // n_sm) * COSTS[build.heads]


class SparseLaunch:
    """Called as the reference is. build: fixes the heads of a CTA (measurements, tests); by default the number of rows decides.

    exact_rows  rows up to which a row's bits depend on its keys only
    """

    def __init__(self, spec: SparseSpec, build: SparseBuild | None = None) -> None:
        self.spec, arch = spec, arch_of(torch.cuda.get_device_capability(spec.device))
        self.exact_rows = ANY if current().is_exact else SPLIT
        self.builds = [build] if build is not None else builds(spec, arch)
        self.long = build or long_build(spec, arch)
        self.n_sm = torch.cuda.get_device_properties(spec.device).multi_processor_count
        self.kernels = {build: self._kernels(build) for build in {*self.builds, self.long}}
        self.fault, self.eps = faults.record(spec.device), spec.eps
        self.scale = spec.dim**-0.5 * math.log2(math.e)
        self._held: tuple[Tensor, Tensor] | None = None

    def _kernels(self, build: SparseBuild) -> dict[str, Kernel]:
        found = FILE.named(self.spec.device, build)
        return found | {"sparse_parts": found["sparse_parts"].allow_shared(build.shared_bytes)}

    def take_keys(self, n_row: int) -> Tensor | None:
        """Memory for `keys_beside`, taken before the product is launched; None: a call makes them."""
        return self._own(n_row) if 0 < n_row <= BESIDE_ROWS else None

    def keys_beside(self, kv: Tensor, tail: KeyTail, batch: Batch, own: Tensor) -> None:
        """Make the batch's keys ahead of the call with the same kv, beside a product that is `late`. Of the launches behind that product, only
        those that also run beside it may be under way."""
        self._keys(kv, tail, batch, own, beside=True)
        self._held = kv, own

    def _own(self, n_row: int) -> Tensor:
        return torch.empty(n_row, self.spec.dim, dtype=self.spec.kv, device=self.spec.device)

    def _keys(self, kv: Tensor, tail: KeyTail, batch: Batch, own: Tensor, beside: bool) -> None:
        kv, build = aligned(kv), self.builds[0]  # any build: keys do not depend on it
        args = (
            kv,
            tail.norm,
            tail.freq,
            batch.positions,
            batch.row_seq,
            own,
            kv.stride(0),
            int(beside),
            self.eps,
        )
        self.kernels[build]["sparse_keys"].launch((len(kv),), 128, args, overlap=True)

    def __call__(self, *given: *tuple[*Given, Batch]) -> Tensor:
        q, kv, tail, ring, pool, chosen, sinks, batch = given
        out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        to = out, self.fault, None, None, None
        self._run((q, kv, tail, ring, pool, chosen, sinks), batch, to, None)
        return out

    def prepared(self, given: Given, batch: Batch, into: RowBuffer) -> Rows:
        """into.rows(o) of the outputs o of a call, over into.power, without a launch of its own. given: the arguments of a call before the batch."""
        rows = into.rows.room(len(given[0]))
        assert into.rows.n_in == self.spec.n_head * self.spec.dim and rows.layout == BLOCKED
        to = None, self.fault, rows.blocks, rows.sums, rows.powers
        self._run(given, batch, to, into)
        return rows

    def _run(self, given: Given, batch: Batch, to: Sequence[Arg], into: RowBuffer | None) -> None:
        """to: output as rows or as blocks (the other pointer is unused), with the fault record between."""
        q, kv, tail, ring, pool, chosen, sinks = given
        spec = self.spec
        held, self._held = self._held, None
        is_held = held is not None and held[0] is kv
        q, rows = aligned(q), ring.rows[ROWS]
        self._check((q, kv, sinks), tail, rows, pool, chosen, batch)
        n_row, n_col = q.shape[0], batch.page_table.shape[1]
        if not n_row:
            return
        pad, power = (0, 1.0) if into is None else (into.rows.room(n_row).pad, into.power)
        top_k = 0 if chosen is None else chosen.shape[1]
        ratio = 0 if pool is None else spec.ratio
        per_page = 1 if pool is None else rows_per_page(batch.page_size, ratio)
        n_page = 1 if pool is None else pool.k.shape[0] // per_page
        max_part, likely = self._parts(batch, ratio, top_k, chosen is not None)
        per_part, build = 1, self.long
        if n_row > self.exact_rows:
            max_part, per_part = 1, 1 << 20
        else:
            build = min(self.builds, key=lambda b: _waves(b, n_row * likely, spec.n_head, self.n_sm))
        per = min(rows_at_once(spec, n_row, max_part), build.rows)
        part = torch.empty(per * max_part * spec.n_head * spec.dim, device=q.device)
        part_ml = torch.empty(per * max_part * spec.n_head * 2, device=q.device)
        own = held[1] if held is not None and is_held else self._own(n_row)
        kernels = self.kernels[build]
        if not is_held:
            self._keys(kv, tail, batch, own, beside=False)
        layout = batch.page_table, batch.positions, batch.row_seq, batch.seq_start, batch.seq_slot
        pages = n_col, batch.page_size, ratio, per_page, n_page
        places = *pages, top_k, spec.n_head, rows.shape[0], ring.n_row
        keys = own, rows, None if pool is None else pool.k, *layout, chosen
        heads, n_block = -(-spec.n_head // build.heads), -(-spec.n_head * -(-spec.dim // 128) // 4)
        for first in range(0, n_row, per):
            n, is_all = min(per, n_row - first), per >= n_row
            sizes = spec.window, first, n, n_row, max_part, per_part, self.scale, self.eps
            args = q, tail.freq, *keys, part, part_ml, self.fault, q.stride(0), *places, *sizes
            grid, threads = (min(self.n_sm, n * max_part * heads),), 32 * build.warps
            kernels["sparse_parts"].launch(grid, threads, args, build.shared_bytes, overlap=True)
            chooses = int(chosen is not None), int(is_all)
            merging = spec.window, first, n_row, max_part, *chooses, pad, per_part, power
            made = part, part_ml, tail.freq, own, rows, *layout, sinks, *to, *places, *merging
            kernels["sparse_merge"].launch((n, n_block + is_all), 128, made, overlap=True)
        if per < n_row:
            kept = own, rows, *layout[1:], self.fault, *places[-2:], n_row
            kernels["sparse_ring"].launch((n_row,), 64, kept, overlap=True)

    def _parts(self, batch: Batch, ratio: int, top_k: int, is_chosen: bool) -> tuple[int, int]:
        """Parts of a row at most, and the number for a short context."""
        keys, n_token = self.builds[0].unit, batch.page_table.shape[1] * batch.page_size
        if batch.bucket is None and batch.max_hi:  # no graph, so the host's lengths may size it
            n_token = min(n_token, max(batch.max_hi))
        n_list = n_token // ratio if ratio else 0
        n_list = min(n_list, top_k) if is_chosen else n_list
        n_tile = n_tiles(self.spec, keys, n_list)
        return min(n_tile, MAX_PART), min(n_tile, MAX_PART, n_tiles(self.spec, keys, 512))

    def _check(
        self,
        given: tuple[Tensor, Tensor, Tensor],
        tail: KeyTail,
        rows: Tensor,
        pool: KVPool | None,
        chosen: Tensor | None,
        batch: Batch,
    ) -> None:
        """Assert dtypes, shapes and layouts, which only our own code can get wrong."""
        (q, kv, sinks), spec, n = given, self.spec, len(given[0])
        assert q.dtype == kv.dtype == sinks.dtype == torch.float32 and sinks.shape == (spec.n_head,)
        assert q.shape[1:] == (spec.n_head, spec.dim) and kv.shape == (n, spec.dim)
        assert tail.norm.shape == (spec.dim,) and tail.freq.shape == (spec.n_rot // 2,)
        assert tail.norm.dtype == torch.float32 and tail.freq.dtype == torch.float64
        assert tail.norm.is_contiguous() and tail.freq.is_contiguous()
        assert rows.dtype is spec.kv and rows.is_contiguous() and rows.shape[2:] == (spec.dim,)
        assert (pool is None) == (spec.ratio == 0)
        if pool is not None:
            assert pool.k.shape[1:] == (1, spec.dim) and pool.k.dtype is spec.kv
            assert pool.k.is_contiguous()
            assert pool.tokens_per_row == spec.ratio
        if chosen is not None:
            assert chosen.dtype == torch.int32 and chosen.is_contiguous() and chosen.shape[0] == n
        assert all(
            t.dtype == torch.int64 and t.is_contiguous() for t in (batch.page_table, batch.positions)
        )
        assert len(batch.positions) == len(batch.row_seq) == n


def programs(spec: SparseSpec, target: GpuKind) -> list[Program]:
    all_builds = (*builds(spec, target.arch), long_build(spec, target.arch))
    return [program for build in all_builds for program in FILE.programs(build, target)]


bind = SparseLaunch
