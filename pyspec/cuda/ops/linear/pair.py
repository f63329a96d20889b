"""Products of few rows by pairs of CTAs (linear_pair.cu): how the ring of slots is laid out for a matrix, and its launch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pyspec.cuda.jit import KernelFile, Macros
from pyspec.cuda.ops.linear.formats import CHUNKS, FORMATS, RECORDS
from pyspec.cuda.ops.linear.pack import Packed, n_chunks, n_groups, packed_bytes
from pyspec.cuda.ops.linear.ref import Epilogue, LinearSpec, epilogue_macros
from pyspec.cuda.ops.rows.cuda import Rows
from pyspec.gguf import GGMLType

# For each pad that is taken: 16-row groups of a band at most
GROUPS = {8: 8, 16: 8, 24: 4, 32: 4, 48: 4}
WAYS_M = 2  # warps that share a band's groups, for each of the four that share its columns
COPIERS, LANES = 2, 2  # warps that fetch weights, and lanes of each that do
ROW_LANES = 4  # lanes of a warp that fetch rows
FETCHERS = COPIERS * LANES
MAX_SLOTS = 48
# Bytes of weights in flight to a CTA, before and after the end of its predecessor
EARLY, STEADY = 35_000, 52_000
# Of a matrix: larger ones stream better in whole tiles (linear_sm90.cu), whose end is a smaller part (docs/log.md).
MOST_BYTES = 30_000_000
LEAST_SHARED = 200 * 1024  # with less, slots are too few


@dataclass(frozen=True, slots=True)
class StageRing:
    """Slots of shared memory, each a chunk of a band: how many, bytes for weights in one, slots on their way at most."""

    n_slot: int
    weights: int
    early: int
    steady: int
    n_bytes: int


def row_bytes(type: GGMLType, pad: int) -> int:
    """Of the rows of a chunk, and their sums where minima need them."""
    return CHUNKS[type] * pad * (68 if FORMATS[type].minima else 64)


def slot_weights(type: GGMLType, groups: int) -> int:
    """Of a slot for `groups` records that begin anywhere in 128 bytes."""
    return -(-(groups * RECORDS[type] + 112) // 128) * 128


def meeting_bytes(pad: int) -> int:
    """Where CTAs put sums for each other, two bands' worth: 8 shares of half of a band's groups."""
    return 2 * 8 * GROUPS[pad] // 2 * pad * 64


def ring(type: GGMLType, pad: int, n_group: int, n_pair: int, n_shared: int) -> StageRing:
    """`n_shared`: bytes of dynamic shared memory that a CTA may have."""
    heights = {n_group // n_pair, -(-n_group // n_pair)} - {0}
    groups = max(-(-height // -(-height // GROUPS[pad])) for height in heights)
    weights = slot_weights(type, groups)
    slot = weights + row_bytes(type, pad)
    n_slot = min(MAX_SLOTS, (n_shared - meeting_bytes(pad)) // slot) // FETCHERS * FETCHERS
    early, steady = (max(2, round(n / weights)) for n in (EARLY, STEADY))
    return StageRing(
        n_slot, weights, min(early, n_slot), min(steady, n_slot), meeting_bytes(pad) + n_slot * slot
    )


def takes(spec: LinearSpec, pad: int, n_shared: int) -> bool:
    """Whether this is the way to multiply `pad` rows: clusters come with 9.0, as does this much shared memory."""
    if pad not in GROUPS or n_shared < LEAST_SHARED:
        return False
    room = n_shared - meeting_bytes(pad)
    enough = 4 * (slot_weights(spec.type, GROUPS[pad]) + row_bytes(spec.type, pad)) <= room
    return enough and packed_bytes(spec.type, spec.n_weight_row, spec.n_in) <= MOST_BYTES


def defines(
    type: GGMLType, pad: int, epilogue: Epilogue, limit: float = 0.0, hands: float = 0.0
) -> Macros:
    """Macros of linear_pair.cu."""
    return {
        "TYPE": FORMATS[type].code,
        "CHUNK": CHUNKS[type],
        "RECORD": RECORDS[type],
        "GROUPS": GROUPS[pad],
        "TILES_N": pad // 8,
        "WAYS_M": WAYS_M,
        "COPIERS": COPIERS,
        "LANES": LANES,
        "ROW_LANES": ROW_LANES,
        "MAX_SLOTS": MAX_SLOTS,
    } | epilogue_macros(epilogue, limit, hands)


FILE = KernelFile[tuple[tuple[str, int | str], ...]]("linear_pair", "ppppppiiiiiiiii", dict)
"""By macros."""


class PairLaunch:
    """Multiplies up to `pad` prepared rows with one matrix of `spec`."""

    def __init__(self, spec: LinearSpec, pad: int, n_sm: int, n_shared: int) -> None:
        n_group, n_chunk = n_groups(spec.n_weight_row), n_chunks(spec.type, spec.n_in)
        n_pair = max(1, min(n_sm // 2, n_group))
        ring_ = ring(spec.type, pad, n_group, n_pair, n_shared)
        macros = defines(spec.type, pad, spec.epilogue, spec.limit, spec.hands)
        self.kernel = FILE.kernel(spec.device, tuple(macros.items())).allow_shared(n_shared)
        self.grid, self.n_bytes = (2 * n_pair,), ring_.n_bytes
        slots = ring_.n_slot, ring_.weights, ring_.early, ring_.steady
        self.sizes = spec.n_out, n_group, n_chunk, *slots

    def __call__(
        self,
        rows: Rows,
        packed: Packed,
        out: Tensor,
        residual: Tensor | None,
        late: bool = False,
    ) -> None:
        """late: the next launch begins when all launches before this product are over, and may use their results without a wait."""
        add = out if residual is None else residual
        read = packed.data, rows.blocks, rows.sums, rows.powers, add, out
        args, threads = (*read, rows.n_row, *self.sizes, int(late)), 32 * (4 * WAYS_M + COPIERS + 1)
        self.kernel.launch(self.grid, threads, args, self.n_bytes, overlap=True)
