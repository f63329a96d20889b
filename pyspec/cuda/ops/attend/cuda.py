"""`attend` for NVIDIA GPUs: tensor cores and split keys, a plain kernel for f32 pools and odd head sizes.

Same contract as attend_ref; q and the weights are rounded to bf16 for bf16 pools, otherwise to f16 (so are the values of
q8_0), so a row errs by 1e-3 of its norm, and by 9e-3 with bf16. All lengths, ranges and pages are read on the device, so a captured
graph may be replayed for any batch of as many rows, sequences and page columns. A row's bits depend on its own keys only. Rows with
row_seq -1 become zeros. A NaN value reaches every row of its sequence in the same tile, as in the reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyspec.cuda import faults, jit
from pyspec.cuda.context import per_device
from pyspec.cuda.ops.attend import latent
from pyspec.cuda.ops.attend.ref import GUARD, AttendSpec, check_given
from pyspec.cuda.ops.attend.shared import MAX_SEQ, room_of, workspace
from pyspec.cuda.ops.prefetch import ARGS as NEXT_ARGS
from pyspec.cuda.ops.prefetch import prefetch_args
from pyspec.slots.batch import Batch
from pyspec.slots.kv import KVPool
from pyspec.slots.kv_types import Q8_0, KvFormat, KvType

DIMS = (64, 128, 256)
N_TILES = (1, 2, 3, 4, 6)  # columns of a block in eights
# Heads that only much shared memory holds, in fewer builds: others would spill
WIDEST, ITS_TILES = 512, (1, 2, 3)
SPLIT, STEP_BYTES, SCALE_BYTES = 1024, 2048, 256  # as in attend_fold.cuh and attend.cu
# Rows of a prompt's piece that run here however many splits they see; more do while rows times splits are up to MANY.
FEW, MANY = 16, 192
MAX_DEPTH = 6
# Where rows and heads of a group fill half of a tile, and three blocks on each multiprocessor do not run all splits at once, four do.
NARROW, ITS_BLOCKS = 4, 4
WIDE_WARPS = 1536  # of the merge: about as many as fit an H200 when each keeps 16 partials in registers
# Merges that find out which partials there are while the others are made, in place of reading it behind them: 1 thin, 2 long, 4 wide
MERGE_FINDS = 1
# Where no kernel starts before its predecessor is over: no merge finds anything
WAITING = ("sm_80", "sm_86", "sm_87", "sm_89")
SPLIT_ARGS = "p{planes}" + "pppp" + "pp" + "pppp" + "iiiiiiiii" + "f" + NEXT_ARGS
MERGE_ARGS = "ppp" + "ppp" + "pp{sinks}" + "p" + "iiiiii" + "pi"
PLAIN_ARGS = "p{planes}" + "pppp" + "p{sinks}pp" + "iiiiiii" + "f"


def limits(spec: AttendSpec) -> str | None:
    if spec.n_head % spec.n_kv_head:
        return f"{spec.n_head} heads are no multiple of {spec.n_kv_head} KV heads"
    if spec.n_value:
        return latent.limits(spec)
    if spec.scattered:
        return "keys in pages of their own are values, too, in this kernel"
    if spec.head_dim % 32 or spec.head_dim > 512:
        return f"heads are {spec.head_dim} wide; the kernel takes multiples of 32 up to 512"
    return None


@dataclass(frozen=True, slots=True)
class AttendBuild:
    """One build of attend.cu.

    n_tile  columns of a block in eights
    blocks  blocks that fit a multiprocessor, which bounds the registers
    depth   steps of the queue of keys and values
    fetch   bytes that a miss brings into L2: 64, 128 or 256
    narrow  a block has NARROW columns of eight: less shared memory, so that more blocks fit
    """

    dim: int
    n_tile: int
    kv: KvFormat
    arch: str
    blocks: int
    depth: int
    fetch: int = 256
    has_sinks: bool = False
    cap: float = 0.0
    narrow: bool = False

    @property
    def warps(self) -> int:
        return self.dim // 32

    @property
    def columns(self) -> int:
        return NARROW if self.narrow else 8 * self.n_tile

    @property
    def step_bytes(self) -> int:
        return max(step_bytes(self.kv.k, 32, self.kv.k.n_factor), step_bytes(self.kv.v, 64, 1))

    @property
    def shared_bytes(self) -> int:
        """sizeof(Shared) in attend.cu."""
        fragments = 2 * self.warps * self.columns * 64 + self.warps * self.depth * self.step_bytes
        columns = 8 * self.n_tile * 4 * (2 * self.warps + 7)
        size = fragments + columns + SPLIT // 16 * 4 + 4 * (4 * MAX_SEQ + 1) + 4 + 16
        return -(-size // 16) * 16

    @property
    def resident(self) -> int:
        """Blocks that run at once on a multiprocessor."""
        return min(self.blocks, room_of(self.arch) // (self.shared_bytes + 1024))

    def defines(self) -> jit.Macros:
        return {
            "DIM": self.dim,
            "N_TILE": self.n_tile,
            "COLUMNS": self.columns,
            "K_KIND": self.kv.k.kind,
            "V_KIND": self.kv.v.kind,
            "F8_CVT": int(self.arch not in ("sm_80", "sm_86", "sm_87")),
            "HAS_SINKS": int(self.has_sinks),
            "CAP": f"{self.cap:#.9g}f",
            "DEPTH": self.depth,
            "OP_ID": GUARD.number,
            "MIN_BLOCKS": self.blocks,
            "SHARED_BYTES": self.shared_bytes,
            "L2_FETCH": f'"{self.fetch}B"',
            "MERGE_FINDS": 0 if self.arch in WAITING else MERGE_FINDS,
        }


def step_bytes(of: KvType, n_key: int, n_factor: int) -> int:
    """As in attend.cu; n_key: keys of a step, n_factor: words of factors that are queued for each."""
    if not of.is_packed:
        return STEP_BYTES + SCALE_BYTES * (of == Q8_0)
    return STEP_BYTES // 2 + 256 * (of.bits == 5) + 4 * n_key * n_factor


def shape_for(
    dim: int, n_tile: int, kv: KvFormat, arch: str, has_sinks: bool = False, cap: float = 0.0
) -> AttendBuild:
    """As many warps as compile without spills, then the depth that keeps most bytes in flight on a multiprocessor."""
    large = room_of(arch) > 200 * 1024
    warps = {1: 16, 2: 16, 3: 16, 4: 12, 6: 8}[n_tile]
    has_factors = kv.k.n_factor + kv.v.n_factor > 0
    if dim == 256 and n_tile == 1 and large and not has_factors:
        warps = 24
    is_tight = 5 in (kv.k.bits, kv.v.bits) or (not kv.is_one and arch != "sm_90a")
    if n_tile == 3 and has_factors and (dim == 64 or (dim == 128 and is_tight)):
        warps = 12
    shapes = [
        AttendBuild(dim, n_tile, kv, arch, warps * 32 // dim, depth, has_sinks=has_sinks, cap=cap)
        for depth in range(2, MAX_DEPTH + 1)
    ]
    return max(shapes, key=lambda s: (s.resident * s.depth, s.resident))


def usual_for(spec: AttendSpec, n_tile: int, arch: str) -> AttendBuild:
    """The build of these heads."""
    return shape_for(spec.head_dim, n_tile, spec.kv, arch, spec.has_sinks, spec.cap)


def narrow_for(spec: AttendSpec, arch: str) -> AttendBuild | None:
    """The build of NARROW columns; None where no more blocks fit than without it, or more heads than columns read a key."""
    of_two_bytes = spec.kv.k.bits == spec.kv.v.bits == 16
    fits = spec.head_dim == 256 and of_two_bytes and spec.n_head // spec.n_kv_head <= NARROW
    if not ITS_BLOCKS or not fits or room_of(arch) <= 200 * 1024:
        return None
    usual = usual_for(spec, 1, arch)
    for depth in range(MAX_DEPTH, 1, -1):
        build = replace(usual, blocks=ITS_BLOCKS, depth=depth, narrow=True)
        if build.resident == ITS_BLOCKS:
            return build
    return None


def tiles_of(spec: AttendSpec, arch: str) -> tuple[int, ...]:
    """The builds of attend.cu for these heads on such a GPU; (): the plain kernel runs them."""
    if spec.kv.has_f32:
        return ()
    if spec.head_dim == WIDEST:
        has_room = room_of(arch) > 200 * 1024
        return ITS_TILES if has_room and spec.kv.is_one and spec.kv.k.bits >= 8 else ()
    return N_TILES if spec.head_dim in DIMS else ()


def shapes_of(spec: AttendSpec, arch: str) -> list[AttendBuild]:
    """All builds of attend.cu that batches may take."""
    made = [usual_for(spec, n, arch) for n in tiles_of(spec, arch)]
    narrow = narrow_for(spec, arch)
    return made if narrow is None else [*made, narrow]


def n_tile_for(columns: int, tiles: tuple[int, ...] = N_TILES) -> int:
    """The fewest tiles, then the narrowest that hold `columns` (rows of a sequence times heads of a group)."""
    n_tiles = -(-columns // (8 * tiles[-1]))
    return next(n for n in tiles if 8 * n * n_tiles >= columns)


@dataclass(frozen=True, slots=True)
class Kernels:
    split: jit.Kernel
    merge_thin: jit.Kernel
    merge_long: jit.Kernel
    merge_wide: jit.Kernel
    grid: int
    shape: AttendBuild

    def merge(self, n_part: int, dim: int) -> tuple[jit.Kernel, int]:
        """The kernel that merges the partials of so many rows and heads, and the dims of each of its warps. All kernels give the same bits."""
        if n_part * -(-dim // 32) <= WIDE_WARPS:
            return self.merge_thin, 32
        return (self.merge_wide if n_part * -(-dim // 128) > WIDE_WARPS else self.merge_long), 128


def _letters(kv: KvFormat, has_sinks: bool) -> tuple[str, str]:
    """Signature letters of the pool's planes (`KVPool.read_planes`) and of the sinks."""
    return "pp" + "p" * n_scales(kv), "p" if has_sinks else ""


