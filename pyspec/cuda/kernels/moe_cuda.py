"""`moe` on NVIDIA GPUs: lists of rows by expert, then one launch for all gates and ups, one for all downs (moe.cu).

Nothing of what rows chose reaches the host: grids are as large as the number of rows can make them, and CTAs without work
end at once. So graphs may hold it, and prompts take the same way, MAX_ROWS rows at a time. Buffers are shared by the layers of
a device: all launches must be on one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from pyspec.cuda.jit import Kernel, arch_of, compile_cubin
from pyspec.cuda.kernels.linear_cuda import n_shared, random_weights
from pyspec.cuda.kernels.linear_pack import CHUNKS, FORMATS, RECORDS, interleave, n_chunks, n_groups, repack
from pyspec.cuda.kernels.moe_ref import NOTHING, Added, MoeSpec, Run, Stack, Stacks
from pyspec.cuda.kernels.rows_cuda import MAX_COLUMNS, Rows, RowsLaunch
from pyspec.cuda.kernels.rows_ref import Norm
from pyspec.gguf import GGMLType

MAX_ROWS, MAX_EXPERT, MAX_USED = 512, 1024, 32
FEW = 32  # rows up to which an item has 8 pairs: experts rarely get more; beyond it has 32
GROUPS = 4  # of 16 weight rows in a CTA
SPLIT = 2  # warps for each, which share the columns
NONE, SWIGLU, RELU2 = 0, 1, 2  # moe.cu's activations
ACTS = {"swiglu": SWIGLU, "relu2": RELU2}
_STAGE = 10 * 1024  # bytes of weights in a stage: fewer barriers, and still several stages


def stage_chunks(type: GGMLType) -> int:
    """Chunks in a stage: whole turns of the warps that share them."""
    turn = max(1, SPLIT // CHUNKS[type])
    return turn * max(1, _STAGE // (turn * GROUPS * RECORDS[type]))


def stage_bytes(type: GGMLType, tiles_n: int) -> int:
    sums = 4 if FORMATS[type].minima else 0
    return stage_chunks(type) * (GROUPS * RECORDS[type] + CHUNKS[type] * 8 * tiles_n * (64 + sums))


def resident(tiles_n: int) -> int:
    """CTAs that a multiprocessor should hold: what 80 registers a thread allow, 128 where its sums are many."""
    return 65536 // ((80 if tiles_n == 1 else 128) * 32 * GROUPS * SPLIT)


def n_stages(type: GGMLType, tiles_n: int, capability: tuple[int, int]) -> int:
    """At most 8, what `resident` CTAs have room for; but 3 or at least 2 wherever one CTA has, 0 elsewhere."""
    size, most = stage_bytes(type, tiles_n), n_shared(capability)
    fit = min(most // size, max(3, (most // resident(tiles_n) - 1024) // size))  # 1 KB is the driver's
    return min(8, fit) if fit >= 2 else 0


def limits(spec: MoeSpec) -> str | None:
    if spec.device.type != "cuda":
        return "runs on NVIDIA GPUs only"
    if spec.up is None or spec.down is None:
        return "takes packed matrices, gates and ups of one type"
    for type in (spec.up, spec.down):
        if type not in CHUNKS:
            return f"{type.name} matrices have no packed form"
        if spec.scaled and not FORMATS[type].scaled:
            return f"{type.name} matrices with second scales"
        if not n_stages(type, 4, torch.cuda.get_device_capability(spec.device)):
            return f"{type.name} does not fit this GPU's shared memory"
    if spec.n_in % 32 or spec.n_ff % 32 or max(spec.n_in, spec.n_ff) > MAX_COLUMNS:
        return f"{spec.n_in} and {spec.n_ff} columns; the kernel takes multiples of 32 up to {MAX_COLUMNS}"
    if spec.n_used > MAX_USED:
        return f"{spec.n_used} experts for a row; the kernel takes up to {MAX_USED}"
    return None


def defines(type: GGMLType, tiles_n: int, stages: int, act: int, inner: bool) -> dict[str, int | str]:
    """Macros of moe.cu."""
    return {
        "TYPE": FORMATS[type].code,
        "CHUNK": CHUNKS[type],
        "RECORD": RECORDS[type],
        "WARPS_M": GROUPS,
        "WARPS_N": 1,
        "TILES_M": 16 // GROUPS,
        "TILES_N": tiles_n,
        "SPLIT": SPLIT,
        "PER_STAGE": stage_chunks(type),
        "STAGES": stages,
        "RESIDENT": resident(tiles_n),
        "EPILOGUE": 0,
        "ACT": act,
        "INNER": int(inner),
    }


@dataclass(frozen=True, slots=True)
class PackedStack:
    """A matrix of every expert, repacked: records [expert, bytes] uint8, scales [expert, n_scale] f32 (or one value)."""

    records: Tensor
    scales: Tensor
    type: GGMLType
    n_out: int
    n_in: int


def pack(*stacks: Stack) -> PackedStack:
    """One stack, or gates and ups with their rows interleaved."""
    first, type = stacks[0], stacks[0].type
    assert type is not None and all(s.type is type for s in stacks)
    n_expert, n_out, n_in = first.data.shape[0], sum(s.n_out for s in stacks), first.n_in
    parts = [s.data.reshape(n_expert * s.n_out, -1) for s in stacks]
    raw = interleave(*parts) if len(parts) == 2 else parts[0]
    by = None
    if any(s.scale is not None for s in stacks):
        ones = torch.ones(n_expert, device=raw.device)
        each = [(ones if s.scale is None else s.scale)[:, None].expand(-1, s.n_out).reshape(-1, 1) for s in stacks]
        by = (interleave(*each) if len(each) == 2 else each[0]).view(-1)
    # whole tiles may be repacked together: those of an expert then lie together, too
    at_once = n_expert if n_out % 256 == 0 else 1
    n_record, scales = n_groups(n_out) * n_chunks(type, n_in) * RECORDS[type], []
    whole = torch.empty(0 if at_once > 1 else n_expert * n_record, dtype=torch.uint8, device=raw.device)
    for start in range(0, n_expert, at_once):
        part = slice(start * n_out, (start + at_once) * n_out)
        data = repack(raw[part], type, (at_once * n_out, n_in), None if by is None else by[part]).data
        if at_once > 1:
            whole = data[: n_expert * n_record]
        else:  # joined at the end, they would be there twice
            whole[start * n_record : (start + 1) * n_record] = data[:n_record]
        scales.append(data[at_once * n_record :].view(torch.float32))
    joined = torch.cat(scales) if FORMATS[type].scaled else torch.zeros(n_expert, device=raw.device)
    return PackedStack(whole.view(n_expert, n_record), joined.view(n_expert, -1), type, n_out, n_in)


@dataclass(frozen=True, slots=True)
class _Step:
    """One compiled product."""

    kernel: Kernel
    shared: int


@cache
def _step(device: torch.device, type: GGMLType, tiles_n: int, act: int, inner: bool) -> _Step:
    capability = torch.cuda.get_device_capability(device)
    stages = n_stages(type, tiles_n, capability)
    code = compile_cubin("moe", arch_of(capability), defines(type, tiles_n, stages, act, inner))
    shared = stages * stage_bytes(type, tiles_n)
    return _Step(code.kernel("moe", "pppppppp" + "l" + "iiiiii").allow_shared(shared), shared)


@cache
def _pair_kernels(device: torch.device) -> tuple[Kernel, Kernel]:
    code = compile_cubin("moe_pairs", arch_of(torch.cuda.get_device_capability(device)))
    return code.kernel("moe_lists", "pppiiii"), code.kernel("moe_combine", "ppppppii")


@cache
def _rows(device: torch.device, n_in: int, most: int) -> RowsLaunch:
    pads = [8]
    while pads[-1] < most:
        pads.append(2 * pads[-1])
    return RowsLaunch(device, n_in, tuple(pads))


class _Product:
    """All experts' products with one stack."""

    def __init__(self, device: torch.device, stack: PackedStack, act: int, inner: bool) -> None:
        self.stack, self.inner = stack, inner
        self.n_out = stack.n_out // 2 if act == SWIGLU else stack.n_out
        self.steps = {8 * n: _step(device, stack.type, n, act, inner) for n in (1, 4)}
        self.n_group, self.n_chunk = n_groups(stack.n_out), n_chunks(stack.type, stack.n_in)

    def __call__(self, ready: Rows, order: Tensor, items: Tensor, n_used: int, per_item: int, overlap: bool) -> Tensor:
        step, s = self.steps[per_item], self.stack
        out = torch.empty(order.shape[0], self.n_out, dtype=torch.float32, device=order.device)
        args = (s.records, s.scales, ready.blocks, ready.sums, ready.powers, order, items, out)
        args += (np.int64(s.records.shape[1]), np.int32(s.scales.shape[1]), np.int32(n_used), np.int32(ready.pad))
        args += (np.int32(self.n_out), np.int32(self.n_group), np.int32(self.n_chunk))
        step.kernel.launch(
            (-(-self.n_group // GROUPS), items.shape[0]), 32 * GROUPS * SPLIT, args, step.shared, overlap=overlap
        )
        return out


class Experts:
    """The experts of one layer, ready to run. See moe_ref for the tensors."""

    def __init__(self, spec: MoeSpec, stacks: Stacks) -> None:
        self.spec, self.n_expert = spec, stacks.n_expert
        assert self.n_expert <= MAX_EXPERT and (stacks.gate is None) == (spec.act == "relu2")
        inner = pack(stacks.up) if stacks.gate is None else pack(stacks.gate, stacks.up)
        self.inner = _Product(spec.device, inner, ACTS[spec.act], True)
        self.down = _Product(spec.device, pack(stacks.down), NONE, False)
        self.lists, self.combine = _pair_kernels(spec.device)
        self.x_rows = _rows(spec.device, spec.n_in, MAX_ROWS)
        self.h_rows = _rows(spec.device, spec.n_ff, MAX_ROWS * spec.n_used)

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, norm: Norm | None = None, added: Added = NOTHING
    ) -> Tensor:
        x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
        assert ids.dtype == torch.int32 and ids.shape == weights.shape == (x.shape[0], self.spec.n_used)
        assert all(t is None or t.is_contiguous() for t in (added.residual, added.shared, added.gate))
        out = torch.empty(x.shape[0], self.spec.n_in, dtype=torch.float32, device=x.device)
        for first in range(0, x.shape[0], MAX_ROWS):
            part = slice(first, first + MAX_ROWS)
            self._run(x[part], ids[part], weights[part], norm, added.part(part), out[part])
        return out

    def _run(self, x: Tensor, ids: Tensor, weights: Tensor, norm: Norm | None, added: Added, out: Tensor) -> None:
        n_row, n_used = ids.shape
        n_pair, per_item = n_row * n_used, 8 if n_row <= FEW else 32
        n_item = min(n_pair, self.n_expert + n_pair // per_item)
        order = torch.empty(n_pair, dtype=torch.int32, device=x.device)
        items = torch.empty(n_item, 4, dtype=torch.int32, device=x.device)
        sizes = (np.int32(n_pair), np.int32(self.n_expert), np.int32(per_item), np.int32(n_item))
        overlap = self.x_rows.overlap
        self.lists.launch((1,), MAX_EXPERT, (ids, order, items, *sizes), overlap=overlap)
        h = self.inner(self.x_rows(x, norm), order, items, n_used, per_item, overlap)
        y = self.down(self.h_rows(h), order, items, n_used, per_item, overlap)
        n_quad = self.spec.n_in // 4
        more = [np.int64(0) if t is None else t for t in (added.shared, added.gate, added.residual)]
        args = (y, weights, *more, out, np.int32(n_used), np.int32(n_quad))
        self.combine.launch((n_row, -(-n_quad // 256)), 256, args, overlap=overlap)


def bind(spec: MoeSpec) -> Callable[[Stacks], Run]:
    """Compiles now, so that a refusal comes before weights are loaded."""
    assert spec.up is not None and spec.down is not None
    for n in (1, 4):
        _step(spec.device, spec.up, n, ACTS[spec.act], True)
        _step(spec.device, spec.down, n, NONE, False)
    _pair_kernels(spec.device)
    return lambda stacks: Experts(spec, stacks)


def random_stacks(spec: MoeSpec, n_expert: int, gen: torch.Generator) -> Stacks:
    """Experts of the spec's shape, packed as in a file."""

    def stack(type: GGMLType | None, n_out: int, n_in: int) -> Stack:
        assert type is not None
        raw = random_weights(type, n_expert * n_out, n_in, gen).view(n_expert, -1).to(spec.device)
        scale = 0.5 + torch.rand(n_expert, generator=gen).to(spec.device) if spec.scaled else None
        return Stack(raw, type, n_out, n_in, scale)

    gate = stack(spec.up, spec.n_ff, spec.n_in) if spec.act == "swiglu" else None
    return Stacks(gate, stack(spec.up, spec.n_ff, spec.n_in), stack(spec.down, spec.n_in, spec.n_ff))


def check(
    launch: Callable[[Stacks], Run],
    reference: Callable[[Stacks], Run],
    spec: MoeSpec,
    n_rows: Sequence[int] = (1, 9, 40, 100),
) -> str | None:
    """Rows that spread over experts, and rows that all take the same; a few experts, since more only lie farther.

    Rows are f16 already, so that no rounding of theirs takes part. Random weights with minima have a mean: where a row's
    columns add up to about zero, so do its outputs, and rounding it alone moved them by 9e-3 of what was left. What remains,
    the rounding of what experts multiply inside, moves no row by more than 5e-4.
    """
    gen = torch.Generator().manual_seed(0)
    n_expert = spec.n_used + 3
    stacks = random_stacks(spec, n_expert, gen)
    own, other = launch(stacks), reference(stacks)
    for n_row in n_rows:
        x = torch.randn(n_row, spec.n_in, generator=gen).half().float()
        spread = torch.rand(n_row, n_expert, generator=gen).argsort(-1)[:, : spec.n_used]
        weights = torch.rand(n_row, spec.n_used, generator=gen).to(spec.device)
        for ids in (spread, spread[:1].expand(n_row, -1)):
            given = x.to(spec.device), ids.int().contiguous().to(spec.device), weights
            got, want = own(*given), other(*given)
            off = float(((got - want).norm(dim=-1) / want.norm(dim=-1)).amax())
            if not off < 1e-3:
                return f"outputs for {n_row} rows differ from the reference by {off:.2g}"
    return _check_around(own, *given, gen)


def _check_around(own: Run, x: Tensor, ids: Tensor, weights: Tensor, gen: torch.Generator) -> str | None:
    """What rows meet before and after the products: the norm, a residual, a shared expert."""
    residual, shared = (torch.randn(x.shape, generator=gen).to(x.device) for _ in "rs")
    gate, norm = (
        torch.rand(len(x), 1, generator=gen).to(x.device),
        Norm(0.5 + torch.rand(x.shape[1], generator=gen).to(x.device), 1e-6),
    )
    plain, got = own(x, ids, weights), own(x, ids, weights, None, Added(residual, shared, gate))
    if not torch.allclose(got, residual + (plain + shared * gate), rtol=1e-5, atol=1e-5 * float(plain.abs().amax())):
        return "a residual or a shared expert is not added as the reference does"
    want, got = own(norm(4 * x), ids, weights), own(4 * x, ids, weights, norm)
    off = float((got - want).norm() / want.norm())
    return None if off < 2e-3 else f"outputs of normed rows differ by {off:.2g}"  # the two round rows by other powers
