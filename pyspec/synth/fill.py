"""Random weights in any type: exactly quantised where that is cheap, else random blocks with scales of the right spread.

All values depend only on the seed and the tensor's name. Large tensors are cut from one random pool per type, from a different
start for each tensor; the pool's length in blocks is prime, so no two rows of a matrix are equal.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from pyspec.cuda.ops.linear.dequant import dequantize, quantize, ue4m3
from pyspec.gguf import GGMLType
from pyspec.gguf.blocks import BlockLayout
from pyspec.synth.layout import Spec

EXACT = frozenset({GGMLType.F32, GGMLType.F16, GGMLType.BF16, GGMLType.Q8_0, GGMLType.Q4_0})
EXACT_LIMIT = 1 << 22  # weights; larger tensors come from the pool
# Even with 256-weight blocks, more blocks than the largest vocabulary has rows
POOL_BYTES = 64 << 20
MAX_SCALED = 4  # scaled copies of a pool kept in memory
_SAMPLE = 4096  # blocks used to measure the spread

# value = d * code + m with codes 0..n: this m (in units of d, and of -dmin for the K types) makes the mean zero
_CENTRE = {GGMLType.Q4_1: 7.5, GGMLType.Q4_K: 7.5, GGMLType.Q2_K: 1.5}
_CENTRE |= dict.fromkeys((GGMLType.Q5_1, GGMLType.Q5_K), 15.5)
_PLAIN = {GGMLType.F32: torch.float32, GGMLType.F16: torch.float16, GGMLType.BF16: torch.bfloat16}


def spread(spec: Spec) -> float:
    """Standard deviation of a matrix. With a gain of 1 it preserves the size of activations; twice that for embedding and head,
    so that logits differ by a few.
    """
    return spec.gain * (2.0 if spec.kind in ("embedding", "head") else 1.0) / spec.shape[-1] ** 0.5


def values(spec: Spec, seed: int) -> np.ndarray:
    """float32 values of one tensor, int32 for "ids", int64 for a "choice". Recurrent decay and step follow the initialisation used to train Gated DeltaNet."""
    found: NDArray[np.floating]
    rng = np.random.default_rng([seed, zlib.crc32(spec.name.encode())])
    match spec.kind:
        case "norm":
            found = spec.gain * (1 + 0.1 * rng.standard_normal(spec.shape))
        case "conv":
            found = 0.3 * rng.standard_normal(spec.shape)
        case "ids":
            n, most = spec.shape[1], int(spec.gain)
            numbers = rng.random((spec.shape[0], most), dtype=np.float32)
            drawn = numbers.argpartition(min(n, most - 1), 1)
            return drawn[:, :n].astype(np.int32)
        case "choice":
            return np.sort(rng.permutation(int(spec.gain))[: spec.shape[0]]).astype(np.int64)
        case "divisors":
            found = np.full(spec.shape, 1e30)
            found[: round(spec.gain * spec.shape[0])] = 1.0
        case "decay":
            found = -rng.uniform(1, 16, spec.shape)
        case "step":
            step = np.exp(rng.uniform(np.log(1e-3), np.log(0.1), spec.shape))
            found = step + np.log(-np.expm1(-step))
        case _:
            found = spread(spec) * rng.standard_normal(spec.shape, dtype=np.float32)
            if spec.rows:
                found *= np.array(spec.rows, np.float32)[:, None]
    return found.astype(np.float32)


class Filler:
    """Yields the bytes of tensors; keeps one pool per type."""

    def __init__(
        self, seed: int, largest: dict[GGMLType, int], unscaled: frozenset[str] = frozenset()
    ) -> None:
        """`largest`: blocks of the largest tensor of each type, so that small files have small pools.

        unscaled  NVFP4 tensors without a `.scale`: their block scales carry the whole spread
        """
        self.seed = seed
        self._largest, self._unscaled = largest, unscaled
        self._pools: dict[GGMLType, Pool] = {}

    def bytes(self, spec: Spec, kind: GGMLType) -> Iterator[np.ndarray]:
        n = int(np.prod(spec.shape))
        if spec.kind in ("ids", "choice"):
            yield values(spec, self.seed).reshape(-1).view(np.uint8)
            return
        if kind in EXACT and (n <= EXACT_LIMIT or spec.rows):
            yield quantize(torch.from_numpy(values(spec, self.seed)), kind).numpy().reshape(-1)
            return
        pool = self._pool(kind)
        start = zlib.crc32(f"{self.seed} {spec.name}".encode()) % pool.n_block
        is_scaled = kind is GGMLType.NVFP4 and spec.name not in self._unscaled
        data = pool.scaled(pool.unit if is_scaled else spread(spec))
        at, left = start * kind.type_size, n // kind.block_size * kind.type_size
        while left:
            piece = data[at : at + left]
            yield piece
            left -= len(piece)
            at = 0

    def second_scale(self, spec: Spec) -> float:
        """NVFP4's `.scale`, needed because the range of its 8-bit block scales is too small for the spread."""
        return spread(spec) / self._pool(GGMLType.NVFP4).unit

    def _pool(self, kind: GGMLType) -> Pool:
        if kind not in self._pools:
            n = min(POOL_BYTES // kind.type_size, self._largest[kind])
            self._pools[kind] = Pool(kind, _next_prime(n), self.seed)
        return self._pools[kind]


class Pool:
    """Random blocks of one type, also with scales for any other spread."""

    def __init__(self, kind: GGMLType, n_block: int, seed: int) -> None:
        self.kind, self.n_block = kind, n_block
        rng = np.random.default_rng([seed, int(kind)])
        layout = kind.layout
        assert layout is not None
        self._layout: type[BlockLayout] = layout
        self._scales = rng.uniform(0.5, 1.5, n_block).astype(np.float32)
        if kind in _PLAIN:
            self._scales = rng.standard_normal(n_block, dtype=np.float32)
        elif kind not in _CENTRE:
            # Codes are not centred; this centres their values
            self._scales *= rng.choice(np.array([-1, 1], np.float32), n_block)
        self._blocks = rng.integers(0, 256, (n_block, kind.type_size), dtype=np.uint8)
        _tidy(self._blocks, kind, layout, rng)
        self._cache: OrderedDict[float, np.ndarray] = OrderedDict()
        self.unit = self._measure()

    def scaled(self, std: float) -> np.ndarray:
        """[bytes] uint8: the whole pool with this standard deviation."""
        if std in self._cache:
            self._cache.move_to_end(std)
        else:
            while len(self._cache) >= MAX_SCALED:
                self._cache.popitem(last=False)
            scaled = self._with_scales(self._blocks, self._scales, std / self.unit)
            self._cache[std] = scaled.reshape(-1)
        return self._cache[std]

    def _measure(self) -> float:
        """Standard deviation without scaling."""
        raw = self._with_scales(self._blocks[:_SAMPLE], self._scales[:_SAMPLE], 1.0)
        shape = (len(raw) * self.kind.block_size,)
        return float(dequantize(torch.from_numpy(raw), self.kind, shape).std(correction=0))

    def _with_scales(self, source: np.ndarray, scales: np.ndarray, factor: float) -> np.ndarray:
        if self.kind in _PLAIN:
            plain = torch.from_numpy(scales * np.float32(factor)).to(_PLAIN[self.kind])
            return plain.view(-1, 1).view(torch.uint8).numpy()
        blocks = source.copy()
        if self.kind is GGMLType.NVFP4:
            blocks[:, :4] = _rescaled(factor)[blocks[:, :4]]
            return blocks
        if self.kind is GGMLType.MXFP4:
            blocks[:, 0] += np.uint8(round(np.log2(factor)) % 256)
            return blocks
        self._put(blocks, "d", scales * np.float32(factor))
        if (centre := _CENTRE.get(self.kind)) is not None:
            low = "m" if hasattr(self._layout, "m") else "dmin"
            sign = -1 if low == "m" else 1
            self._put(blocks, low, scales * np.float32(factor * centre * sign))
        return blocks

    def _put(self, blocks: np.ndarray, field: str, values: np.ndarray) -> None:
        at = getattr(self._layout, field).offset
        blocks[:, at : at + 2] = values.astype("<f2").view(np.uint8).reshape(-1, 2)


def _rescaled(factor: float) -> np.ndarray:
    """[256] uint8: for each 8-bit block scale the nearest one to `factor` times it, never zero."""
    sizes = ue4m3(torch.device("cpu")).numpy()[1:127]
    wanted = ue4m3(torch.device("cpu")).numpy() * np.float32(factor)
    return (1 + np.abs(sizes[None, :] - wanted[:, None]).argmin(1)).astype(np.uint8)


def _tidy(
    blocks: np.ndarray, kind: GGMLType, layout: type[BlockLayout], rng: np.random.Generator
) -> None:
    """Make the fields that are not codes plausible: equal scales and minima, normal exponents."""
    n = len(blocks)
    if kind is GGMLType.MXFP4:
        blocks[:, 0] = rng.integers(126, 129, n, dtype=np.uint8)
    elif kind is GGMLType.NVFP4:
        blocks[:, :4] = rng.integers(0x30, 0x40, (n, 4), dtype=np.uint8)
    elif kind is GGMLType.Q8_0:
        np.maximum(blocks[:, 2:].view(np.int8), -127, out=blocks[:, 2:].view(np.int8))
    elif kind is GGMLType.Q2_K:
        low = rng.integers(8, 16, (n, 16), dtype=np.uint8)
        blocks[:, :16] = low | (low << 4)
    elif kind in (GGMLType.IQ2_XXS, GGMLType.IQ3_XXS):
        # The byte with the scale of 32 weights
        at, step = (9, 8) if kind is GGMLType.IQ2_XXS else (69, 4)
        blocks[:, at::step] |= 0x80
    elif kind in (GGMLType.Q4_K, GGMLType.Q5_K):
        at = layout.scales.offset  # pyright: ignore[reportAttributeAccessIssue]
        # Both 6-bit numbers in a byte are at least 32
        six = rng.integers(0, 256, (n, 4), dtype=np.uint8) | 0xA0
        low = rng.integers(0, 16, (n, 4), dtype=np.uint8)
        blocks[:, at : at + 12] = np.concatenate((six, six, low | (low << 4)), 1)


def _next_prime(n: int) -> int:
    n = max(n, 2)
    while any(n % d == 0 for d in range(2, int(n**0.5) + 1)):
        n += 1
    return n
