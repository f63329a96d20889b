"""`heads` on NVIDIA GPUs: one launch from the bytes of the file (heads.cu). A row's bits do not depend on the rows beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cuda.jit import KernelFile
from pyspec.cuda.ops.heads.ref import Heads, HeadsRun, HeadsSpec
from pyspec.gguf import GGMLType

PACKED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K")
TYPES = tuple(GGMLType[name] for name in ("F32", "F16", "BF16", *PACKED))
SHARED = 48 << 10  # bytes of weights of a CTA at most
MOST_GRID = 65535  # heads, and tiles of rows
TILES = (1, 2, 4)  # of 8 rows: the builds


def limits(spec: HeadsSpec) -> str | None:
    if spec.type not in TYPES:
        return f"the matrices are {spec.type.name}; the kernel takes {', '.join(t.name for t in TYPES)}"
    if (why := spec.shape_limit) is not None:
        return why
    if spec.n_in % 4 or spec.n_out * spec.row_bytes % 16:
        return f"matrices of {spec.n_out} by {spec.n_in}; the kernel takes multiples of 4 columns and of 16 bytes"
    if 16 * spec.row_bytes > SHARED or spec.n_head > MOST_GRID:
        return f"{spec.n_head} heads of {spec.row_bytes} bytes an output; the kernel takes up to {SHARED // 16}"
    return None


def pitch_of(spec: HeadsSpec) -> int:
    """Bytes from one output to the next in shared memory: rows of whole banks are put 16 bytes farther apart, where there is room."""
    wide = spec.row_bytes + 16
    return wide if spec.row_bytes % 64 == 0 and 16 * wide <= SHARED else spec.row_bytes


def warps_of(spec: HeadsSpec) -> int:
    """Of a CTA, each of which has 16 outputs."""
    return 2 if 32 * pitch_of(spec) <= SHARED else 1


FILE = KernelFile[HeadsSpec](
    "heads",
    {f"heads_{n}": "pllppii" for n in TILES},
    lambda spec: {
        "TYPE": int(spec.type),
        "N_IN": spec.n_in,
        "N_OUT": spec.n_out,
        "ROW_BYTES": spec.row_bytes,
        "PITCH": pitch_of(spec),
        "WARPS": warps_of(spec),
    },
)


def bind(spec: HeadsSpec) -> Heads:
    kernels = dict(zip(TILES, FILE.kernels(spec.device, spec), strict=True))
    n_out = 16 * warps_of(spec)

    def load(data: Tensor) -> HeadsRun:
        data = data.view(torch.uint8).reshape(-1)
        assert data.numel() == spec.n_head * spec.n_out * spec.row_bytes and data.data_ptr() % 16 == 0

        def heads(x: Tensor) -> Tensor:
            assert x.dtype == torch.float32 and x.shape[1:] == (spec.n_head, spec.n_in)
            if x.stride(2) != 1 or x.stride(0) % 4 or x.stride(1) % 4 or x.data_ptr() % 16:
                x = x.contiguous()
            n = len(x)
            out = torch.empty(n, spec.n_head, spec.n_out, dtype=torch.float32, device=x.device)
            if not n:
                return out
            tiles = next((t for t in TILES if n <= 8 * t), TILES[-1])
            grid = (-(-spec.n_out // n_out), spec.n_head, -(-n // (8 * tiles)))
            args = x, x.stride(0), x.stride(1), data, out, n, spec.n_head
            kernels[tiles].launch(grid, 2 * n_out, args, overlap=True)
            return out

        return heads

    return load
