"""`embed` on NVIDIA GPUs: one launch (embed.cu). Same bits as dequant_ref.

A token that does not exist is reported (cuda/faults.py, the batch's row) and read as the first one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pyspec.cuda import faults
from pyspec.cuda.jit import Arg, GpuKind, KernelFile, Program
from pyspec.cuda.ops.angles import cuda as angles_cuda
from pyspec.cuda.ops.embed.ref import GUARD, Embed, EmbedSpec
from pyspec.gguf import GGMLType

THREADS = 256  # of a CTA, 4 columns each
MAX_TOKENS = (1 << 31) - 1
PACKED = tuple(
    GGMLType[name] for name in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K")
)
TYPES = (*PACKED, GGMLType.F16, GGMLType.BF16, GGMLType.F32)
N_TOKEN = 37  # of the check
SIZES = ((1, 0), (9, 32), (40, 3))  # rows, angles of the check


def limits(spec: EmbedSpec) -> str | None:
    if spec.type not in TYPES:
        return f"the embedding is {spec.type.name}; the kernel takes {', '.join(t.name for t in TYPES)}"
    if spec.n_in % 4 or spec.n_in % spec.type.block_size:
        return f"{spec.n_in} columns; the kernel takes whole blocks, and multiples of 4"
    return None


FILE = KernelFile[GGMLType](
    "embed",
    "plippi" + "ppppif" + "p",
    lambda type: {"TYPE": int(type), "THREADS": THREADS, "OP_ID": GUARD.number},
)


class EmbedLaunch:
    """Implements `Embed`."""

    def __init__(self, spec: EmbedSpec) -> None:
        self.n_in, self.row_bytes = spec.n_in, spec.n_in // spec.type.block_size * spec.type.type_size
        self.kernel, self.fault = FILE.kernel(spec.device, spec.type), faults.record(spec.device)

    def rows(self, raw: Tensor, tokens: Tensor) -> Tensor:
        return self._run(raw, tokens, (None, None, None, None, 0, 1.0))

    def rows_and_angles(
        self, raw: Tensor, tokens: Tensor, positions: Tensor, freq: Tensor, factor: float
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        assert positions.dtype == torch.int64 and positions.is_contiguous()
        assert positions.shape == tokens.shape
        assert freq.dtype == torch.float32 and freq.is_contiguous()
        cos, sin = (freq.new_empty(len(tokens), 1, len(freq)) for _ in "cs")
        rope = positions, freq, cos, sin, len(freq), angles_cuda.inverse_of(factor)
        return self._run(raw, tokens, rope), (cos, sin)

    def _run(self, raw: Tensor, tokens: Tensor, rope: Sequence[Arg]) -> Tensor:
        n_token, n_row = raw.shape[0], tokens.shape[0]
        assert raw.dtype == torch.uint8 and raw.is_contiguous() and raw.shape[1] == self.row_bytes
        assert 0 < n_token <= MAX_TOKENS and raw.data_ptr() % 16 == 0
        assert tokens.dtype == torch.int64 and tokens.is_contiguous()
        x = torch.empty(n_row, self.n_in, dtype=torch.float32, device=tokens.device)
        if n_row:
            n_part = -(-self.n_in // (4 * THREADS)) + int(rope[4] != 0)
            args = raw, self.row_bytes, n_token, tokens, x, self.n_in
            self.kernel.launch((n_row, n_part), THREADS, (*args, *rope, self.fault))
        return x


def programs(spec: EmbedSpec, target: GpuKind) -> list[Program]:
    return FILE.programs(spec.type, target)


bind = EmbedLaunch


def any_bytes(type: GGMLType, n_in: int, n_token: int, gen: torch.Generator) -> Tensor:
    """[n_token, bytes of a row] uint8: all codes, and scales of all sizes, some of them no numbers."""
    size = n_in // type.block_size * type.type_size
    return torch.randint(0, 256, (n_token, size), generator=gen, dtype=torch.uint8)


def bits(x: Tensor) -> Tensor:
    """Equal values, the same signs of zeros, and NaN at the same places."""
    return x.masked_fill(x.isnan(), 0.5).view(torch.int32)


def values(x: Tensor) -> Tensor:
    """The same without the signs of zeros."""
    return bits(x).masked_fill(x == 0, 0)


def _cases(spec: EmbedSpec) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    gen = torch.Generator().manual_seed(0)
    raw = any_bytes(spec.type, spec.n_in, N_TOKEN, gen).to(spec.device)
    for n_row, n_angle in SIZES:
        tokens = torch.randint(0, N_TOKEN, (n_row,), generator=gen)
        tokens[-1] = N_TOKEN - 1
        positions = angles_cuda.hostile(n_row, gen)
        yield (
            raw,
            tokens.to(spec.device),
            positions.to(spec.device),
            angles_cuda.frequencies(n_angle, spec.device),
        )


def check(launch: Embed, reference: Embed, spec: EmbedSpec) -> str | None:
    """Any bytes a file may hold, to the bit, and the angles of hostile positions. Zeros have no sign on a CPU: scales are whole numbers there."""
    same = values if spec.device.type == "cpu" else bits
    for raw, tokens, positions, freq in _cases(spec):
        (x, own), (want, angles) = (
            e.rows_and_angles(raw, tokens, positions, freq, 4.0) for e in (launch, reference)
        )
        if not torch.equal(same(x), same(want)) or not torch.equal(
            same(launch.rows(raw, tokens)), same(want)
        ):
            return f"{len(tokens)} rows of {spec.type.name} are not the reference's"
        for got, right in zip(own, angles, strict=True):
            if got.shape != right.shape or not torch.allclose(
                got, right, rtol=0.0, atol=angles_cuda.OFF
            ):
                return f"angles of {len(tokens)} rows differ from the reference's"
    return None
