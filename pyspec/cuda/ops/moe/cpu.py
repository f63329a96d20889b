"""`moe` for CPUs in C++ (pyspec/cpu/native/moe.cpp): every expert's matrices from the bytes of the file.

Rows and inner values are rounded as for `linear_cpu`. Which experts run is read when the kernel runs, so a recording may hold it. A row's bits
depend on the row, its experts and their weights alone. Bound by the bytes of the chosen experts where rows are few.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyspec.cpu.kernels import CpuKernel, empty
from pyspec.cuda.ops.linear.cpu import CHUNK, N_SUM, PLAIN, TYPES, CpuRows, prepared, sample, table_of
from pyspec.cuda.ops.moe.ref import ACTS, NOTHING, Added, ExpertsRun, MoeSpec, Stack, Stacks
from pyspec.cuda.ops.rows.ref import Norm
from pyspec.gguf import GGMLType

PAIRS = 4096  # of a row and an expert at once, as in the kernel
TOLERANCE = 2e-4  # of a row's norm
CHECKED = 320, 512  # columns of a check, of types with blocks of 32 or 64 and of 256

_MOE = CpuKernel("pyspec_moe", "qqqq" + "qq" + 3 * "qqqqqq" + "qqqq" + "qqqqqqqq" + "dd")
_NO_STACK = (None, None, None, None, 0, 0)


def limits(spec: MoeSpec) -> str | None:
    if spec.up is None or spec.down is None:
        return "takes packed matrices"
    for type in (spec.gate or spec.up, spec.up, spec.down):
        if type not in TYPES:
            return f"no product for {type.name}"
    if spec.pieces:
        return "a shared expert runs as matrices of its own"
    return None


class CpuExperts:
    """Experts that stay packed. Implements `ExpertsRun`."""

    def __init__(self, spec: MoeSpec, stacks: Stacks) -> None:
        assert (stacks.gate is not None) == spec.has_gates and stacks.shared is None
        self.act = ACTS.index(spec.act)
        self.n_in, self.n_ff, self.limits = stacks.down.n_out, stacks.down.n_in, spec.numbers
        named = [s for s in (stacks.gate, stacks.up, stacks.down) if s is not None]
        self.n_expert, self.whole = stacks.n_expert, any(s.type not in PLAIN for s in named[:-1])
        self.tables = {s.type: table_of(s.type) for s in named if s.type is not None}
        none = [] if stacks.gate is not None else [_NO_STACK]
        self.stacks = [x for of in (*none, *map(self._given, named)) for x in of]

    def _given(self, stack: Stack) -> tuple[Tensor | int | None, ...]:
        """As the kernel's `Stack`."""
        assert stack.type is not None and stack.data.dtype == torch.uint8 and stack.data.stride(1) == 1
        scale = None if stack.scale is None else stack.scale.float().contiguous()
        bias = None if stack.bias is None else stack.bias.float().contiguous()
        return stack.data, scale, bias, self.tables[stack.type], int(stack.type), stack.data.stride(0)

    def described(self, n_used: int) -> bytes:
        """As the kernel's `MoeArgs`, of no rows."""
        sizes = 0, self.n_in, self.n_ff, self.n_expert, n_used, 0, 0, self.act
        return _MOE.packed(*6 * (None,), *self.stacks, *4 * (None,), *sizes, *self.limits)

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        norm: Norm | None = None,
        added: Added = NOTHING,
        ready: object = None,
    ) -> Tensor:
        rows, out = prepared(x, norm, whole=self.whole), empty(len(x), self.n_in)
        assert ids.dtype == torch.int32 and ids.is_contiguous() and weights.is_contiguous()
        assert rows.x.shape[1] == self.n_in and ids.shape == weights.shape
        strides = [0 if y is None else y.stride(0) for y in (added.shared, added.residual)]
        around = added.shared, _contiguous(added.gate), added.residual
        sizes = len(x), self.n_in, self.n_ff, self.n_expert, ids.shape[1]
        given = *_of(rows), ids, weights, *self.stacks, *around, out
        _MOE(*given, *sizes, *strides, self.act, *self.limits)
        return out