def n_scales(kv: KvFormat) -> int:
    """Planes of factors."""
    return sum(of.n_factor > 0 for of in (kv.k, kv.v))


def _entries(shape: AttendBuild) -> dict[str, str]:
    planes, sinks = _letters(shape.kv, shape.has_sinks)
    merges = {
        f"attend_merge_{name}": MERGE_ARGS.format(sinks=sinks) for name in ("thin", "long", "wide")
    }
    return {"attend_split": SPLIT_ARGS.format(planes=planes)} | merges


@per_device
def _kernels(device: torch.device, shape: AttendBuild) -> Kernels:
    code = jit.compile_cubin("attend", shape.arch, shape.defines())
    split, thin, long, wide = (code.kernel(*entry) for entry in _entries(shape).items())
    n_sm = torch.cuda.get_device_properties(device).multi_processor_count
    return Kernels(
        split.allow_shared(shape.shared_bytes), thin, long, wide, n_sm * shape.resident, shape
    )


def plain_defines(spec: AttendSpec) -> jit.Macros:
    """Macros of attend_plain.cu."""
    kinds = {"K_KIND": spec.kv.k.kind, "V_KIND": spec.kv.v.kind}
    own = {"DIM": spec.head_dim, "HAS_SINKS": int(spec.has_sinks), "OP_ID": GUARD.number}
    return {**kinds, **own, "CAP": f"{spec.cap:#.9g}f"}


