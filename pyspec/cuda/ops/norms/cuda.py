"""`norms` on NVIDIA GPUs: always one launch (norms.cu), a CTA for every row written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyspec.cuda import faults
from pyspec.cuda.jit import HOPPER, Arg, GpuKind, Kernel, KernelFile, Macros, Program
from pyspec.cuda.ops.norms.ref import GUARD, Norms, NormsSpec
from pyspec.cuda.ops.rows.cuda import BLOCKED, TALL, RowsLaunch, aligned
from pyspec.cuda.ops.rows.ref import Norm

MAX_THREADS = 512  # as rows.cu's, so that squares have one order
MAX_COLUMNS = 16384  # eight times 4 columns in each thread's registers
MAX_INTO = 8192  # of rows that also go to the next product
ARGS, INTO_ARGS = "ppp" + "pppp" + "lllif" + "pf" + "p", "pf" + "ppp" + "if"
MAX_ROWS = 1 << 30
ALONE = None, 1.0  # nothing is added
NOTHING = (None,) * 4  # there is no second input
OFF = 1e-5  # of a row, relative to its size: another order of sums


def limits(spec: NormsSpec) -> str | None:
    if spec.n % 4 or not 0 < spec.n <= MAX_COLUMNS:
        return f"{spec.n} columns; the kernel takes multiples of 4 up to {MAX_COLUMNS}"
    return None


def threads_for(n: int) -> int:
    """As many as there are fours of columns, if that is not too many."""
    return min(-(-n // 128) * 32, MAX_THREADS)


def defines(n: int, layer: bool, layout: int | None = None) -> Macros:
    """Macros of norms.cu. layout: of the next product's rows, if they are written, too."""
    macros: Macros = {
        "COLUMNS": n,
        "LAYER": int(layer),
        "THREADS": threads_for(n),
        "OP_ID": GUARD.number,
    }
    return macros if layout is None else macros | {"INTO": 1, "LAYOUT": layout}


Build = tuple[int, bool, int | None]
FILE = KernelFile[Build](
    "norms", lambda build: ARGS if build[2] is None else ARGS + INTO_ARGS, lambda build: defines(*build)
)


