"""`attend` on NVIDIA GPUs where one key head's keys are its values, too (`AttendSpec.n_value`): attend_latent.cu, two launches.

Queries, keys of few bits and weights are rounded to f16 (bf16 where keys are), as in cuda.py. Tiles are columns (a row and a head) of one
sequence; their keys come to shared memory once, for scores and values. A row's keys are cut into parts by its own length alone, so its
bits do not depend on the neighbours, up to SPLIT columns: more fill a GPU without parts, and each row is one. Partial sums of all tiles
may exceed the reserved memory; then some tiles run at a time, to the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyspec.cuda import faults, jit
from pyspec.cuda.kernel_context import current
from pyspec.cuda.ops.attend.ref import GUARD, AttendSpec, check_given
from pyspec.cuda.ops.attend.shared import room_of, workspace
from pyspec.slots.batch import Batch
from pyspec.slots.kv import KVPool
from pyspec.slots.kv_types import KvType

COLUMNS = (16, 32, 64)  # of a tile
KEYS = 64  # in shared memory at once, for each buffer
RUN = 16  # keys that lie one behind another in every page
LEAST = 128  # keys of a part
PARTS = 64  # of a row of one tile, at most; rows of more tiles have fewer
SPLIT = 128 * COLUMNS[-1]  # columns of a launch whose rows are cut into parts
ONE = 1 << 30  # keys of a part that has all of them
FEWEST_FLOATS, MOST_FLOATS = 1 << 22, 1 << 26  # of partial sums, unless one tile has more
PER_SM = 2  # CTAs of a multiprocessor that a launch has about
MOST_TILES = 65_535
PARTS_ARGS = "pp{scale}" + "pppp" + "pp" + "ppp" + "iii" + "iii" + "iii" + "ii" + "f"
MERGE_ARGS = "pp" + "ppp" + "pp" + "pp" + "iii" + "ii" + "ii" + "iii"


@dataclass(frozen=True, slots=True)
class LatentBuild:
    """One build of attend_latent.cu. columns: of a tile; buffers: tiles of keys in shared memory; run: keys that lie one behind another."""

    dim: int
    n_value: int
    columns: int
    buffers: int
    key: KvType
    run: int = RUN

    @property
    def warps(self) -> int:
        return 4 if self.columns == 16 else 8

    @property
    def shared_bytes(self) -> int:
        """sizeof(Shared) in attend_latent.cu."""
        row = -(-self.dim // 64) * 64
        halves = (self.columns + self.buffers * KEYS) * row + self.columns * KEYS
        size = 2 * halves + 4 * (11 * self.columns + 2 * KEYS // self.run + 5)
        return -(-size // 16) * 16

    @property
    def n_float(self) -> int:
        """Floats of a part of a tile."""
        return self.columns * (self.n_value + 2)

    def defines(self) -> jit.Macros:
        own: jit.Macros = {} if self.run == RUN else {"RUN": self.run}
        return own | {
            "DIM": self.dim,
            "N_VALUE": self.n_value,
            "COLS": self.columns,
            "WARPS": self.warps,
            "BUFFERS": self.buffers,
            "K_KIND": self.key.kind,
            "OP_ID": GUARD.number,
            "SHARED_BYTES": self.shared_bytes,
        }


def builds(spec: AttendSpec, arch: str) -> list[LatentBuild]:
    """Those that fit a GPU's shared memory, the fewest columns first; two buffers where there is room. All give the same bits."""
    found, room, run = [], room_of(arch) - 1024, 1 if spec.scattered else RUN
    for columns in COLUMNS:
        ways = [
            LatentBuild(spec.head_dim, spec.n_value, columns, n, spec.kv.k, run)
            for n in ((2, 1) if spec.kv.k.is_float else (1,))
        ]
        if (build := next((x for x in ways if x.shared_bytes <= room), None)) is not None:
            found.append(build)
    return found


def limits(spec: AttendSpec) -> str | None:
    if (why := shape_limits(spec)) is not None:
        return why
    arch = jit.arch_of(torch.cuda.get_device_capability(spec.device))
    if not builds(spec, arch):
        return f"16 queries and {KEYS} keys of {spec.head_dim} do not fit {room_of(arch) >> 10} KB of shared memory"
    return None


def shape_limits(spec: AttendSpec) -> str | None:
    """Limits that hold on every GPU."""
    if spec.n_kv_head != 1 or spec.has_sinks or spec.cap:
        return "keys that are values have one head, no sinks and no cap in this kernel"
    if not spec.kv.is_one or spec.kv.has_f32:
        return f"keys that are values are {spec.kv.name}; the kernel takes one type of 16 bits or fewer"
    if spec.head_dim % 8:
        return f"keys are {spec.head_dim} wide; the kernel takes multiples of 8"
    if spec.n_value % 16 or spec.n_value > spec.head_dim:
        return f"values are {spec.n_value} wide; the kernel takes multiples of 16"
    return None