def _plain_signature(spec: AttendSpec) -> str:
    planes, sinks = _letters(spec.kv, spec.has_sinks)
    return PLAIN_ARGS.format(planes=planes, sinks=sinks)


PLAIN = jit.KernelFile("attend_plain", _plain_signature, plain_defines)


def n_items(spec: AttendSpec, columns: int, grid: int, seqs: Iterable[tuple[int, int]]) -> int:
    """Most items of a batch, `seqs` being (tiles, keys): all splits, or the ranges used instead of splits."""
    sizes = [(spec.n_kv_head * tiles, n_key) for tiles, n_key in seqs]
    splits, ranges = (
        sum(n * -(-n_key // size) for n, n_key in sizes) for size in (SPLIT, spec.head_dim)
    )
    return max(splits, min(ranges, most_ranges(spec, grid)))


def most_ranges(spec: AttendSpec, grid: int) -> int:
    """More of them than this are never items."""
    return 3 * grid * (SPLIT // spec.head_dim) // 4


def n_float(spec: AttendSpec, columns: int) -> int:
    """Floats of an item in the workspace."""
    return columns * (spec.head_dim + 2)


def workspace_bytes(spec: AttendSpec, n_seq: int, n_key: int, n_row: int) -> int:
    """Bytes for the batches of an engine. A sequence has at most `n_key` keys, and at most `n_row` rows or those of a prompt that
    attend_prompt leaves to this kernel."""
    if not torch.cuda.is_available() or (jit.missing(spec.device) or limits(spec)) is not None:
        return 0
    arch = jit.arch_of(torch.cuda.get_device_capability(spec.device))
    n_sm = torch.cuda.get_device_properties(spec.device).multi_processor_count
    return bytes_on(arch, n_sm, spec, n_seq, n_key, n_row)


def bytes_on(arch: str, n_sm: int, spec: AttendSpec, n_seq: int, n_key: int, n_row: int) -> int:
    """The same on a GPU of `n_sm` multiprocessors."""
    if spec.n_value:
        return 4 * latent.most_floats(spec, arch, n_seq, n_key, n_row)
    if not tiles_of(spec, arch):  # the plain kernel's
        return 0
    return 4 * most_floats(spec, n_seq, n_key, n_row, arch, n_sm)


def most_floats(spec: AttendSpec, n_seq: int, n_key: int, n_row: int, arch: str, n_sm: int) -> int:
    """The same in floats, on a GPU of `n_sm` multiprocessors."""
    group, n_split = spec.n_head // spec.n_kv_head, -(-n_key // SPLIT)
    rows = max(max(n_row, FEW) * n_split, MANY)  # times splits
    most = 0
    for shape in shapes_of(spec, arch):
        splits = n_seq * spec.n_kv_head * (rows * group // shape.columns + n_split)
        ranges = min(splits * SPLIT // spec.head_dim, most_ranges(spec, n_sm * shape.resident))
        most = max(most, max(splits, ranges) * n_float(spec, shape.columns))
    return most


class AttendLaunch:
    """The kernels of one spec; called as attend_ref's. `shape` fixes the build."""

    fetches = True  # fetches the weights that `after` names, see fuse.py

    def __init__(self, spec: AttendSpec, shape: AttendBuild | None) -> None:
        self.spec, self.shape = spec, shape
        self.builds: dict[int, Kernels] = {}  # by the tiles of a block's columns
        self.arch = jit.arch_of(torch.cuda.get_device_capability(spec.device))
        self.spaces, self.fault = workspace(spec.device), faults.record(spec.device)
        self.heads, self.scale = (spec.n_head, spec.n_kv_head), spec.scale * math.log2(math.e)
        self.narrow = narrow_for(spec, self.arch) if shape is None else None
        n_sm = torch.cuda.get_device_properties(spec.device).multi_processor_count
        usual = 0 if self.narrow is None else n_sm * usual_for(spec, 1, self.arch).resident
        self.many = usual // spec.n_kv_head + 1  # sequences whose splits are more than the usual blocks

    def __call__(
        self,
        q: Tensor,
        pool: KVPool,
        batch: Batch,
        window: int = 0,
        sinks: Tensor | None = None,
        after: Tensor | None = None,
    ) -> Tensor:
        """`after`: the weights of the product that reads the result."""
        spec = self.spec
        check_given(q, pool, batch, sinks, spec)
        sink = [] if sinks is None else [sinks]
        n_row, (n_seq, n_col) = q.shape[0], batch.page_table.shape
        if not n_row:
            return torch.empty_like(q)
        tiles = tiles_of(spec, self.arch)
        if not tiles or n_seq > MAX_SEQ or batch.page_size % 16:
            return self._plain(q, pool, batch, window, sink)
        group = spec.n_head // spec.n_kv_head
        kernels = self._build(batch, group)
        build = kernels.shape
        n_key = n_col * batch.page_size
        if batch.bucket is None:
            seqs = [
                (-(-q.width * group // build.columns), n)
                for q, n in zip(batch.seqs, batch.max_hi, strict=True)
            ]
        else:  # replayed for any of this size
            seqs = [(n_row * group // build.columns + n_seq, n_key)]
        n_item = n_items(spec, build.columns, kernels.grid, seqs)
        n_part, n_ml = n_item * build.columns * spec.head_dim, n_item * build.columns * 2
        space = self.spaces.take(n_part + n_ml)
        part, part_ml, plan = space[:n_part], space[n_part:], self.spaces.plan
        out = torch.empty_like(q)
        seen, rows = (batch.positions, batch.lo, batch.hi), (batch.row_seq, batch.seq_start)
        pages = n_col, batch.page_size, pool.n_row // batch.page_size
        read = q, *pool.read_planes, batch.page_table, *seen, *rows, part, part_ml, plan, self.fault
        sizes = n_row, n_seq, *self.heads, *pages, window, n_item, self.scale
        grid, args = min(kernels.grid, n_item), (*read, *sizes, *prefetch_args(after, n_row))
        kernels.split.launch((grid,), 32 * build.warps, args, build.shared_bytes, overlap=True)
        counts = n_seq, *self.heads, n_key, window, n_item
        made = part, part_ml, plan, *seen, *rows, *sink, out, *counts, self.fault, grid
        merge, own = kernels.merge(n_row * spec.n_head, spec.head_dim)
        pieces = -(-spec.head_dim // own)
        merge.launch((n_row, -(-spec.n_head * pieces // 4)), 128, made, overlap=True)
        return out

    def _build(self, batch: Batch, group: int) -> Kernels:
        """The build for the widest sequence and the pool's type."""
        widest, spec = max((seq.width for seq in batch.seqs), default=1), self.spec
        if self.narrow is not None and widest * group <= NARROW and len(batch.page_table) >= self.many:
            return _kernels(spec.device, self.narrow)
        n_tile = n_tile_for(max(1, widest) * group, tiles_of(self.spec, self.arch))
        if n_tile not in self.builds:
            shape = self.shape or usual_for(spec, n_tile, self.arch)
            self.builds[n_tile] = _kernels(spec.device, shape)
        return self.builds[n_tile]

    def _plain(self, q: Tensor, pool: KVPool, batch: Batch, window: int, sinks: list[Tensor]) -> Tensor:
        spec, out, (n_seq, n_col), b = self.spec, torch.empty_like(q), batch.page_table.shape, batch
        read = q, *pool.read_planes, b.page_table, b.positions, b.lo, b.hi, b.row_seq
        sizes = n_seq, *self.heads, n_col, b.page_size, pool.n_row // b.page_size, window
        args = *read, *sinks, out, self.fault, *sizes, self.scale
        PLAIN.kernel(spec.device, spec).launch((len(q), spec.n_head), 128, args)
        return out


def programs(spec: AttendSpec, target: jit.GpuKind) -> Iterable[jit.Program]:
    if spec.n_value:
        yield from latent.programs(spec, target)
        return
    if not tiles_of(spec, target.arch):
        yield from PLAIN.programs(spec, target)
        return
    for shape in shapes_of(spec, target.arch):
        yield target.program("attend", shape.defines())


def bind(spec: AttendSpec, *, shape: AttendBuild | None = None) -> AttendLaunch | latent.LatentLaunch:
    """`shape` fixes the build (measurements); by default the widest sequence and the pool's dtype decide."""
    return latent.bind(spec) if spec.n_value else AttendLaunch(spec, shape)