def _of(rows: CpuRows) -> tuple[Tensor | None, ...]:
    return rows.x, rows.q, rows.scales, rows.sums


def _contiguous(gate: Tensor | None) -> Tensor | None:
    return None if gate is None else gate.contiguous()


def bind(spec: MoeSpec) -> Callable[[Stacks], ExpertsRun]:
    return lambda stacks: CpuExperts(spec, stacks)


def buffer_bytes(n_row: int, n_used: int, n_in: int, n_ff: int) -> int:
    """Memory of the values between the kernel's loops."""
    n_chunk = -(-n_ff // CHUNK)
    of_pair = 4 * (max(n_in, n_ff) + n_ff + n_chunk * (1 + N_SUM + CHUNK // 2) + 2)
    return min(n_row * n_used, max(PAIRS, n_used)) * of_pair * 5 // 4  # scratch.h takes a quarter more


def stacks_for(spec: MoeSpec, n_expert: int, n_in: int, n_ff: int, generator: torch.Generator) -> Stacks:
    """Experts of the spec's types, whose results are of usual size."""

    def stack(type: GGMLType | None, n_out: int, n_in: int) -> Stack:
        assert type is not None
        raw = sample(type, n_expert * n_out, n_in, generator).view(n_expert, -1)
        scale = 0.5 + torch.rand(n_expert, generator=generator) if spec.scaled else None
        bias = torch.randn(n_expert, n_out, generator=generator) if spec.biased else None
        return Stack(raw, type, n_out, n_in, scale, bias)

    gate = stack(spec.gate or spec.up, n_ff, n_in) if spec.has_gates else None
    return Stacks(gate, stack(spec.up, n_ff, n_in), stack(spec.down, n_in, n_ff))


def check(
    launch: Callable[[Stacks], ExpertsRun], reference: Callable[[Stacks], ExpertsRun], spec: MoeSpec
) -> str | None:
    """Both of few experts and narrow ones, because more and wider ones only lie farther: rows that spread, and rows that all take the same."""
    assert spec.up is not None and spec.down is not None
    generator, n_expert, n_used = torch.Generator().manual_seed(12), 5, min(spec.n_used, 3)
    n_in, n_ff = (CHECKED[type.block_size == 256] for type in (spec.up, spec.down))
    if spec.gate is not None:
        n_in = max(n_in, CHECKED[spec.gate.block_size == 256])
    stacks = stacks_for(spec, n_expert, n_in, n_ff, generator)
    own, other = launch(stacks), reference(stacks.unpacked())
    probe = torch.randn(8, n_in, generator=generator) @ stacks.up.matrix(0).T
    # Gates and ups lie on both sides of a limit
    size = 2 * (abs(spec.limit) or spec.betas[0] or 1.0) / float(probe.square().mean().sqrt())
    for n_row, of_same in ((1, False), (5, False), (21, False), (21, True)):
        x = size * torch.randn(n_row, n_in, generator=generator)
        ids = torch.rand(n_row, n_expert, generator=generator).argsort(-1)[:, :n_used].int()
        ids = ids[:1].expand(n_row, -1).contiguous() if of_same else ids.contiguous()
        weights = torch.rand(n_row, n_used, generator=generator)
        gate = torch.rand(n_row, 1, generator=generator)
        added = Added(
            torch.randn(n_row, n_in, generator=generator),
            torch.randn(n_row, n_in, generator=generator),
            gate,
        )
        norm = (
            Norm(0.5 + torch.rand(n_in, generator=generator), 1e-6)
            if of_same and not spec.limit
            else None
        )
        for around in (NOTHING, added):
            got, want = (run(x, ids, weights, norm, around) for run in (own, other))
            off = float(((got - want).norm(dim=-1) / want.norm(dim=-1)).amax())
            if not off < TOLERANCE:
                return f"outputs for {n_row} rows differ from the reference by {off:.2g}"
    return None
