"""Rows of packed matrices as f16 in memory that all matrices share (linear_unpack.cu), for a library's product of many rows.

For GPUs whose own products of packed weights are slower than a library's. The values are those of the file, rounded to f16 once.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from pyspec.cuda import jit
from pyspec.cuda.context import per_device
from pyspec.cuda.jit import GpuKind, Program, arch_of, compile_cubin
from pyspec.cuda.ops.linear.formats import CHUNKS, FORMATS, RECORDS
from pyspec.cuda.ops.linear.pack import Packed, n_chunks, n_groups
from pyspec.gguf import GGMLType

WARPS = 8
UNSUITED = (GGMLType.BF16,)  # its numbers have exponents that f16 has not


def defines(type: GGMLType, gated: bool) -> dict[str, int | str]:
    """Macros of linear_unpack.cu."""
    return {
        "TYPE": FORMATS[type].code,
        "CHUNK": CHUNKS[type],
        "RECORD": RECORDS[type],
        "GATED": int(gated),
    }


@per_device
def _kernel(device: torch.device, type: GGMLType, gated: bool) -> jit.Kernel:
    arch = arch_of(torch.cuda.get_device_capability(device))
    return compile_cubin("linear_unpack", arch, defines(type, gated)).kernel("linear_unpack", "ppiiiiii")


class UnpackLaunch:
    """Unpacks matrices of one type."""

    def __init__(self, device: torch.device, type: GGMLType, gated: bool) -> None:
        self.type, self.gated, self.kernel = type, gated, _kernel(device, type, gated)
        self.overlap = torch.cuda.get_device_capability(device) >= (9, 0)

    def __call__(self, packed: Packed, first: int, end: int, out: Tensor) -> None:
        """Rows [first, end) into out [end - first, n_in] f16; of gates and ups, which lie in turn, all gates come first.

        first, and end unless it is the matrix's, are multiples of 16.
        """
        n_row, n_in = end - first, packed.n_in
        assert packed.type is self.type and first % 16 == 0 and (end % 16 == 0 or end == packed.n_out)
        assert out.shape == (n_row, n_in) and out.dtype == torch.float16 and out.is_contiguous()
        n_group, n_chunk = n_groups(n_row), n_chunks(packed.type, n_in)
        sizes = (first // 16, n_group, n_groups(packed.n_out), n_chunk, n_row, n_in)
        grid = (-(-n_chunk // WARPS), n_group)
        self.kernel.launch(
            grid, 32 * WARPS, (packed.data, out, *map(np.int32, sizes)), overlap=self.overlap
        )


def programs(type: GGMLType, gated: bool, target: GpuKind) -> Iterable[Program]:
    yield target.program("linear_unpack", defines(type, gated))
