"""`repack` on NVIDIA GPUs: one launch (repack.cu), for types whose records are the file's bits in another order."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cuda.context import per_device
from pyspec.cuda.jit import GpuKind, KernelFile, Macros, Program
from pyspec.cuda.ops.linear.formats import FORMATS, RECORDS
from pyspec.cuda.ops.linear.pack import TILE, n_chunks, n_groups, packed_bytes
from pyspec.cuda.ops.repack.ref import ROWS, Repack, RepackSpec, bits_of, row_bytes
from pyspec.gguf import GGMLType

MOST_THREADS = 512  # of a CTA: each keeps 32 places in registers


capturable = False


def limits(spec: RepackSpec) -> str | None:
    if spec.type not in FORMATS or bits_of(spec.type) is None:
        return f"records of {spec.type.name} are more than its bits in another order"
    return None


def defines(type: GGMLType) -> Macros:
    """Macros of repack.cu."""
    words, threads = RECORDS[type] // 4, cut(RECORDS[type] // 4)[1]
    return {"ROW": row_bytes(type), "WORDS": words, "THREADS": threads}


def cut(words: int) -> tuple[int, int]:
    """CTAs that share the words of a record, and threads of each."""
    n_part = -(-words // MOST_THREADS)
    return n_part, -(-words // (32 * n_part)) * 32


FILE = KernelFile("repack", "pppp" + "lli", defines)


@per_device
def _tables(device: torch.device, type: GGMLType) -> tuple[Tensor, Tensor]:
    """Places [word, 32] uint16 as int16, and for each word the bits that are flipped and what is added [word, 2] int32."""
    found = bits_of(type)
    assert found is not None
    places, flips = found
    bits = flips.view(-1, 32).long() << torch.arange(32)
    raised = torch.zeros(len(bits), dtype=torch.int64)
    if FORMATS[type].raised:
        raised[FORMATS[type].raised // 4 :] = 0x01010101
    words = torch.stack((bits.sum(-1), raised), -1)
    return places.short().view(-1, 32).to(device), words.int().to(device)


def programs(spec: RepackSpec, target: GpuKind) -> list[Program]:
    is_taken = spec.type in FORMATS and bits_of(spec.type) is not None
    return FILE.programs(spec.type, target) if is_taken else []


def bind(spec: RepackSpec) -> Repack:
    assert ROWS * TILE == 256
    type, kernel = spec.type, FILE.kernel(spec.device, spec.type)
    tables = _tables(spec.device, type)

    def launch(raw: Tensor, shape: tuple[int, int]) -> Tensor:
        n_out, n_in = shape
        n_byte = n_in // type.block_size * type.type_size
        assert raw.dtype == torch.uint8 and raw.is_contiguous() and raw.numel() == n_out * n_byte
        assert n_in % type.block_size == 0
        out = torch.empty(packed_bytes(type, n_out, n_in), dtype=torch.uint8, device=raw.device)
        n_chunk, words = n_chunks(type, n_in), RECORDS[type] // 4
        if n_out:
            n_part, threads = cut(words)
            grid = -(-n_groups(n_out) // TILE) * n_chunk, n_part
            args = raw, *tables, out, n_out, n_byte, n_chunk
            kernel.launch(grid, threads, args)
        return out

    return launch
