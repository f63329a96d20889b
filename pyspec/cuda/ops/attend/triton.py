"""`attend` in Triton: the keys of a sequence in splits, in as many programs as fill a GPU, and their sums in order (triton_kernels.py).

Same contract as attend_ref, same rounding as attend_cuda: q, weights and the values of q8_0 to f16, of bf16 pools to
bf16. Keys and values may have different types: q is rounded as keys are, weights as values are. All lengths, ranges and
pages are read on the device, so a captured graph may be replayed for any batch of as many rows, sequences and page
columns. A row's bits depend on its own keys only. Rows with row_seq -1 come out as zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pyspec.cuda import faults, tri
from pyspec.cuda.ops.attend import latent_triton
from pyspec.cuda.ops.attend.cuda import MANY
from pyspec.cuda.ops.attend.ref import GUARD, AttendSpec, check_given
from pyspec.cuda.ops.attend.shared import AttendTiles, planes_of, workspace
from pyspec.slots.batch import Batch
from pyspec.slots.kv import KVPool

# Keys of a partial sum: in sequences of up to FAR keys, and in longer ones
SHORT, LONG, FAR = 256, 1024, 16384
COLUMNS = (16, 32, 64)  # of a tile: rows of a sequence times heads of a group
MOST_SUMS = 64 * 256  # of a tile: columns times dims, which registers hold
PER_SM = 4  # programs of a multiprocessor that a launch has about
SEQS = (16, 128)  # sequences that a build looks through
PIECE = 128  # dims of a program of the merge
# Floats of partial sums, unless one tile has more: many rows of many keys run some tiles at a time
FEWEST_FLOATS, MOST_FLOATS = 1 << 22, 1 << 26


def limits(spec: AttendSpec) -> str | None:
    if spec.n_head % spec.n_kv_head:
        return f"{spec.n_head} heads are no multiple of {spec.n_kv_head} KV heads"
    if spec.n_value:
        return latent_triton.shape_limits(spec)
    if spec.kv.k.is_packed or spec.kv.v.is_packed:
        return f"keys and values are {spec.kv.name}"
    if spec.head_dim % 16 or spec.head_dim > 512:
        return f"heads are {spec.head_dim} wide; the kernel takes multiples of 16 up to 512"
    return None


def columns_for(spec: AttendSpec, widest: int) -> int:
    """The fewest that hold a sequence, or as many as registers do."""
    wanted, choices = max(1, widest) * (spec.n_head // spec.n_kv_head), fitting(spec)
    return next((n for n in choices if n >= wanted), choices[-1])


def fitting(spec: AttendSpec) -> Sequence[int]:
    """Columns that a tile may have."""
    wide = 1 << (spec.value_dim - 1).bit_length()
    return [n for n in COLUMNS if n * wide <= MOST_SUMS] or list(COLUMNS[:1])


def tiles_for(spec: AttendSpec, columns: int, *, large: bool) -> AttendTiles:
    """large: a multiprocessor has more than 200 KB of shared memory."""
    if spec.kv.has_f32:
        return AttendTiles(min(columns, 16), 16, 1, 4)
    if spec.n_value:
        return latent_triton.tiles_for(spec, columns, large=large)
    keys = 64 if large or spec.head_dim <= 128 else 32
    stages = 3 if spec.head_dim <= 128 else 2 if spec.head_dim <= 256 else 1
    return AttendTiles(
        columns, keys, stages if large else min(stages, 2), 4 if spec.head_dim <= 128 else 8
    )


def workspace_bytes(spec: AttendSpec, n_seq: int, n_key: int, n_row: int) -> int:
    """Bytes for the batches of an engine: a sequence has at most `n_key` keys, and `n_row` rows. Prompts of more rows run in the same space."""
    rows = max(n_seq * n_row, MANY) * (spec.n_head // spec.n_kv_head)
    n_tile = [rows // c + n_seq for c in fitting(spec)]
    sizes = [tile_floats(spec, c, n_splits(n_key)) for c in fitting(spec)]
    return 4 * max(
        FEWEST_FLOATS, *(min(n, at_once(size)) * size for n, size in zip(n_tile, sizes, strict=True))
    )


def tile_floats(spec: AttendSpec, columns: int, n_split: int) -> int:
    """Partial sums of one tile."""
    return spec.n_kv_head * n_split * columns * (spec.value_dim + 2)


def at_once(size: int, room: int = MOST_FLOATS) -> int:
    """Most tiles of a launch, each of `size` floats. room: floats that are already allocated."""
    return max(1, min(max(room, FEWEST_FLOATS), MOST_FLOATS) // size)


def seqs_of(n_seq: int) -> int:
    """Sequences that the build for `n_seq` looks through."""
    return next((n for n in SEQS if n_seq <= n), 1 << (n_seq - 1).bit_length())


def n_splits(n_key: int) -> int:
    """Of a sequence of up to `n_key` keys, at most."""
    return max(1, -(-min(n_key, FAR) // SHORT), -(-n_key // LONG))


def n_tiles(group: int, columns: int, widths: list[int]) -> int:
    return sum(-(-width * group // columns) for width in widths)


class AttendTriton:
    """The kernels of one spec; called as attend_ref's."""

    def __init__(self, spec: AttendSpec, tiles: AttendTiles | None) -> None:
        self.spec, self.tiles, self.group = spec, tiles, spec.n_head // spec.n_kv_head
        self.spaces, self.fault = workspace(spec.device), faults.record(spec.device)
        self.scale = spec.scale * math.log2(math.e)
        # Page sizes and sequences that have a build for every number of columns
        self.built = set[tuple[int, int]]()
        self.native = tri.has_f8(spec.device)
        self.large, self.n_sm = tri.has_large_shared(spec.device), tri.n_multiprocessor(spec.device)

    def __call__(
        self, q: Tensor, pool: KVPool, batch: Batch, window: int = 0, sinks: Tensor | None = None
    ) -> Tensor:
        check_given(q, pool, batch, sinks, self.spec)
        out = q.new_empty(len(q), self.spec.n_head, self.spec.value_dim)
        if not q.shape[0]:
            return out
        if self.tiles is not None:
            self._run(self.tiles, q, pool, batch, window, sinks, out)
            return out
        kind = batch.page_size, seqs_of(batch.page_table.shape[0])
        is_new = self.spec.device.type == "cuda" and kind not in self.built
        if is_new and not self.is_capturing():  # now, not in the middle of a wider round
            self.built.add(kind)
            for columns in fitting(self.spec):
                self._run(
                    tiles_for(self.spec, columns, large=self.large), q, pool, batch, window, sinks, out
                )
        columns = columns_for(self.spec, max((seq.width for seq in batch.seqs), default=1))
        self._run(tiles_for(self.spec, columns, large=self.large), q, pool, batch, window, sinks, out)
        return out

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def _run(
        self,
        tiles: AttendTiles,
        q: Tensor,
        pool: KVPool,
        batch: Batch,
        window: int,
        sinks: Tensor | None,
        out: Tensor,
    ) -> None:
        from pyspec.cuda.ops.attend import triton_kernels as kernels

        n_row, (n_seq, n_col) = q.shape[0], batch.page_table.shape
        spec, group, cols = self.spec, self.group, tiles.columns
        widths = [seq.width for seq in batch.seqs]
        n_tile = n_tiles(group, cols, widths) if batch.bucket is None else n_row * group // cols + n_seq
        n_key = n_col * batch.page_size
        if batch.bucket is None:  # else replayed for any of this size
            n_key = min(n_key, max(batch.max_hi, default=0))
        n_split = n_splits(n_key)
        size = tile_floats(spec, cols, n_split)
        n_once = min(n_tile, at_once(size, self.spaces.room))
        space = self.spaces.take(n_once * size)
        n_part = n_once * size // (spec.value_dim + 2) * spec.value_dim
        n_prog = min(n_split, max(1, PER_SM * self.n_sm // (n_once * spec.n_kv_head)))
        part, ml = space[:n_part], space[n_part:]
        pages = n_seq, n_col, pool.n_row // batch.page_size
        seen = batch.positions, batch.lo, batch.hi
        wide = 1 << (spec.value_dim - 1).bit_length()
        cut = {"COLS": cols, "SHORT": SHORT, "LONG": LONG, "FAR_KEYS": FAR, "N_SEQ": seqs_of(n_seq)}
        heads = {"N_KV": spec.n_kv_head, "GROUP": group, **cut}
        layout = batch.page_table, *seen, batch.seq_start
        build = {"KEYS": tiles.keys, "STAGES": tiles.stages, "PAGE": batch.page_size, "OP": GUARD.number}
        whole, rest = latent_triton.pieces_of(spec) if spec.n_value else (wide, 0)
        dims = {"DIM": spec.head_dim, "N_VALUE": spec.value_dim, "FIRST": whole, "REST": rest}
        kind = {"K_KIND": spec.kv.k.kind, "V_KIND": spec.kv.v.kind, "NATIVE": self.native}
        halves = {"K_HALF": spec.kv.k.dtype, "V_HALF": spec.kv.v.dtype}
        kind |= {name: kernels.HALVES[of] for name, of in halves.items()}
        constants = {**heads, **build, **dims, **kind, "CAP": spec.cap, "ALONE": spec.n_value > 0}
        piece, sink = min(PIECE, wide), q if sinks is None else sinks
        read = q, *planes_of(pool), *layout, part, ml, self.fault, *pages, n_key, n_split, n_prog
        merging = {**heads, "DIM": spec.value_dim, "PIECE": piece, "AT_ONCE": 16}
        for first in range(0, n_tile, n_once):
            n = min(n_once, n_tile - first)
            tri.launch(
                kernels.attend_split,
                (n, spec.n_kv_head, n_prog),
                (*read, first, window, self.scale),
                constants,
                tiles.warps,
            )
            counts = n_seq, n_key, n_split, first, n, window
            tri.launch(
                kernels.attend_merge,
                (n_row, spec.n_head, -(-spec.value_dim // piece)),
                (part, ml, *seen, batch.row_seq, batch.seq_start, sink, out, *counts),
                merging | {"HAS_SINKS": sinks is not None},
                4,
            )


def bind(spec: AttendSpec, *, tiles: AttendTiles | None = None) -> AttendTriton:
    """`tiles` fixes the build (measurements); by default the widest sequence and the pool's dtype decide."""
    return AttendTriton(spec, tiles)
