"""`linear` for the many rows of a prompt where no kernel of ours does it at a library's rate: rows of the matrix go, rounded to f16, to memory
that all matrices share (linear_unpack.cu), and the library multiplies with them.

The values are those of the file, rounded to f16 once, as in a copy of the matrix. The memory is made at bind and stays where it is, so
graphs hold its address; all launches must be on one stream.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cuda import jit
from pyspec.cuda.context import per_device
from pyspec.cuda.cut import cut_gates
from pyspec.cuda.jit import HOPPER, GpuKind, KernelFile, Macros, Program, arch_of
from pyspec.cuda.ops.linear.formats import CHUNKS, FORMATS, RECORDS
from pyspec.cuda.ops.linear.pack import TILE, Packed, n_chunks, n_groups
from pyspec.cuda.ops.linear.ref import Epilogue, LinearSpec
from pyspec.cuda.ops.rows.cuda import FINISH, ROW_MAJOR, WideRows
from pyspec.cuda.ops.rows.cuda import builds as rows_builds
from pyspec.cuda.ops.rows.ref import Prep, PrepKind
from pyspec.gguf import GGMLType

WARPS = 8
LEAST = 257  # rows: more than two passes of `linear`
SCRATCH_BYTES = 64 << 20  # of unpacked rows
UNSUITED = (GGMLType.BF16,)  # its numbers have exponents that f16 has not


def defines(type: GGMLType, gated: bool) -> Macros:
    """Macros of linear_unpack.cu."""
    code = FORMATS[type].code
    return {"TYPE": code, "CHUNK": CHUNKS[type], "RECORD": RECORDS[type], "GATED": int(gated)}


FILE = KernelFile[tuple[GGMLType, bool]]("linear_unpack", "ppiiiiii", lambda key: defines(*key))


class UnpackLaunch:
    """Unpacks matrices of one type."""

    def __init__(self, device: torch.device, type: GGMLType, gated: bool) -> None:
        self.type, self.gated, self.kernel = type, gated, FILE.kernel(device, (type, gated))

    def __call__(self, packed: Packed, first: int, end: int, out: Tensor) -> None:
        """Rows [first, end) into out [end - first, n_in] f16; of gates and ups, which lie in turn, all gates come first.

        first, and end unless it is the matrix's, are multiples of 16.
        """
        n_row, n_in = end - first, packed.n_in
        assert packed.type is self.type and first % 16 == 0 and (end % 16 == 0 or end == packed.n_out)
        assert out.shape == (n_row, n_in) and out.dtype == torch.float16 and out.is_contiguous()
        n_group, n_chunk = n_groups(n_row), n_chunks(packed.type, n_in)
        sizes = (first // 16, n_group, n_groups(packed.n_out), n_chunk, n_row, n_in)
        grid, args = (-(-n_chunk // WARPS), n_group), (packed.data, out, *sizes)
        self.kernel.launch(grid, 32 * WARPS, args, overlap=True)


@per_device
def _scratch(device: torch.device) -> Tensor:
    return torch.empty(SCRATCH_BYTES // 2, dtype=torch.float16, device=device)


_rows = per_device(WideRows)


def limits(spec: LinearSpec) -> str | None:
    if spec.parts > 1:
        return "takes one matrix for all columns"
    if spec.type not in CHUNKS:
        return f"{spec.type.name} matrices have no packed form yet"
    if spec.type in UNSUITED:
        return f"{spec.type.name} has numbers that are too large or too small for f16"
    if spec.n_in % 32:
        return f"{spec.n_in} columns are not a multiple of 32"
    if slice_rows(spec.n_in) == 0:
        return f"{spec.n_in} columns; the memory for unpacked rows takes up to {SCRATCH_BYTES // (32 * TILE)}"
    return None


def arch_on(device: torch.device) -> str:
    """The target of kernels on a device; "" if none of ours run there."""
    if not torch.cuda.is_available() or jit.missing(device) is not None:
        return ""
    return arch_of(torch.cuda.get_device_capability(device))


def scratch_bytes(arch: str) -> int:
    """Bytes that prompts take on a GPU of this architecture; none where they run otherwise, or without kernels ("")."""
    return SCRATCH_BYTES if arch and arch != arch_of(HOPPER) else 0


def slice_rows(n_in: int) -> int:
    """Rows that are unpacked at once: as many whole tiles as the memory holds."""
    return SCRATCH_BYTES // (2 * n_in) // (16 * TILE) * 16 * TILE


class UnpackedProduct:
    """Multiplies any number of rows with one matrix of `spec`."""

    least = LEAST

    def __init__(self, spec: LinearSpec) -> None:
        self.spec, self.gated = spec, spec.epilogue is Epilogue.GATED
        self.unpack = UnpackLaunch(spec.device, spec.type, self.gated)
        self.rows, self.scratch = _rows(spec.device, spec.n_in), _scratch(spec.device)

    def __call__(
        self,
        x: Tensor,
        packed: Packed,
        out: Tensor,
        residual: Tensor | None = None,
        prep: Prep | None = None,
    ) -> None:
        """See linear_ref. out and residual contiguous; residual may be `out`."""
        assert out.is_contiguous() and out.shape == (len(x), self.spec.n_out)
        half, powers = self.rows(x, prep)
        step, n, n_in = slice_rows(self.spec.n_in), self.spec.n_weight_row, self.spec.n_in
        is_same = residual is not None and residual.data_ptr() == out.data_ptr()
        y = torch.empty_like(out) if is_same else out
        for first in range(0, n, step):
            end = min(first + step, n)
            weights = self.scratch[: (end - first) * n_in].view(end - first, n_in)
            self.unpack(packed, first, end, weights)
            if not self.gated:
                torch.mm(half, weights.T, out_dtype=torch.float32, out=y[:, first:end])
                continue
            both = torch.mm(half, weights.T, out_dtype=torch.float32)
            self._gate(self.rows.finish(both, powers, None), out[:, first // 2 : end // 2])
        if not self.gated:
            self.rows.finish(y, powers, residual)
        if y is not out:
            out.copy_(y)

    def _gate(self, both: Tensor, out: Tensor) -> None:
        gate, up = both.chunk(2, -1)
        gate, up = cut_gates(gate, up, self.spec.limit)
        torch.mul(F.silu(gate), up, out=out)


def programs(spec: LinearSpec, target: GpuKind) -> Iterable[Program]:
    yield from FILE.programs((spec.type, spec.epilogue is Epilogue.GATED), target)
    yield from rows_builds(spec.n_in, PrepKind.PLAIN, 0, ROW_MAJOR, target)
    yield from FINISH.programs(None, target)


bind = UnpackedProduct
