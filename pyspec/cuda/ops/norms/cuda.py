"""`norms` on NVIDIA GPUs: always one launch (norms.cu), a CTA for every row written."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pyspec.cuda import faults
from pyspec.cuda.context import per_device
from pyspec.cuda.jit import GpuKind, Kernel, Program, arch_of, compile_cubin
from pyspec.cuda.ops.norms.ref import GUARD, Norms, NormsSpec

OP_ID = GUARD.number
MAX_THREADS = 1024
MAX_COLUMNS = 16384  # four times 4 columns in each thread's registers
MAX_ROWS = 1 << 30
ALONE = np.int64(0), np.float32(1.0)  # nothing is added
OFF = 1e-5  # of a row, relative to its size: another order of sums


def limits(spec: NormsSpec) -> str | None:
    if spec.device.type != "cuda":
        return "runs on NVIDIA GPUs only"
    if spec.n % 4 or not 0 < spec.n <= MAX_COLUMNS:
        return f"{spec.n} columns; the kernel takes multiples of 4 up to {MAX_COLUMNS}"
    return None


def threads_for(n: int) -> int:
    """As many as there are fours of columns, or an equal share of them each: latency is all there is."""
    quads = n // 4
    each = -(-quads // MAX_THREADS)
    return -(-quads // (32 * each)) * 32


def defines(n: int, layer: bool) -> dict[str, int | str]:
    """Macros of norms.cu."""
    return {"COLUMNS": n, "LAYER": int(layer), "THREADS": threads_for(n), "OP_ID": OP_ID}


@per_device
def _kernel(device: torch.device, n: int, layer: bool) -> Kernel:
    code = compile_cubin("norms", arch_of(torch.cuda.get_device_capability(device)), defines(n, layer))
    return code.kernel("norms", "ppp" + "pppp" + "lif" + "pf" + "p")


class NormsLaunch:
    """Implements `Norms`."""

    def __init__(self, spec: NormsSpec) -> None:
        self.n, self.eps, self.threads = spec.n, np.float32(spec.eps), threads_for(spec.n)
        self.kernel, self.fault = _kernel(spec.device, spec.n, spec.layer), faults.record(spec.device)
        self.overlap = torch.cuda.get_device_capability(spec.device) >= (9, 0)

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        out = self._room(x.shape[0], self.n, x)
        none = np.int64(0)
        self._run((x, weight, out), (none, none, none, none), self.n, x.shape[0], 0)
        return out

    def added(self, x: Tensor, weight: Tensor, stream: Tensor, factor: float = 1.0) -> Tensor:
        out = self._room(x.shape[0], self.n, x)
        assert stream.dtype == torch.float32 and stream.is_contiguous() and stream.shape == x.shape
        assert stream.data_ptr() % 16 == 0
        none, after = np.int64(0), (stream, np.float32(factor))
        self._run((x, weight, out), (none, none, none, none), self.n, x.shape[0], 0, after)
        return out

    def picked(self, x: Tensor, weight: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        out, some = self._room(x.shape[0], self.n, x), self._room(rows.shape[0], self.n, x)
        assert rows.dtype == torch.int64 and rows.is_contiguous() and (x.shape[0] or not rows.shape[0])
        self._run((x, weight, out), (x, weight, some, rows), self.n, x.shape[0], rows.shape[0])
        return out, some

    def paired(self, a: Tensor, a_weight: Tensor, b: Tensor, b_weight: Tensor) -> Tensor:
        out = self._room(a.shape[0], 2 * self.n, a)
        assert a.shape == b.shape
        self._run(
            (a, a_weight, out),
            (b, b_weight, out[:, self.n :], np.int64(0)),
            2 * self.n,
            a.shape[0],
            b.shape[0],
        )
        return out

    def _room(self, n_row: int, n_column: int, like: Tensor) -> Tensor:
        return torch.empty(n_row, n_column, dtype=torch.float32, device=like.device)

    def _run(
        self,
        first: tuple[Tensor, Tensor, Tensor],
        second: tuple[Tensor | np.int64, Tensor | np.int64, Tensor | np.int64, Tensor | np.int64],
        step: int,
        n_first: int,
        n_second: int,
        after: tuple[Tensor | np.int64, np.float32] = ALONE,
    ) -> None:
        """Rows of the first input, then of the second; `step` is the distance of rows in both outputs. after: what is added to the first
        ones, and then multiplies them."""
        for x, weight in (first[:2], second[:2]):
            if isinstance(x, Tensor) and isinstance(weight, Tensor):
                assert x.dtype == weight.dtype == torch.float32 and weight.shape == x.shape[1:] == (
                    self.n,
                )
                assert x.is_contiguous() and weight.is_contiguous()
                assert x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
        assert n_first + n_second <= MAX_ROWS
        if n_first + n_second:
            args = (*first, *second, np.int64(step), np.int32(n_first), self.eps, *after, self.fault)
            self.kernel.launch((n_first + n_second,), self.threads, args, overlap=self.overlap)


def programs(spec: NormsSpec, target: GpuKind) -> list[Program]:
    return [target.program("norms", defines(spec.n, spec.layer))]


def bind(spec: NormsSpec) -> NormsLaunch:
    return NormsLaunch(spec)


def rows_of(n_row: int, n: int, gen: torch.Generator) -> Tensor:
    """[n_row, n] f32 of very different sizes, down to where eps counts, every third far from zero on the average."""
    x = torch.randn(n_row, n, generator=gen)
    x[::3] += 10.0
    return x * torch.logspace(2, -4, n_row)[:, None]


def _apart(got: Tensor, want: Tensor) -> float:
    """The largest distance of two rows, relative to the row's size."""
    return float(((got - want).double().norm(dim=-1) / want.double().norm(dim=-1)).amax())


def check(launch: Norms, reference: Norms, spec: NormsSpec) -> str | None:
    """Each of the four, from one row on; a row comes out the same wherever it goes."""
    gen = torch.Generator().manual_seed(0)
    weights = [(1 + 0.1 * torch.randn(spec.n, generator=gen)).to(spec.device) for _ in range(2)]
    for n_row in (1, 9):
        a, b = (rows_of(n_row, spec.n, gen).to(spec.device) for _ in range(2))
        rows = torch.randint(0, n_row, (5,), generator=gen).to(spec.device)
        alone, (all_rows, some) = launch(a, weights[0]), launch.picked(a, weights[0], rows)
        pair, want = (
            launch.paired(a, weights[0], b, weights[1]),
            reference.paired(a, weights[0], b, weights[1]),
        )
        for half, name in ((slice(spec.n), "first"), (slice(spec.n, None), "second")):
            if not (off := _apart(pair[:, half], want[:, half])) < OFF:
                return f"{n_row} rows of the {name} input differ from the reference by {off:.2g}"
        if not (torch.equal(alone, pair[:, : spec.n]) and torch.equal(alone, all_rows)):
            return f"{n_row} rows have other bits alone than with others"
        sums = (each.added(a, weights[0], b, 0.75) for each in (launch, reference))
        if not (off := _apart(*sums)) < OFF:
            return f"{n_row} rows added to others differ from the reference by {off:.2g}"
        if not torch.equal(some, alone[rows]):
            return f"rows picked of {n_row} are not those that were asked for"
    return None