def parts_of(spec: AttendSpec) -> int:
    """Parts of a row at most: with more heads a row has more tiles, and needs fewer of them to fill a GPU."""
    return max(16, PARTS // -(-spec.n_head // COLUMNS[-1]))


def build_for(choices: Sequence[LatentBuild], columns: int) -> LatentBuild:
    """The fewest tiles, then the narrowest: `columns` are those of the widest sequence."""
    return next((b for b in choices if b.columns >= columns), choices[-1])


def at_once(size: int, room: int = MOST_FLOATS) -> int:
    """Most tiles of a launch, each of `size` floats. room: floats that are already allocated."""
    most = min(max(room, FEWEST_FLOATS), MOST_FLOATS) // size
    return min(max(1, most), MOST_TILES)


def most_floats(spec: AttendSpec, arch: str, n_seq: int, n_key: int, n_row: int) -> int:
    """Floats of the workspace for sequences of at most `n_key` keys and `n_row` rows. Prompts run in the same space."""
    n_part = min(parts_of(spec), -(-n_key // LEAST))
    sizes = [(b.columns, n_part * b.n_float) for b in builds(spec, arch)]
    tiles = [(n_seq * n_row * spec.n_head // columns + n_seq, size) for columns, size in sizes]
    return max((max(FEWEST_FLOATS, min(n, at_once(size)) * size) for n, size in tiles), default=0)


def _entries(build: LatentBuild) -> dict[str, str]:
    scale = "p" if build.key.n_factor else ""
    return {"attend_latent_parts": PARTS_ARGS.format(scale=scale), "attend_latent_merge": MERGE_ARGS}


FILE = jit.KernelFile("attend_latent", _entries, LatentBuild.defines)


def _kernels(device: torch.device, build: LatentBuild) -> tuple[jit.Kernel, jit.Kernel]:
    parts, merge = FILE.kernels(device, build)
    return parts.allow_shared(build.shared_bytes), merge


class LatentLaunch:
    """Called as the reference. `build` fixes the build (tests, measurements)."""

    def __init__(self, spec: AttendSpec, build: LatentBuild | None = None) -> None:
        capability = torch.cuda.get_device_capability(spec.device)
        self.spec = spec
        self.builds = builds(spec, jit.arch_of(capability)) if build is None else [build]
        self.kernels = {b: _kernels(spec.device, b) for b in self.builds}
        self.n_sm = torch.cuda.get_device_properties(spec.device).multi_processor_count
        self.spaces, self.fault = workspace(spec.device), faults.record(spec.device)
        self.exact, self.most_part = current().is_exact, parts_of(spec)
        self.scale = spec.scale * math.log2(math.e)

    def __call__(
        self, q: Tensor, pool: KVPool, batch: Batch, window: int = 0, sinks: Tensor | None = None
    ) -> Tensor:
        spec = self.spec
        check_given(q, pool, batch, sinks, spec)
        assert batch.page_size % self.builds[0].run == 0
        n_row, (n_seq, n_col) = len(q), batch.page_table.shape
        out = q.new_empty(n_row, spec.n_head, spec.n_value)
        if not n_row:
            return out
        widest = max((seq.width for seq in batch.seqs), default=1)
        build = build_for(self.builds, max(1, widest) * spec.n_head)
        parts, merge = self.kernels[build]
        n_key = n_col * batch.page_size
        least = LEAST if self.exact or n_row * spec.n_head <= SPLIT else ONE
        max_part = min(self.most_part, -(-n_key // least))
        if batch.bucket is None:
            n_tile = sum(-(-seq.width * spec.n_head // build.columns) for seq in batch.seqs)
        else:  # replayed for any of this size
            n_tile = n_row * spec.n_head // build.columns + n_seq
        size = max_part * build.n_float
        n_once = min(max(1, n_tile), at_once(size, self.spaces.room))
        space = self.spaces.take(n_once * size)
        n_sum = n_once * max_part * build.columns * spec.n_value
        part, part_ml = space[:n_sum], space[n_sum:]
        n_prog = min(max_part, max(1, -(-PER_SM * self.n_sm // n_once)))
        seen, rows = (batch.positions, batch.lo, batch.hi), (batch.row_seq, batch.seq_start)
        counts, cut = (n_row, n_seq, spec.n_head), (window, self.most_part, least)
        pages = n_col, batch.page_size, pool.n_row // batch.page_size
        keys = (pool.k,) if pool.k_scale is None else (pool.k, pool.k_scale)
        merge_grid = n_row, -(-spec.n_head * -(-spec.n_value // 128) // 4)
        for first in range(0, max(1, n_tile), n_once):
            n = min(n_once, n_tile - first)
            read = q, *keys, batch.page_table, *seen, *rows, part, part_ml, self.fault
            args = *read, *counts, *pages, *cut, first, max_part, self.scale
            grid = n_prog, max(1, n)
            parts.launch(grid, 32 * build.warps, args, build.shared_bytes, overlap=True)
            made = part, part_ml, *seen, *rows, out, self.fault
            merging = *made, *counts, n_key, *cut, first, n, max_part
            merge.launch(merge_grid, 128, merging, overlap=True)
        return out


def programs(spec: AttendSpec, target: jit.GpuKind) -> list[jit.Program]:
    return [program for b in builds(spec, target.arch) for program in FILE.programs(b, target)]


bind = LatentLaunch
