"""`moe` on NVIDIA GPUs: one launch for all gates and ups, one for all downs (moe.cu).

A launch of its own lists rows by expert before (moe_pairs.cu); the fewest rows need no lists. The launch that prepares rows for the
next product sums the experts' outputs (`shares`), or a launch of its own, or, of the fewest rows, the last CTA of the downs: launches
are most of their time, and tickets would be most of the time of more rows. A shared expert runs in the same launches, cut into pieces
of the others' width: for all rows, and first, because its input is known before rows have chosen.

Types of INTEGER (moe_builds.py) multiply integer rows in planes (rows.cu's LAYOUT 3), written by the launch that prepares them.

The rows' choices never reach the host: grids are as large as the number of rows can make them, and CTAs without work
end at once. So it can be captured, and prompts run in the same way, MAX_ROWS rows at a time, or LONG_ROWS if an expert would have few of
those (`rows_at_once`). Layers of a device share buffers, so all launches must be on one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cuda.context import per_device
from pyspec.cuda.jit import Arg, Kernel, KernelFile, arch_of, compile_cubin
from pyspec.cuda.ops.linear.formats import CHUNKS, FORMATS, RECORDS
from pyspec.cuda.ops.linear.pack import interleave, n_chunks, n_groups, packed_bytes, repack
from pyspec.cuda.ops.moe.builds import (
    ACTS,
    ADDING,
    BUILDS,
    FEW_PAIRS,
    GATED,
    GROUPS,
    MANY_PAIRS,
    NONE,
    PARTS,
    SPLIT_RESIDENT,
    SPLIT_WAVES,
    MoeBuild,
    between_bytes,
    layout_of,
    most_pairs,
    n_resident,
    n_stages,
    n_taken,
    planes_of,
    residents,
    splits,
    stage_bytes,
)
from pyspec.cuda.ops.moe.builds import programs as programs
from pyspec.cuda.ops.moe.ref import NOTHING, Added, Betas, ExpertsRun, MoeSpec, Stack, Stacks
from pyspec.cuda.ops.repack.ref import Repack
from pyspec.cuda.ops.rows.cuda import MAX_COLUMNS, Rows, RowsLaunch, Shares
from pyspec.cuda.ops.rows.ref import Norm
from pyspec.cuda.temporary import temporary
from pyspec.gguf import GGMLType

MAX_ROWS, LONG_ROWS, MAX_EXPERT, MAX_USED = 512, 2048, 1024, 32
FEWEST = 2  # rows up to which the last CTA sums the experts' outputs, and no lists are made
INTEGER_FEWEST = 3  # rows up to which they do where rows are whole numbers
FEW = 32  # rows up to which an item has FEW_PAIRS at most: experts rarely get more; beyond it has MANY_PAIRS
SPARSE = 0.5  # of an item's FEW_PAIRS: more rows have such items, too, while an expert gets no more in the mean
MOST_LIMIT = 6e4  # of activations: they go on as f16 over powers of two
MAX_PIECES = 4  # of a shared expert: with more, a launch of its own reads as well


def rows_at_once(n_used: int, n_expert: int) -> int:
    """Rows of one launch. Weights are read and unpacked once for MANY_PAIRS of an expert, so an expert should have about that many; lists
    count their pairs in 16 bits."""
    is_sparse = 2 * MAX_ROWS * n_used <= MANY_PAIRS * n_expert and LONG_ROWS * n_used < 1 << 16
    return LONG_ROWS if is_sparse else MAX_ROWS


def limits(spec: MoeSpec) -> str | None:
    if spec.slots is not None:
        return "experts in the host's memory"
    if not abs(spec.limit) < MOST_LIMIT:
        return f"activations cut at {spec.limit}; the kernel takes limits below {MOST_LIMIT:g}"
    if spec.biased and spec.pieces:
        return "a shared expert beside experts with biases"
    if spec.up is None or spec.down is None or spec.gate is not None:
        return "takes packed matrices, gates and ups of one type"
    for type in (spec.up, spec.down):
        if type not in CHUNKS:
            return f"{type.name} matrices have no packed form"
        if spec.scaled and not FORMATS[type].scaled:
            return f"{type.name} matrices with second scales"
        if not n_stages(type, MANY_PAIRS, torch.cuda.get_device_capability(spec.device)):
            return f"{type.name} does not fit this GPU's shared memory"
    if spec.n_in % 32 or spec.n_ff % 32 or max(spec.n_in, spec.n_ff) > MAX_COLUMNS:
        return (
            f"{spec.n_in} and {spec.n_ff} columns; the kernel takes multiples of 32 up to {MAX_COLUMNS}"
        )
    if spec.pieces > MAX_PIECES or (spec.pieces > 1 and spec.n_ff % spec.down.block_size):
        return f"a shared expert of {spec.pieces} pieces of {spec.n_ff} columns"
    if spec.n_used > MAX_USED or spec.n_expert > MAX_EXPERT:
        return f"{spec.n_used} of {spec.n_expert} experts; the kernel takes up to {MAX_USED} of {MAX_EXPERT}"
    return None


SIGNATURE = "pppp" + "ppp" + "ppp" + "pppp" + "ppppppp" + "l" + 9 * "i"


@dataclass(frozen=True, slots=True)
class PackedStack:
    """A matrix of every expert, repacked: records [expert, bytes] uint8, scales [expert, n_scale] f32 (or one value), biases
    [expert, rows of whole groups] f32 or None."""

    records: Tensor
    scales: Tensor
    type: GGMLType
    n_out: int
    n_in: int
    biases: Tensor | None = None


def pack(*stacks: Stack, kernel: Repack | None = None) -> PackedStack:
    """One stack, or gates and ups with their rows interleaved. kernel: that of a type without a scale of rows."""
    first, type = stacks[0], stacks[0].type
    assert type is not None and all(s.type is type for s in stacks)
    n_expert, n_out, n_in = first.data.shape[0], sum(s.n_out for s in stacks), first.n_in
    device = first.data.device
    # whole tiles may be repacked together: those of an expert then lie together, too
    at_once = n_expert if n_out % 256 == 0 else 1
    n_record, scales = n_groups(n_out) * n_chunks(type, n_in) * RECORDS[type], []
    if kernel is not None:
        parts = [s.data.reshape(n_expert * s.n_out, -1) for s in stacks]
        raw = (interleave(*parts) if len(parts) == 2 else parts[0].contiguous()).view(
            -1, at_once * n_out, parts[0].shape[1]
        )
        made = [kernel(x, (at_once * n_out, n_in)) for x in raw]
        records = (made[0] if len(made) == 1 else torch.cat(made)).view(n_expert, n_record)
        return PackedStack(
            records, torch.zeros(n_expert, 1, device=device), type, n_out, n_in, _biases(stacks)
        )
    n_byte = packed_bytes(type, n_expert * n_out, n_in) if at_once > 1 else n_expert * n_record
    whole = torch.empty(n_byte, dtype=torch.uint8, device=device)
    with temporary(device):
        parts = [s.data.reshape(n_expert * s.n_out, -1) for s in stacks]
        raw = interleave(*parts) if len(parts) == 2 else parts[0]
        by = None
        if any(s.scale is not None for s in stacks):
            ones = torch.ones(n_expert, device=device)
            each = [
                (ones if s.scale is None else s.scale)[:, None].expand(-1, s.n_out).reshape(-1, 1)
                for s in stacks
            ]
            by = (interleave(*each) if len(each) == 2 else each[0]).view(-1)
        for start in range(0, n_expert, at_once):
            part = slice(start * n_out, (start + at_once) * n_out)
            to = whole if at_once > 1 else None
            data = repack(
                raw[part], type, (at_once * n_out, n_in), None if by is None else by[part], to
            ).data
            if at_once == 1:  # joined at the end, they would be there twice
                whole[start * n_record : (start + 1) * n_record] = data[:n_record]
            scales.append(data[at_once * n_record :].view(torch.float32))
    joined = torch.cat(scales) if FORMATS[type].scaled else torch.zeros(n_expert, device=device)
    whole = whole[: n_expert * n_record]
    records, scales_of = whole.view(n_expert, n_record), joined.view(n_expert, -1)
    return PackedStack(records, scales_of, type, n_out, n_in, _biases(stacks))


def _biases(stacks: Sequence[Stack]) -> Tensor | None:
    """[expert, weight row] f32 in the order of packed rows, zeros beyond them."""
    each = [s.bias.float() for s in stacks if s.bias is not None]
    if not each:
        return None
    n_expert = len(each[0])
    rows = [x.reshape(-1, 1) for x in each]
    joined = (interleave(*rows) if len(rows) == 2 else rows[0]).view(n_expert, -1)
    return F.pad(joined, (0, -joined.shape[1] % 16)).contiguous()


def cut(shared: Stacks, pieces: int) -> Stacks:
    """A shared expert cut into pieces, whose outputs add up to its own."""

    def rows(s: Stack) -> Stack:
        return Stack(s.data.reshape(pieces, -1), s.type, s.n_out // pieces, s.n_in, scale(s))

    def scale(s: Stack) -> Tensor | None:
        return None if s.scale is None else s.scale.expand(pieces)

    down = shared.down
    columns = down.data.reshape(down.n_out, pieces, -1).transpose(0, 1).reshape(pieces, -1)
    return Stacks(
        None if shared.gate is None else rows(shared.gate),
        rows(shared.up),
        Stack(columns, down.type, down.n_out, down.n_in // pieces, scale(down)),
    )


@dataclass(frozen=True, slots=True)
class _Compiled:
    """One compiled product. kernels: by the CTAs that a multiprocessor holds; split: whose parts of columns have warps of their own;
    pairs: of an item, at most."""

    kernels: dict[int, Kernel]
    split: Kernel | None
    shared: int
    pairs: int

    def launch(
        self,
        grid: tuple[int, int],
        n_job: float,
        n_multiprocessor: int,
        args: Sequence[Arg],
    ) -> None:
        """n_job: CTAs that will have work, about."""
        if self.split is not None and n_job <= SPLIT_WAVES * SPLIT_RESIDENT * n_multiprocessor:
            shared = PARTS * self.shared
            return self.split.launch(grid, PARTS * 32 * GROUPS, args, shared, overlap=True)
        kernel = self.kernels[n_resident(n_job, tuple(self.kernels), n_multiprocessor)]
        kernel.launch(grid, 32 * GROUPS, args, self.shared, overlap=True)


@per_device
def _step(
    device: torch.device,
    type: GGMLType,
    pairs: int,
    act: int,
    next: GGMLType | None,
    listed: bool = True,
    adds: bool = False,
    cut: float | Betas = 0.0,
    biased: bool = False,
) -> _Compiled:
    """next: of gates and ups, the type of the downs; of downs None."""
    inner = next is not None
    capability = torch.cuda.get_device_capability(device)
    stages, ways = n_stages(type, pairs, capability, inner), residents(type, pairs, listed, inner)
    shared = stages * stage_bytes(type, pairs, inner)

    def kernel(resident: int, split: bool, shared: int) -> Kernel:
        of = pairs, stages, act, inner, listed, adds, next, resident, cut, split, biased
        build = MoeBuild(type, *of)
        code = compile_cubin("moe", arch_of(capability), build.defines())
        return code.kernel("moe", SIGNATURE).allow_shared(shared)

    parts = kernel(0, True, PARTS * shared) if splits(type, pairs, listed, inner) else None
    return _Compiled(
        {n: kernel(n, False, shared) for n in ways}, parts, shared, most_pairs(type, pairs, inner)
    )


PAIRS: KernelFile[None] = KernelFile("moe_pairs", {"moe_lists": "pppiiii", "moe_combine": "ppppppiii"})


@per_device
def _rows(device: torch.device, n_in: int, most: int, layout: int) -> RowsLaunch:
    pads = [8]
    while pads[-1] < most:
        pads.append(2 * pads[-1])
    return RowsLaunch(device, n_in, tuple(pads), layout)


@dataclass(frozen=True, slots=True)
class _Between:
    """Activations between the gates and ups and the downs, in moe.cu's layout: [pair][block], or in planes. Columns past n_ff stay zero."""

    blocks: Tensor
    sums: Tensor
    powers: Tensor
    step: int


