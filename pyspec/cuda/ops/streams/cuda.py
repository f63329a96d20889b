"""`streams` on NVIDIA GPUs: streams.cu. Two launches read the streams (products by columns, then all the rest), one writes them; with
few rows the writing launch also makes the next products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyspec.cuda.jit import HOPPER, Arg, GpuKind, Kernel, KernelFile, Macros, Program
from pyspec.cuda.ops.moe.ref import Added, combine
from pyspec.cuda.ops.prefetch import ARGS, MAX_ROWS, prefetch_args
from pyspec.cuda.ops.rows.cuda import BLOCKED, RowBuffer, RowsLaunch, Shares
from pyspec.cuda.ops.rows.ref import Norm
from pyspec.cuda.ops.streams.ref import Reading, StreamMix, Streams, StreamsSpec

N_STREAM, MAX_COLUMNS = 4, 16384
THREADS, READING = 128, 256  # of a CTA: of streams_parts; of the others. A quad of columns each
READERS, ASKING = 512, 64  # of streams_read_rows; CTAs that ask for the next product's weights
SLOTS = 32  # of a part
PER_MULTIPROCESSOR = 2  # CTAs of streams_parts that rows are spread over: each reads its share of fn
SUMMED = 4  # rows up to which that launch also sums the experts' outputs, once for each of four streams
# Rows up to which merging and the next products are one launch: it reads the streams four times
FEW = 32
OFF = 1e-4  # of coefficients and, relative to its size, of a row: other orders of sums


def limits(spec: StreamsSpec) -> str | None:
    if spec.n_stream != N_STREAM:
        return f"{spec.n_stream} streams; the kernel takes {N_STREAM}"
    if spec.n % 4 or not 0 < spec.n <= MAX_COLUMNS:
        return f"{spec.n} columns; the kernel takes multiples of 4 up to {MAX_COLUMNS}"
    if spec.n_iter < 1:
        return f"{spec.n_iter} steps of Sinkhorn; the kernel takes 1 or more"
    return None


def defines(n: int, n_iter: int) -> Macros:
    """Macros of streams.cu; no steps: of the head."""
    n_mix = (2 + N_STREAM) * N_STREAM if n_iter else N_STREAM
    return {"COLUMNS": n, "COEFFICIENTS": n_mix, "N_ITER": n_iter}


READ = {
    "streams_parts": "pppii",
    "streams_read": "pppppppff",
    "streams_read_rows": "ppppppp" + "pppp" + "p" + "ffi" + "ff" + ARGS[1:],
}
MERGE = {
    "streams_merge": "ppppp",
    "streams_merge_parts": "pppppppii",
    "streams_merge_sums_parts": "ppppppppppiiii",
}
FILE, HEAD = (
    KernelFile[tuple[int, int]]("streams", forms, lambda key: defines(*key))
    for forms in (READ | MERGE, READ)
)


class StreamsLaunch:
    """Implements `Streams`."""

    reads_into = True  # where `into` says, see fuse.py

    def sums_of(self, n_row: int) -> bool:
        """Whether `merge_split` of so many rows also takes the experts' outputs unsummed."""
        return 0 < n_row <= SUMMED

    def __init__(self, spec: StreamsSpec) -> None:
        self.spec, self.n_chunk = spec, -(-spec.n // THREADS)
        self.kernels = FILE.named(spec.device, (spec.n, spec.n_iter))
        self.heads = HEAD.named(spec.device, (spec.n, 0))
        self.capability = torch.cuda.get_device_capability(spec.device)
        self.n_multiprocessor = torch.cuda.get_device_properties(spec.device).multi_processor_count

    def split(self, x: Tensor, mix: StreamMix, into: RowBuffer | None = None) -> Reading:
        """into: the rows of the part's product; then the reading is also normed and written there."""
        x = x.contiguous()
        return self._split(x, mix, self._parts(self.kernels, x, mix), into)

    def _split(self, x: Tensor, mix: StreamMix, parts: Tensor, into: RowBuffer | None) -> Reading:
        post, comb = x.new_empty(len(x), N_STREAM), x.new_empty(len(x), N_STREAM, N_STREAM)
        if into is not None and len(x):
            return self._read_rows(x, mix, parts, (post, comb), into), post, comb
        return self._read(self.kernels, x, mix, parts, (post, comb)), post, comb

    def head(self, x: Tensor, mix: StreamMix) -> Tensor:
        x = x.contiguous()
        return self._read(self.heads, x, mix, self._parts(self.heads, x, mix), (None, None))

    def merge(self, y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        args, n_row = self._merged(y, x, post, comb)
        if n_row:
            self.kernels["streams_merge"].launch(self._grid(n_row), READING, args, overlap=True)
        return args[-1]

    def merge_split(
        self,
        y: Tensor | Shares,
        x: Tensor,
        post: Tensor,
        comb: Tensor,
        mix: StreamMix,
        into: RowBuffer | None = None,
    ) -> tuple[Tensor, Reading]:
        if not isinstance(y, Shares) and not 0 < x.shape[0] <= FEW:
            x = self.merge(y, x, post, comb)
            return x, self.split(x, mix, into)
        args, n_row = self._merged(y.y if isinstance(y, Shares) else y, x, post, comb)
        self._examine(self.kernels, mix)
        parts = args[-1].new_empty(len(args[-1]), self.n_chunk, SLOTS)
        grid, sizes = self._lines(n_row)
        if isinstance(y, Shares):
            (merged, *others), (weights, shared, _, residual) = args, y.args()
            counts = *sizes, y.weights.shape[1], y.n_piece
            given = merged, weights, shared, residual, *others, mix.fn, parts, *counts
            self.kernels["streams_merge_sums_parts"].launch(grid, THREADS, given, overlap=True)
        else:
            merging = *args, mix.fn, parts, *sizes
            self.kernels["streams_merge_parts"].launch(grid, THREADS, merging, overlap=True)
        return args[-1], self._split(args[-1], mix, parts, into)

    def _merged(
        self, y: Tensor, x: Tensor, post: Tensor, comb: Tensor
    ) -> tuple[tuple[Tensor, ...], int]:
        """Arguments of a launch that merges, the new streams last; and the number of rows."""
        y, x, post, comb = (t.contiguous() for t in (y, x, post, comb))
        n_row = self._rows(x)
        assert y.shape[1:] == (self.spec.n,) and len(y) % max(n_row, 1) == 0
        assert y.dtype == post.dtype == comb.dtype == torch.float32
        assert post.shape == (n_row, N_STREAM) and comb.shape == (n_row, N_STREAM, N_STREAM)
        return (y, x, post, comb, torch.empty_like(x)), n_row

    def _examine(self, kernels: dict[str, Kernel], mix: StreamMix) -> None:
        m, n_scale = (N_STREAM, 1) if kernels is self.heads else ((2 + N_STREAM) * N_STREAM, 3)
        shapes = (m, N_STREAM * self.spec.n), (n_scale,), (m,)
        for t, shape in zip((mix.fn, mix.scale, mix.base), shapes, strict=True):
            assert t.shape == shape and t.dtype == torch.float32 and t.is_contiguous()

    def _lines(self, n_row: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The grid of products by columns, and its sizes: rows, and those of a CTA."""
        per_cta = -(-n_row // max(1, PER_MULTIPROCESSOR * self.n_multiprocessor // self.n_chunk))
        return (self.n_chunk, -(-n_row // per_cta)), (n_row, per_cta)

    def _parts(self, kernels: dict[str, Kernel], x: Tensor, mix: StreamMix) -> Tensor:
        self._examine(kernels, mix)
        n_row, parts = self._rows(x), x.new_empty(len(x), self.n_chunk, SLOTS)
        if n_row:
            grid, sizes = self._lines(n_row)
            args = x, mix.fn, parts, *sizes
            kernels["streams_parts"].launch(grid, THREADS, args, overlap=True)
        return parts

    def _read(
        self, kernels: dict[str, Kernel], x: Tensor, mix: StreamMix, parts: Tensor, to: Sequence[Arg]
    ) -> Tensor:
        """to: post and comb."""
        n_row, y = self._rows(x), x.new_empty(len(x), self.spec.n)
        if n_row:
            args = x, parts, mix.scale, mix.base, y, *to, self.spec.eps, self.spec.floor
            kernels["streams_read"].launch(self._grid(n_row), READING, args, overlap=True)
        return y

    def _read_rows(
        self, x: Tensor, mix: StreamMix, parts: Tensor, to: tuple[Tensor, Tensor], into: RowBuffer
    ) -> Tensor:
        """`_read`, and its rows where `into` says."""
        n_row, y, norm = self._rows(x), x.new_empty(len(x), self.spec.n), into.norm
        rows = into.rows.room(n_row)
        assert norm is not None and norm.weight.shape == (self.spec.n,) and norm.weight.is_contiguous()
        assert rows.layout == BLOCKED and into.rows.n_in == self.spec.n
        ahead, *sizes = prefetch_args(into.weights, n_row)
        read = x, parts, mix.scale, mix.base, y, *to, norm.weight, rows.blocks, rows.sums, rows.powers
        floats = self.spec.eps, self.spec.floor, rows.pad, norm.eps, into.power
        n_asking = -(-ASKING // n_row) if n_row <= MAX_ROWS and self.capability >= HOPPER else 0
        grid, args = (n_row, 2 + n_asking), (*read, ahead, *floats, *sizes)
        self.kernels["streams_read_rows"].launch(grid, READERS, args, overlap=True)
        into.rows.hold(y, norm, rows)
        return y

    def _rows(self, x: Tensor) -> int:
        assert x.shape[1:] == (N_STREAM, self.spec.n) and x.dtype == torch.float32
        return x.shape[0]

    def _grid(self, n_row: int) -> tuple[int, int]:
        return n_row, -(-self.spec.n // (4 * READING))


def programs(spec: StreamsSpec, target: GpuKind) -> list[Program]:
    return [*FILE.programs((spec.n, spec.n_iter), target), *HEAD.programs((spec.n, 0), target)]


bind = StreamsLaunch


def random_mix(m: int, spec: StreamsSpec, gen: torch.Generator, size: float = 1.0) -> StreamMix:
    """Coefficients about `size`."""
    fn = torch.randn(m, spec.n_stream * spec.n, generator=gen) / (spec.n_stream * spec.n) ** 0.5
    scale = size * (0.5 + torch.rand(1 if m == spec.n_stream else 3, generator=gen))
    return StreamMix(*(t.to(spec.device) for t in (fn, scale, 0.5 * torch.randn(m, generator=gen))))


def check(launch: Streams, reference: Streams, spec: StreamsSpec) -> str | None:
    """Rows from one on, of sizes down to where eps counts, one of zeros; coefficients that saturate; a row alone and among others."""
    gen, n = torch.Generator().manual_seed(0), spec.n_stream
    for n_row, size in ((1, 1.0), (SUMMED, 1.0), (9, 1.0), (9, 20.0), (70, 1.0)):
        mix, head = (random_mix(m, spec, gen, size) for m in ((2 + n) * n, n))
        x = torch.randn(n_row, n, spec.n, generator=gen) * torch.logspace(2, -4, n_row)[:, None, None]
        x[n_row // 2] *= n_row == 1
        x, y = x.to(spec.device), torch.randn(n_row, spec.n, generator=gen).to(spec.device)
        got, want = launch.split(x, mix), reference.split(x, mix)
        merged = launch.merge(y, x, *want[1:]), reference.merge(y, x, *want[1:])
        pairs = dict(zip(("row", "post", "comb"), zip(got, want, strict=True), strict=True))
        pairs |= {"merged row": merged, "head's row": (launch.head(x, head), reference.head(x, head))}
        for name, (own, other) in pairs.items():
            by = 1.0 if name in ("post", "comb") else x.flatten(1).norm(dim=-1) / x[0].numel() ** 0.5
            by = by + 1.0 if name == "merged row" else by
            off = float(((own - other).flatten(1).abs().amax(-1) / by).nan_to_num(0.0, torch.inf).amax())
            if not bool(own.isfinite().all()) or not off < OFF:
                return f"{n_row} rows: a {name} differs from the reference by {off:.2g}"
        again, read = launch.merge_split(y, x, *want[1:], mix)
        if not all(map(torch.equal, (again, *read), (merged[0], *launch.split(merged[0], mix)))):
            return f"{n_row} rows merged and read at once have other bits than one after the other"
        if (why := _check_sums(launch, x, want, mix)) is not None:
            return f"{n_row} rows: {why}"
        if spec.n % 32 == 0 and (why := _check_rows(launch, y, x, want, mix)) is not None:
            return f"{n_row} rows: {why}"
        last = slice(n_row - 1, n_row)
        alone = (*launch.split(x[last], mix), launch.head(x[last], head))
        if not all(map(torch.equal, alone, (t[last] for t in (*got, launch.head(x, head))))):
            return f"a row has other bits alone than among {n_row}"
    return None


def _check_sums(launch: Streams, x: Tensor, given: Reading, mix: StreamMix) -> str | None:
    """Unsummed outputs of experts, with and without a further addend, give the same bits as their sum."""
    if not isinstance(launch, StreamsLaunch) or not launch.sums_of(len(x)):
        return None
    n_row, n, gen = len(x), launch.spec.n, torch.Generator().manual_seed(2)
    for n_used, n_piece, is_added in ((6, 0, True), (11, 2, False), (1, 1, True)):
        shapes = (n_row, n_used, n), (n_row, n_used), (max(n_piece, 1), n_row, n), (n_row, n)
        y, weights, pieces, residual = (
            torch.randn(*shape, generator=gen).to(x.device) for shape in shapes
        )
        more = residual if is_added else None
        shares = Shares(y.view(-1, n), weights, pieces if n_piece else None, None, more, n_piece)
        shared = None if not n_piece else pieces[0] if n_piece == 1 else pieces[0] + pieces[1]
        gate = None if shared is None else torch.ones(n_row, 1, device=x.device)
        whole = combine(y, weights, Added(more, shared, gate))
        got = launch.merge_split(shares, x, *given[1:], mix)
        want = launch.merge_split(whole, x, *given[1:], mix)
        if not all(map(torch.equal, (got[0], *got[1]), (want[0], *want[1]))):
            return "what experts gave is not summed on the way as before it"
    return None


def _check_rows(launch: Streams, y: Tensor, x: Tensor, given: Reading, mix: StreamMix) -> str | None:
    """Rows normed by this launch have the bits that rows.cu gives for the reading."""
    if not isinstance(launch, StreamsLaunch):
        return None
    n, n_row, gen = launch.spec.n, len(x), torch.Generator().manual_seed(1)
    norm = Norm((0.5 + torch.rand(n, generator=gen)).to(x.device), 1e-5)
    own, other = (RowsLaunch(x.device, n, (8, 128)) for _ in "oo")
    merged, reading = launch.merge_split(y, x, *given[1:], mix)
    again, got = launch.merge_split(y, x, *given[1:], mix, RowBuffer(own, own.blocks, 2.0, norm))
    if not all(map(torch.equal, (again, *got), (merged, *reading))):
        return "what is read has other bits where it is normed on the way"
    norm.power = 2.0
    want = other(reading[0], norm)
    pairs = zip(
        (own.blocks, own.sums, own.powers[:n_row]),
        (other.blocks, other.sums, other.powers[:n_row]),
        strict=True,
    )
    if n_row <= want.pad and not all(torch.equal(a, b) for a, b in pairs):
        return "rows that are normed on the way are not those of a launch of their own"
    return None