class NormsLaunch:
    """Implements `Norms`."""

    def __init__(self, spec: NormsSpec) -> None:
        self.spec, self.n, self.threads = spec, spec.n, threads_for(spec.n)
        self.kernel = FILE.kernel(spec.device, (spec.n, spec.layer, None))
        self.fault = faults.record(spec.device)

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], self.n)
        self._run((x, weight, out), NOTHING, self.n, x.shape[0], 0)
        return out

    def added(self, x: Tensor, weight: Tensor, stream: Tensor, factor: float = 1.0) -> Tensor:
        out = x.new_empty(x.shape[0], self.n)
        assert stream.dtype == torch.float32 and stream.is_contiguous() and stream.shape == x.shape
        assert stream.data_ptr() % 16 == 0
        self._run((x, weight, out), NOTHING, self.n, x.shape[0], 0, (stream, factor))
        return out

    def added_into(
        self, x: Tensor, weight: Tensor, stream: Tensor, factor: float, to: RowsLaunch, norm: Norm
    ) -> Tensor:
        """`added`, whose result `to` holds with `norm` as well, as if it had prepared these rows itself. `takes` says where."""
        out, n_row = x.new_empty(x.shape[0], self.n), x.shape[0]
        assert self.takes(to) and norm.weight.is_contiguous() and norm.weight.data_ptr() % 16 == 0
        rows = to.room(n_row)
        kernel = FILE.kernel(x.device, (self.n, self.spec.layer, to.prepare.layout))
        next = norm.weight, norm.eps, rows.blocks, rows.sums, rows.powers, rows.pad, norm.power
        self._run((x, weight, out), NOTHING, self.n, n_row, 0, (stream, factor), kernel, next)
        to.hold(out, norm, rows)
        return out

    def takes(self, to: RowsLaunch) -> bool:
        """Whether `added_into` can write the rows of this launch."""
        return (
            to.n_in == self.n <= MAX_INTO and self.n % 32 == 0 and to.prepare.layout in (BLOCKED, TALL)
        )

    def picked(self, x: Tensor, weight: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        out, some = x.new_empty(x.shape[0], self.n), x.new_empty(rows.shape[0], self.n)
        assert rows.dtype == torch.int64 and rows.is_contiguous() and (x.shape[0] or not rows.shape[0])
        self._run((x, weight, out), (x, weight, some, rows), self.n, x.shape[0], rows.shape[0])
        return out, some

    def paired(self, a: Tensor, a_weight: Tensor, b: Tensor, b_weight: Tensor) -> Tensor:
        out = a.new_empty(a.shape[0], 2 * self.n)
        assert a.shape == b.shape
        second = b, b_weight, out[:, self.n :], None
        self._run((a, a_weight, out), second, 2 * self.n, a.shape[0], b.shape[0])
        return out

    def _run(
        self,
        first: Sequence[Tensor],
        second: Sequence[Tensor | None],
        step: int,
        n_first: int,
        n_second: int,
        after: tuple[Tensor | None, float] = ALONE,
        kernel: Kernel | None = None,
        more: Sequence[Arg] = (),
    ) -> None:
        """Rows of the first input, then of the second; `step` is the distance of rows in both outputs. after: what is added to the first
        ones, and then multiplies them."""
        given: list[Arg] = []
        steps = [0, 0, step]
        for i, (x, weight, *to) in enumerate((first, second)):
            if x is not None and weight is not None:
                x = aligned(x)
                assert x.dtype == weight.dtype == torch.float32
                assert weight.shape == x.shape[1:] == (self.n,)
                assert weight.is_contiguous() and weight.data_ptr() % 16 == 0
                steps[i] = x.stride(0)
            given += [x, weight, *to]
        assert n_first + n_second <= MAX_ROWS
        if n_first + n_second:
            args = (*given, *steps, n_first, self.spec.eps, *after, self.fault)
            kernel = self.kernel if kernel is None else kernel
            kernel.launch((n_first + n_second,), self.threads, (*args, *more), overlap=True)


def programs(spec: NormsSpec, target: GpuKind) -> list[Program]:
    layouts: list[int | None] = [None]
    if spec.n % 32 == 0 and spec.n <= MAX_INTO and not spec.layer:
        layouts += [BLOCKED, TALL] if target.capability == HOPPER else [BLOCKED]
    return [target.program("norms", defines(spec.n, spec.layer, layout)) for layout in layouts]


bind = NormsLaunch


def rows_of(n_row: int, n: int, gen: torch.Generator) -> Tensor:
    """[n_row, n] f32 of very different sizes, down to where eps counts, every third far from zero on the average."""
    x = torch.randn(n_row, n, generator=gen)
    x[::3] += 10.0
    return x * torch.logspace(2, -4, n_row)[:, None]


def _apart(got: Tensor, want: Tensor) -> float:
    """The largest distance of two rows, relative to the row's size."""
    return float(((got - want).double().norm(dim=-1) / want.double().norm(dim=-1)).amax())


def check(launch: Norms, reference: Norms, spec: NormsSpec) -> str | None:
    """Each of the four, from one row on, the first input a part of wider rows; a row comes out the same wherever it goes."""
    gen = torch.Generator().manual_seed(0)
    weights = [(1 + 0.1 * torch.randn(spec.n, generator=gen)).to(spec.device) for _ in range(2)]
    for n_row in (1, 9):
        wide, b = (rows_of(n_row, spec.n + more, gen).to(spec.device) for more in (16, 0))
        a = wide[:, 8 : 8 + spec.n]
        rows = torch.randint(0, n_row, (5,), generator=gen).to(spec.device)
        alone, (all_rows, some) = launch(a, weights[0]), launch.picked(a, weights[0], rows)
        pair = launch.paired(a, weights[0], b, weights[1])
        want = reference.paired(a, weights[0], b, weights[1])
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
        if isinstance(launch, NormsLaunch) and (why := _flaw_of_rows(launch, a, weights, b)):
            return f"{n_row} rows {why}"
    return None


def _flaw_of_rows(launch: NormsLaunch, x: Tensor, weights: list[Tensor], stream: Tensor) -> str:
    """What is wrong with rows for the next product, which have to be those of rows.cu; "": nothing."""
    if launch.spec.layer or launch.n % 32 or launch.n > MAX_INTO:
        return ""
    norm = Norm(weights[1], 1e-5)
    for layout in (
        (BLOCKED, TALL) if torch.cuda.get_device_capability(x.device) == HOPPER else (BLOCKED,)
    ):
        to = RowsLaunch(x.device, launch.n, (16,), layout)
        places, found = (to.blocks, to.sums, to.powers), []
        for joined in (False, True):
            for place in places:
                place.zero_()
            if joined:
                total = launch.added_into(x, weights[0], stream, 0.75, to, norm)
            else:
                total = launch.added(x, weights[0], stream, 0.75)
                to(total, norm)
            found.append([total, *(place.clone() for place in places)])
        if not all(torch.equal(a, b) for a, b in zip(*found, strict=True)):
            return f"for a product (layout {layout}) are not those of a launch behind the norm"
    return ""
