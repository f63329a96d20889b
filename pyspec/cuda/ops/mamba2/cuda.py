"""`mamba2` for NVIDIA GPUs: two launches a layer, sequential over tokens; prompts in chunks (kernels: mamba2.cu, mamba2_chunk.cu).

Same contract as mamba2_ref, with its own order of sums over the state's columns. All lengths and counts are read on the
device, so a captured graph may be replayed for any batch of as many sequences and rows; sequences without rows touch nothing.

The bits of a state do not depend on the split of its tokens into verifies and kept rows, as long as a piece has fewer than CHUNKED
rows. Longer kept sequences are summed in chunks: within 3e-5 of the sequential state (outputs within 1e-3, because their last
products are one pass of f16). These do not depend on the neighbours, but another cut rounds otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pyspec.cuda import faults, jit
from pyspec.cuda.kernel_context import current
from pyspec.cuda.ops.mamba2 import chunk as mamba2_chunk
from pyspec.cuda.ops.mamba2.ref import Mamba2Spec, Params
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.cuda.ops.prefetch import ARGS as NEXT_ARGS
from pyspec.cuda.ops.prefetch import NOTHING, prefetch_args
from pyspec.cuda.ops.recurrent import launch as common
from pyspec.cuda.ops.recurrent.launch import Fold, Meta
from pyspec.slots.batch import Batch
from pyspec.slots.recurrent import StateLayer

CHANNELS = 128  # of a block of mamba2_conv
CONV_ARGS = "plpl" + "pppp" + "ppppp" + "pppp" + "ppppp" + "pppp" + "iiii" + "p"
ROWS_ARGS = "pp" + "pppp" + "pppp" + "ppppp" + "p" + "pppp" + "iiii" + "p" + NEXT_ARGS


def limits(spec: Mamba2Spec) -> str | None:
    s = spec.shape
    if s.n_conv != common.TAPS:
        return f"the convolution has {s.n_conv} taps; the kernel is built for {common.TAPS}"
    if s.head_dim not in (32, 64, 128):
        return f"heads are {s.head_dim} wide; the kernel takes 32, 64 or 128"
    if s.n_state % 32 or s.n_state > 128:
        return f"states are {s.n_state} wide; the kernel takes multiples of 32 up to 128"
    if s.n_head % 4 or (s.n_head * s.head_dim) % CHANNELS or (s.n_group * s.n_state) % CHANNELS:
        return f"{s.n_head} heads of {s.head_dim} and {s.n_group} groups of {s.n_state} do not fill blocks of {CHANNELS}"
    return None


def columns_of(shape: Mamba2Shape) -> Sequence[int]:
    """Columns a lane may have: a block's rows of the state are of one head."""
    return [c for c in common.COLUMNS if shape.head_dim % (common.THREADS // common.LANES * c) == 0]


def defines(s: Mamba2Shape, arch: str, columns: int) -> jit.Macros:
    """Macros of mamba2.cu for `columns` a lane; all give the same bits."""
    return s.macros() | {"COLS": columns, "BLOCKS": common.blocks_for(arch, columns)}


FILE = jit.KernelFile[tuple[Mamba2Shape, str, int]](
    "mamba2", {"mamba2_conv": CONV_ARGS, "mamba2_rows": ROWS_ARGS}, lambda key: defines(*key)
)


def columns_for(s: Mamba2Shape, n_seq: int, arch: str, n_multiprocessor: int) -> int:
    """Four if that makes one wave of blocks out of two; else two, which keeps more warps in flight."""
    choices, n = columns_of(s), s.n_head * n_seq * s.head_dim
    two, four = (common.waves(n, columns, arch, n_multiprocessor) for columns in common.COLUMNS)
    return 4 if 4 in choices and four <= 1 < two else choices[0]


class Mamba2Launch:
    """The kernels of one spec; called as mamba2_ref's."""

    fetches = True  # fetches the weights that `after` names, see fuse.py

    def __init__(self, spec: Mamba2Spec, columns: int | None, chunked: int) -> None:
        assert chunked >= common.TAPS, "a chunked sequence is longer than the window it leaves"
        self.spec, self.columns, self.chunked = spec, columns, chunked
        self.arch = jit.arch_of(torch.cuda.get_device_capability(spec.device))
        self.n_sm = torch.cuda.get_device_properties(spec.device).multi_processor_count
        ways = [columns] if columns else columns_of(spec.shape)
        self.kernels = {c: FILE.kernels(spec.device, (spec.shape, self.arch, c)) for c in ways}
        self.chunks = mamba2_chunk.kernels(spec.device, spec.shape)
        self.fault = faults.record(spec.device)

    def folder(self) -> Fold:
        return folder(self.spec)

    def __call__(
        self,
        m: Tensor,
        dt: Tensor,
        p: Params,
        layer: StateLayer,
        batch: Batch,
        after: Tensor | None = None,
    ) -> Tensor:
        """`after`: the weights of the product that reads the result."""
        s, n_row = self.spec.shape, m.shape[0]
        common.check_rows("mamba2", (m, dt), layer, common.UNIT)
        common.check_kept("mamba2", p.tensors, (1, 1, 1), layer, common.UNIT)
        out = m.new_empty(n_row, s.n_head, s.head_dim)
        if not n_row:
            return out
        own = common.divided(batch, layer, n_row, self.chunked, self.chunks.chunk, self.fault)
        old, new = buffers(m, s, *((0, 0) if own.only_long else (own.n_seq * layer.width, n_row)))
        cols = self.columns or columns_for(s, own.n_seq, self.arch, self.n_sm)
        conv, rows = self.kernels[cols]
        inputs = m, m.stride(0), dt, dt.stride(0)
        if not own.only_long:
            grid = (s.n_channel // CHANNELS, own.n_seq, common.stretches(n_row, own.n_seq, layer.width))
            read = *inputs, p.a, p.dt_bias, p.conv_w, p.conv_b
            args = common.conv_args(read, layer, old, new, own.counts, self.fault)
            conv.launch(grid, common.CONV_THREADS, args, overlap=True)
        if own.n_long:
            made = self.chunks.prepare(inputs, p, layer.conv, own)
        if own.runs_rows:
            args = rows_args(layer, p.d, old, new, out, own.counts)
            args += [self.fault, *prefetch_args(after, n_row)]
            rows.launch(
                common.rows_grid(s.n_head, s.head_dim, cols, own.n_seq),
                common.THREADS,
                args,
                overlap=True,
            )
        if own.n_long:
            self.chunks.run(made, inputs, p, layer, out, own)
        return out


def buffers(
    m: Tensor, s: Mamba2Shape, n_old: int, n_row: int
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Room for conv's results: of records that are folded (x, b, e, t), and of rows (x, b, c, e, t)."""
    inner, wide = s.n_head * s.head_dim, s.n_group * s.n_state
    sizes = [n_old * inner, n_old * wide, n_row * inner, n_row * wide, n_row * wide]
    sizes += [n_old * s.n_head, n_old * s.n_head, n_row * s.n_head, n_row * s.n_head]
    fold_x, fold_b, x, b, c, fold_e, fold_t, e, t = m.new_empty(sum(sizes)).split(sizes)
    return (fold_x, fold_b, fold_e, fold_t), (x, b, c, e, t)


def rows_args(
    layer: StateLayer,
    d: Tensor,
    old: Sequence[Tensor],
    new: Sequence[Tensor],
    out: Tensor,
    counts: Sequence[jit.Arg],
) -> list[jit.Arg]:
    """Of mamba2_rows, up to the record of faults."""
    return [layer.state, d, *layer.records(), *old, *new, out, *counts]


def programs(spec: Mamba2Spec, target: jit.GpuKind) -> Iterable[jit.Program]:
    shape, n = spec.shape, target.n_multiprocessor
    for columns in columns_of(shape):
        yield from FILE.programs((shape, target.arch, columns), target)
    chunk, most = mamba2_chunk.cut(shape, target.arch)
    yield target.program("mamba2_chunk", mamba2_chunk.defines(shape, chunk, most))
    if most == 64 and (not n or mamba2_chunk.narrow(shape, 1, n)):
        yield target.program("mamba2_chunk", mamba2_chunk.defines(shape, chunk, 32))


def bind(spec: Mamba2Spec, *, columns: int | None = None, chunked: int = common.CHUNKED) -> Mamba2Launch:
    """For measurements, `columns` fixes how many rows of the state a lane holds (else the number of sequences decides) and
    `chunked` from how many rows a kept sequence is chunked."""
    return Mamba2Launch(spec, columns, common.NEVER if current().is_exact else chunked)


def folder(spec: Mamba2Spec) -> Fold:
    """The call that folds records without rows."""
    s, device, columns = spec.shape, spec.device, columns_of(spec.shape)[0]
    arch = jit.arch_of(torch.cuda.get_device_capability(device))
    conv, rows = FILE.kernels(device, (s, arch, columns))
    unread, fault = torch.zeros(s.n_channel * common.TAPS, device=device), faults.record(device)
    inputs: list[jit.Arg] = [unread, 0, unread, 0, *[unread] * 4]
    old, new = [unread] * 4, [unread] * 5

    def run(layer: StateLayer, meta: Meta) -> None:
        counts = common.counts_of(meta, layer)
        args = common.conv_args(inputs, layer, old, new, counts, fault)
        conv.launch((s.n_channel // CHANNELS, 1, 1), common.CONV_THREADS, args)
        args = [*rows_args(layer, unread, old, new, unread, counts), fault, *NOTHING]
        rows.launch(
            common.rows_grid(s.n_head, s.head_dim, columns, 1), common.THREADS, args, overlap=True
        )

    return common.folding(run)