@per_device
def _between(device: torch.device, n_ff: int, most: int, down: GGMLType) -> _Between:
    step = -(-n_ff // 256) * 8
    sums, powers = (torch.zeros(most * step, dtype=torch.float32, device=device) for _ in "sp")
    return _Between(
        torch.zeros(most * between_bytes(down, n_ff), dtype=torch.uint8, device=device),
        sums,
        powers,
        step,
    )


@per_device
def _tickets(device: torch.device, n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class _Taken:
    """The experts of the rows; order and items are lists, which the fewest rows do not have."""

    ids: Tensor
    order: Tensor
    items: Tensor
    n_item: int
    pairs: int
    listed: bool
    n_expert: int


class _Product:
    """All experts' products with one stack, and the shared expert's pieces if there are any."""

    def __init__(
        self,
        device: torch.device,
        stack: PackedStack,
        shared: PackedStack | None,
        act: int,
        next: GGMLType | None,
        cut: float | Betas = 0.0,
    ) -> None:
        self.stack, self.shared = stack, stack if shared is None else shared
        self.n_piece = 0 if shared is None else shared.records.shape[0]
        assert self.shared.records.shape[1] == stack.records.shape[1] and self.shared.type is stack.type
        self.n_out = stack.n_out // 2 if act in GATED else stack.n_out
        biased = stack.biases is not None
        self.steps = {
            (n, listed): _step(device, stack.type, n, act, next, listed, False, cut, biased)
            for n, listed in BUILDS
        }
        adding = device, stack.type, ADDING[0], act, None, ADDING[1], True, 0.0, biased
        self.adding = _step(*adding) if next is None else None
        self.n_group, self.n_chunk = n_groups(stack.n_out), n_chunks(stack.type, stack.n_in)
        self.tickets = _tickets(device, self.n_group)
        self.n_multiprocessor = torch.cuda.get_device_properties(device).multi_processor_count

    def __call__(
        self,
        t: _Taken,
        x: tuple[Tensor, ...],
        step: int,
        y: Shares,
        h: _Between,
        out: Tensor | None,
    ) -> None:
        """x: blocks, sums and powers of the input rows, `step` of their layout. Writes y (downs) or h (gates and ups), and in out
        the sums of y."""
        own = self.steps[t.pairs, t.listed] if out is None or self.adding is None else self.adding
        s, more, (n_row, n_used) = self.stack, self.shared, t.ids.shape
        counts = s.scales.shape[1], t.n_expert, n_used, n_row, self.n_piece
        sizes = s.records.shape[1], *counts, step, self.n_out, self.n_group, self.n_chunk
        read = s.records, s.scales, more.records, more.scales, *x, t.ids, t.order, t.items
        made = y.y, h.blocks, h.sums, h.powers, *y.args(), y.y if out is None else out
        args = *read, *made, self.tickets, s.scales if s.biases is None else s.biases, *sizes
        n_shared, n_column = self.n_piece * -(-n_row // own.pairs), -(-self.n_group // GROUPS)
        n_job = n_column * (n_shared + n_taken(t.n_expert, n_used, n_row))
        own.launch((n_column, n_shared + t.n_item), n_job, self.n_multiprocessor, args)


class ExpertsLaunch:
    """The experts of one layer, ready to run. See moe_ref for the tensors."""

    def __init__(self, spec: MoeSpec, stacks: Stacks) -> None:
        self.spec, self.n_expert = spec, stacks.n_expert
        assert (stacks.gate is None) == (spec.act == "relu2")
        assert (stacks.shared is None) == (spec.pieces == 0) and spec.down is not None
        with temporary(spec.device):
            pieces = None if stacks.shared is None else cut(stacks.shared, spec.pieces)
        inner, shared = pack_inner(stacks), None if pieces is None else pack_inner(pieces)
        self.inner = _Product(spec.device, inner, shared, ACTS[spec.act], spec.down, spec.cut)
        shared = None if pieces is None else pack(pieces.down)
        self.down = _Product(spec.device, pack(stacks.down), shared, NONE, None)
        self.lists, self.combine = PAIRS.kernels(spec.device, None)
        self.most = rows_at_once(spec.n_used, spec.n_expert or self.n_expert)
        self.x_rows = _rows(spec.device, spec.n_in, self.most, layout_of(spec.up))
        both = planes_of(spec.up, inner=True) and planes_of(spec.down, inner=False)
        self.finding = INTEGER_FEWEST if both else FEWEST
        self.h = _between(spec.device, spec.n_ff, self.most * (spec.n_used + spec.pieces), spec.down)

    def put(self, inner: PackedStack, down: PackedStack) -> None:
        """Other experts of the same shape, as many as there are."""
        self.n_expert = len(down.records)
        for product, stack in ((self.inner, inner), (self.down, down)):
            product.stack = product.shared = stack

    def prepare(self, x: Tensor, norm: Norm | None = None) -> Rows | None:
        """Rows ready to be multiplied, before their experts are chosen: this saves the launch between a choice and its products.

        None for more than go at once. They hold until rows of this width are prepared again.
        """
        return self.x_rows(x, norm) if x.shape[0] <= self.most else None

    def room(self, n_row: int) -> Rows | None:
        """The same, for a kernel that puts them there itself."""
        return self.x_rows.room(n_row) if n_row <= self.most else None

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        norm: Norm | None = None,
        added: Added = NOTHING,
        ready: object = None,
    ) -> Tensor:
        out = torch.empty(x.shape[0], self.spec.n_in, dtype=torch.float32, device=x.device)
        is_few = 0 < len(x) <= FEWEST
        for first in range(0, len(x), self.most):
            part = slice(first, first + self.most)
            rows = ready if isinstance(ready, Rows) else self.x_rows(x[part], norm)
            own = rows, ids[part], weights[part], added.part(part)
            shares = self.shares(*own, out if is_few else None)
            if not is_few:
                self._add(shares, out[part])
        return out

    def shares(
        self, rows: Rows, ids: Tensor, weights: Tensor, added: Added = NOTHING, out: Tensor | None = None
    ) -> Shares:
        """The products alone, of `most` rows at most: their next reader sums them. Of FEWEST rows they may be summed in `out`.

        An id of -1 is no expert: nothing is read for it, and its place in `y` is left as it is, so only `lane.gate` may sum these.
        """
        ids, weights = ids.contiguous(), weights.contiguous()
        (n_row, n_used), pieces = ids.shape, self.spec.pieces
        assert ids.dtype == torch.int32 and ids.shape == weights.shape == (rows.n_row, self.spec.n_used)
        assert all(t is None or t.is_contiguous() for t in (added.residual, added.shared, added.gate))
        assert added.shared is None or not pieces
        taken, h = self._taken(ids), self.h
        y = weights.new_empty(n_row * (n_used + pieces), self.spec.n_in)
        shared = y[n_row * n_used :] if pieces else added.shared
        n_piece = pieces or int(shared is not None)
        shares = Shares(y, weights, shared, added.gate, added.residual, n_piece)
        self.inner(taken, (rows.blocks, rows.sums, rows.powers), rows.pad, shares, h, None)
        self.down(taken, (h.blocks, h.sums, h.powers), h.step, shares, h, out)
        return shares

    def _add(self, shares: Shares, out: Tensor) -> None:
        n_quad = self.spec.n_in // 4
        args = shares.y, *shares.args(), out, self.spec.n_used, n_quad, shares.n_piece
        self.combine.launch((len(out), -(-n_quad // 256)), 256, args, overlap=True)

    def _taken(self, ids: Tensor) -> _Taken:
        n_row, n_pair = ids.shape[0], ids.numel()
        if n_row <= self.finding:
            return _Taken(ids, ids, ids, n_pair, FEW_PAIRS, False, self.n_expert)
        per_item = min(p.steps[FEW_PAIRS, True].pairs for p in (self.inner, self.down))
        is_few = n_row <= FEW or n_pair <= SPARSE * per_item * self.n_expert
        pairs = FEW_PAIRS if is_few else MANY_PAIRS
        per_item = min(p.steps[pairs, True].pairs for p in (self.inner, self.down))
        n_item = min(n_pair, self.n_expert + n_pair // per_item)
        order = torch.empty(n_pair, dtype=torch.int32, device=ids.device)
        items = torch.empty(n_item, 4, dtype=torch.int32, device=ids.device)
        args = ids, order, items, n_pair, self.n_expert, per_item, n_item
        n_thread = -(-self.n_expert // 32) * 32
        self.lists.launch((1,), n_thread, args, overlap=True)
        return _Taken(ids, order, items, n_item, pairs, True, self.n_expert)


def pack_inner(s: Stacks, kernel: Repack | None = None) -> PackedStack:
    """Gates and ups."""
    return pack(*((s.up,) if s.gate is None else (s.gate, s.up)), kernel=kernel)


def bind(spec: MoeSpec) -> Callable[[Stacks], ExpertsRun]:
    """Compiles now, so that a refusal comes before weights are loaded."""
    assert spec.up is not None and spec.down is not None
    for n, listed in BUILDS:
        of_inner = ACTS[spec.act], spec.down, listed, False, spec.cut, spec.biased
        _step(spec.device, spec.up, n, *of_inner)
        _step(spec.device, spec.down, n, NONE, None, listed, False, 0.0, spec.biased)
    _step(spec.device, spec.down, ADDING[0], NONE, None, ADDING[1], True, 0.0, spec.biased)
    PAIRS.kernels(spec.device, None)
    return lambda stacks: ExpertsLaunch(spec, stacks)
