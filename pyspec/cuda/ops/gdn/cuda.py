"""`gdn` for NVIDIA GPUs: two launches a layer, sequential over tokens; prompts in chunks (kernels: gdn.cu, gdn_chunk.cu).

Same contract as gdn_ref, with its own order of sums. All lengths and counts are read on the device, so a captured graph may
be replayed for any batch of as many sequences and rows; sequences without rows touch nothing.

The bits of a state do not depend on the split of its tokens into verifies and kept rows, as long as a piece has fewer than CHUNKED
rows. Longer kept sequences are summed in chunks of 64 rows: within 3e-5 of the sequential state (outputs within 1e-3, because their
last products are one pass of f16). These do not depend on the neighbours, but another cut rounds otherwise.

With a decay for each dimension of keys (`GdnShape.by_key`) all rows go one by one, and outputs to their own memory.

If rows are few, outputs go directly into the next product's rows (`GdnLaunch.prepared`), with the bits of rows_cuda.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyspec.cuda import faults, jit
from pyspec.cuda.kernel_context import current
from pyspec.cuda.ops.gdn import chunk as gdn_chunk
from pyspec.cuda.ops.gdn import ref as gdn_ref
from pyspec.cuda.ops.gdn.ref import Gdn, GdnSpec, Given
from pyspec.cuda.ops.gdn.shape import GdnShape
from pyspec.cuda.ops.prefetch import ARGS as NEXT_ARGS
from pyspec.cuda.ops.prefetch import prefetch_args
from pyspec.cuda.ops.recurrent import launch as common
from pyspec.cuda.ops.recurrent.launch import Fold, Meta
from pyspec.cuda.ops.rows.cuda import BLOCKED, GatedRowBuffer, Rows, RowsLaunch, aligned, values_of
from pyspec.cuda.ops.rows.cuda import builds as rows_builds
from pyspec.cuda.ops.rows.ref import HeadNorm, PrepKind
from pyspec.slots.batch import Batch
from pyspec.slots.recurrent import StateLayer

DIM = 128
MANY, MANY_ROWS = 24, 4  # sequences from which one warp convolves each, and the most rows of one
# States (value heads of all sequences) up to which saving a launch is worth its registers (docs/log.md)
MOST_PREPARED = 1536
FEW_ROWS = 2  # mean rows, if some may have more: a graph has empty sequences, too, and one warp takes 2 us a row
CONV_ARGS = "plplplppp" + "ppppp" + "pppp" + "pppppp" + "pppp" + "iiiif" + "p"
ROWS_ARGS = "ppp" + "pppp" + "pppppp" + "pppp" + "iiii" + "p"
OUT_ARGS, INTO_ARGS = "p", "plpff" + "ppp" + "i" + NEXT_ARGS


def limits(spec: GdnSpec) -> str | None:
    shape = spec.shape
    if shape.dim != DIM:
        return f"states are {shape.dim} wide; the kernel is built for {DIM}"
    if shape.n_conv != common.TAPS:
        return f"the convolution has {shape.n_conv} taps; the kernel is built for {common.TAPS}"
    if shape.n_v_head % shape.n_k_head:
        return f"{shape.n_v_head} value heads are no multiple of {shape.n_k_head} key heads"
    if shape.n_v_head % 2 and not shape.by_key:
        return (
            f"{shape.n_v_head} value heads: rows with their gates do not begin at multiples of 16 bytes"
        )
    return None


def defines(shape: GdnShape, arch: str, columns: int) -> jit.Macros:
    """Macros of gdn.cu for 2 or 4 columns a lane; both give the same bits."""
    blocks = common.blocks_for(arch, columns) - shape.by_key  # decays of keys take registers
    is_roomy = arch == "sm_90a" and columns == 2 and not shape.by_key
    alone = blocks + is_roomy  # of gdn_rows: Hopper's registers hold one more
    return {
        "N_K": shape.n_k_head,
        "N_V": shape.n_v_head,
        "COLS": columns,
        "BLOCKS": blocks,
        "ALONE": alone,
    } | shape.macros()


def columns_for(
    shape: GdnShape, n_seq: int, arch: str, n_multiprocessor: int, *, prepares: bool = False
) -> int:
    """Four if that makes one wave of blocks out of two; else two, which keeps more warps in flight. For gdn_rows_into, whose
    blocks run by clusters, four also if that fills the last wave better (docs/log.md)."""

    two, four = (
        common.waves(shape.n_v_head * n_seq * DIM, columns, arch, n_multiprocessor)
        for columns in common.COLUMNS
    )
    if prepares and two > 2 and four / math.ceil(four) > two / math.ceil(two):
        return 4
    return 4 if four <= 1 < two else 2


ENTRIES = {"gdn_conv": CONV_ARGS, "gdn_conv_many": CONV_ARGS + "i", "gdn_rows": ROWS_ARGS + OUT_ARGS}
INTO = ENTRIES | {"gdn_rows_into": ROWS_ARGS + INTO_ARGS}
FILE, CLUSTERED = (
    jit.KernelFile[tuple[GdnShape, str, int]]("gdn", entries, lambda key: defines(*key))
    for entries in (ENTRIES, INTO)
)


def _kernels(device: torch.device, shape: GdnShape, columns: int) -> tuple[jit.Kernel, ...]:
    """gdn_conv, gdn_conv_many, gdn_rows and, on GPUs with clusters, gdn_rows_into."""
    capability = torch.cuda.get_device_capability(device)
    file = CLUSTERED if capability >= (9, 0) and not shape.by_key else FILE
    return file.kernels(device, (shape, jit.arch_of(capability), columns))


class GdnLaunch:
    """The kernels of one spec; called as gdn_ref's."""

    def __init__(self, spec: GdnSpec, columns: int | None, chunked: int) -> None:
        self.spec, self.shape, self.eps = spec, spec.shape, spec.eps
        self.columns, self.chunked, self.many = columns, chunked, (MANY, MANY_ROWS)
        capability = torch.cuda.get_device_capability(spec.device)
        self.prepares = capability >= (9, 0) and not self.shape.by_key
        self.arch = jit.arch_of(capability)
        self.n_sm = torch.cuda.get_device_properties(spec.device).multi_processor_count
        ways = [columns] if columns else common.COLUMNS
        self.kernels = {c: _kernels(spec.device, spec.shape, c) for c in ways}
        self.fault = faults.record(spec.device)
        self.chunks = None if self.shape.by_key else gdn_chunk.kernels(spec.device, spec.shape)
        self.seen: tuple[Tensor, StateLayer] | None = None  # of the layer called last

    def __call__(self, *given: *Given) -> Tensor:
        m, alpha, beta, a, dt_bias, conv_w, layer, batch = given
        out = m.new_empty(m.shape[0], self.shape.n_v_head, DIM)
        if m.shape[0]:
            self._run((m, alpha, beta), (a, dt_bias, conv_w), layer, batch, out)
        return out

    def prepared(self, *given: *Given, into: GatedRowBuffer) -> Rows:
        """into.rows(o, into.prep) of the outputs o of a call; without a launch of its own if there are clusters, no chunks and few states, and
        heads have one decay.

        The path does not depend on the contents of a batch in a graph, and changes no bit. Rows without a sequence keep
        their old contents.
        """
        *tensors, layer, batch = given
        many = batch.seq_slot.shape[0] * self.shape.n_v_head > MOST_PREPARED
        if not self.prepares or many or common.chunked_of(batch, self.chunked):
            return into.rows(self(*given).flatten(1), into.prep)
        m, alpha, beta, a, dt_bias, conv_w = tensors
        self._run((m, alpha, beta), (a, dt_bias, conv_w), layer, batch, into)
        return into.rows.room(m.shape[0])

    def folder(self) -> Fold:
        return folder(self.spec)

    def _run(
        self,
        raw: tuple[Tensor, Tensor, Tensor],
        weights: tuple[Tensor, Tensor, Tensor],
        layer: StateLayer,
        batch: Batch,
        out: Tensor | GatedRowBuffer,
    ) -> None:
        m, (a, dt_bias, conv_w), shape = raw[0], weights, self.shape
        n_row, n_v = m.shape[0], shape.n_v_head
        common.check_rows("gdn", raw, layer, common.UNIT, per_head=(shape.n_decay, 1))
        if self.seen is None or self.seen[0] is not conv_w or self.seen[1] is not layer:
            common.check_kept("gdn", weights, (1, shape.n_decay), layer, common.UNIT)
            assert shape.n_channel == DIM * (2 * shape.n_k_head + n_v)
            self.seen = conv_w, layer
        own = common.divided(batch, layer, n_row, self.chunked, gdn_chunk.CHUNK, self.fault)
        cols = self.columns or columns_for(
            shape, own.n_seq, self.arch, self.n_sm, prepares=not isinstance(out, Tensor)
        )
        conv, many, rows, *rows_into = self.kernels[cols]
        old, new = buffers(m, shape, own.n_seq * layer.width, n_row)
        of_rows = (x for t in raw for x in (t, t.stride(0)))
        inputs: list[jit.Arg] = [*of_rows, a, dt_bias, conv_w]
        if not own.only_long:
            grid = (shape.n_k_head + n_v, own.n_seq, common.stretches(n_row, own.n_seq, layer.width))
            args = common.conv_args(inputs, layer, old, new, own.counts, self.eps, self.fault)
            few = self.many[1] if layer.width <= self.many[1] else FEW_ROWS
            if not own.n_long and own.n_seq >= self.many[0] and n_row <= few * own.n_seq:
                grid = (grid[0], -(-own.n_seq // (common.CONV_THREADS // 32)), 1)
                many.launch(grid, common.CONV_THREADS, (*args, own.n_seq), overlap=True)
            else:
                conv.launch(grid, common.CONV_THREADS, args, overlap=True)
        if own.n_long and self.chunks is not None:
            here = new[2], new[3], new[4]  # v, e, b
            qk = self.chunks.prepare(inputs, [layer.conv, *layer.records()], old, here, own, self.eps)
        if own.runs_rows:
            to: list[jit.Arg] = [out] if isinstance(out, Tensor) else _place(out, n_row, n_v * DIM)
            kernel = rows if isinstance(out, Tensor) else rows_into[0]
            args = [*rows_args(layer, old, new, own.counts, self.fault), *to]
            kernel.launch(
                common.rows_grid(n_v, DIM, cols, own.n_seq), common.THREADS, args, overlap=True
            )
        if own.n_long and self.chunks is not None:
            assert isinstance(out, Tensor)
            self.chunks.run(qk, here, layer.state, out, own)


def buffers(
    m: Tensor, shape: GdnShape, n_old: int, n_row: int
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Room for conv's results: of records that are folded (k, v, e, b), and of rows (q, k, v, e, b, kq)."""
    kd, vd, n_k, n_v = shape.n_k_head * DIM, shape.n_v_head * DIM, shape.n_k_head, shape.n_v_head
    decays = n_v * shape.n_decay
    sizes = [n_old * kd, n_old * vd, n_row * kd, n_row * kd, n_row * vd]
    sizes += [n_row * decays, n_old * decays, n_row * n_v, n_row * n_k, n_old * n_v]
    fold_k, fold_v, q, k, v, e, fold_e, b, kq, fold_b = m.new_empty(sum(sizes)).split(sizes)
    return (fold_k, fold_v, fold_e, fold_b), (q, k, v, e, b, kq)


def rows_args(
    layer: StateLayer,
    old: Sequence[Tensor],
    new: Sequence[Tensor],
    counts: Sequence[jit.Arg],
    fault: Tensor,
) -> list[jit.Arg]:
    """Of gdn_rows, up to its output."""
    q, k, v, e, b, kq = new
    return [layer.state, layer.k, layer.v, *old, q, k, v, e, kq, b, *counts, fault]


def _place(into: GatedRowBuffer, n_row: int, n_in: int) -> list[jit.Arg]:
    """Further arguments of gdn_rows_into, after those of gdn_rows."""
    prep, rows = into.prep, into.rows.room(n_row)
    gate = aligned(prep.gate)
    assert (into.rows.n_in, into.rows.prepare.layout, prep.dim) == (n_in, BLOCKED, DIM)
    assert gate.shape == (n_row, n_in) and gate.dtype == prep.weight.dtype == torch.float32
    assert prep.weight.data_ptr() % 16 == 0
    of_head = gate, gate.stride(0), prep.weight, prep.eps, prep.power
    to = rows.blocks, rows.sums, rows.powers, rows.pad
    return [*of_head, *to, *prefetch_args(into.weights, n_row)]


def programs(spec: GdnSpec, target: jit.GpuKind) -> Iterable[jit.Program]:
    for columns in common.COLUMNS:
        yield from FILE.programs((spec.shape, target.arch, columns), target)
    if spec.shape.by_key:
        return
    yield target.program("gdn_chunk", gdn_chunk.defines(spec.shape, target.arch))
    n_in = spec.shape.n_v_head * DIM
    yield from rows_builds(n_in, PrepKind.HEADS, DIM, BLOCKED, target)  # the check needs both
    yield from rows_builds(n_in, PrepKind.PLAIN, 0, BLOCKED, target)


def bind(spec: GdnSpec, *, columns: int | None = None, chunked: int = common.CHUNKED) -> GdnLaunch:
    """For measurements, `columns` fixes how many columns a lane holds (else the number of sequences decides) and `chunked`
    from how many rows a kept sequence is chunked."""
    is_sequential = current().is_exact or spec.shape.by_key
    return GdnLaunch(spec, columns, common.NEVER if is_sequential else chunked)


def folder(spec: GdnSpec) -> Fold:
    """The call that folds records without rows."""
    shape, device = spec.shape, spec.device
    conv, _, rows, *_ = _kernels(device, shape, common.COLUMNS[0])
    unread, fault = torch.zeros(shape.n_channel * common.TAPS, device=device), faults.record(device)
    inputs: list[jit.Arg] = [*(unread, 0) * 3, unread, unread, unread]

    def run(layer: StateLayer, meta: Meta) -> None:
        (old, _), new = buffers(unread, shape, layer.width, 0), [unread] * 6
        counts = common.counts_of(meta, layer)
        args = common.conv_args(inputs, layer, old, new, counts, spec.eps, fault)
        conv.launch((shape.n_k_head + shape.n_v_head, 1, 1), common.CONV_THREADS, args)
        args = [*rows_args(layer, old, new, counts, fault), unread]
        rows.launch(
            common.rows_grid(shape.n_v_head, DIM, common.COLUMNS[0], 1),
            common.THREADS,
            args,
            overlap=True,
        )

    return common.folding(run)


def check(launch: Gdn, reference: Gdn, spec: GdnSpec) -> str | None:
    """gdn_ref's check, the same rounds as if they had many sequences, and both again for the blocks of `prepared`, and for the blocks' sums."""
    why = gdn_ref.check(launch, reference, spec)
    if why is not None or not isinstance(launch, GdnLaunch):
        return why
    launch.many = 1, common.NEVER
    why = gdn_ref.check(launch, reference, spec)
    launch.many = MANY, MANY_ROWS
    if why is not None:
        return f"with a warp for each sequence, {why}"
    if spec.shape.by_key:
        return None
    n_in, gen = spec.shape.n_v_head * DIM, torch.Generator().manual_seed(1)
    rows = RowsLaunch(spec.device, n_in, (8, 16, 256))
    norm = 1 + 0.1 * torch.randn(DIM, generator=gen).to(spec.device)

    def prep_of(m: Tensor) -> HeadNorm:
        return HeadNorm(norm, spec.eps, m[:, -n_in:])

    prepared: Callable[..., Rows] = launch.prepared

    def got(*args: Any) -> Tensor:
        into = GatedRowBuffer(rows, prep_of(args[0]))
        return torch.cat(values_of(prepared(*args, into=into), n_in), 1)

    def want(*args: Any) -> Tensor:
        x = prep_of(args[0])(reference(*args).flatten(1))
        return torch.cat([x, x.unflatten(1, (-1, 32)).sum(-1)], 1)

    why = gdn_ref.check(got, want, spec, rounded=True)
    return None if why is None else f"prepared for the next product, {why}"
