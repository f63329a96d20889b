"""How moe.cu is built: pairs of an item, stages, registers, CTAs on a multiprocessor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pyspec.cuda.cut import cut_macros
from pyspec.cuda.jit import GpuKind, Program
from pyspec.cuda.ops.linear.cuda import n_shared
from pyspec.cuda.ops.linear.formats import CHUNKS, FORMATS, RECORDS
from pyspec.cuda.ops.moe.ref import Betas, MoeSpec
from pyspec.cuda.ops.rows.cuda import BLOCKED, PLANES, UNIT, row_bytes
from pyspec.cuda.ops.rows.cuda import builds as rows_builds
from pyspec.cuda.ops.rows.ref import PrepKind
from pyspec.gguf import GGMLType

FEW_PAIRS, MANY_PAIRS = 8, 32
GROUPS = 4  # of 16 weight rows in a CTA
BUILDS = ((FEW_PAIRS, False), (FEW_PAIRS, True), (MANY_PAIRS, True))  # pairs of an item, LISTED
ADDING = BUILDS[0]  # the build of downs that may sum the experts' outputs
NONE, SWIGLU, RELU2, GEGLU, OAI, SITU = range(6)  # moe.cu's activations
GATED = SWIGLU, GEGLU, OAI, SITU  # those of gates and ups
ACTS = {"swiglu": SWIGLU, "relu2": RELU2, "geglu": GEGLU, "swiglu_oai": OAI, "situ": SITU}
STAGE = 10 << 10  # bytes of weights in a stage: fewer barriers, and still several stages
REGISTERS = {FEW_PAIRS: 80, MANY_PAIRS: 160}  # of a thread, at most
LEAST_STAGES = 2  # rather than as many CTAs as registers allow
# Types that multiply rows of whole numbers, in two planes: four pairs a tile
INTEGER = frozenset((GGMLType.Q4_K, GGMLType.IQ2_XXS))
HALVED = frozenset((GGMLType.Q2_K,))  # those whose downs do, with sums of 16 columns
HALVED_UNIT = 160  # bytes of 64 columns of such a row
INTEGER_FEW = 4  # of FEW_PAIRS
# Chunks of their rows in a stage; stages
INTEGER_CHUNKS, INTEGER_STAGES = {FEW_PAIRS: 4, MANY_PAIRS: 1}, 2
INTEGER_REGISTERS = {  # weights are in registers, twice; a build for each (`n_resident`)
    BUILDS[0]: (128, 100),
    BUILDS[1]: (100, 72),
    BUILDS[2]: (160,),
}
IN_PARTS = frozenset((GGMLType.IQ2_XXS, GGMLType.Q2_K))  # types whose columns are summed in PARTS
# Of theirs. With a build of 100 besides, 32 rows took 3 % longer (docs/log.md)
PARTS_REGISTERS = INTEGER_REGISTERS | {BUILDS[1]: (80,)}
# Which in one build have warps of their own; CTAs of that one on a multiprocessor
PARTS, SPLIT_RESIDENT = 2, 3
SPLIT_WAVES = 2  # of them, up to which it is the fastest: two rows of DeepSeek-V4-Flash (docs/log.md)
LAST = 0.45  # of a full wave: fewer CTAs take as long


def planes_of(type: GGMLType | None, inner: bool) -> int:
    """moe.cu's PLANES of gates and ups (inner) or downs: 0 where rows are f16."""
    return 2 if type in HALVED and not inner else int(type in INTEGER)


def most_pairs(type: GGMLType, pairs: int, inner: bool) -> int:
    """Most pairs of an item in a build for `pairs`."""
    return INTEGER_FEW if planes_of(type, inner) and pairs == FEW_PAIRS else pairs


def stage_chunks(type: GGMLType, pairs: int, inner: bool) -> int:
    """Chunks in a stage."""
    if planes_of(type, inner):
        return INTEGER_CHUNKS[pairs]
    return max(1, STAGE // (GROUPS * RECORDS[type]))


def stage_bytes(type: GGMLType, pairs: int, inner: bool = False) -> int:
    """Bytes of weights and rows; downs add a power of two for each block of a row, minima a sum. With planes, rows alone."""
    n_chunk, n_block, kind = stage_chunks(type, pairs, inner), CHUNKS[type], planes_of(type, inner)
    if kind:
        return most_pairs(type, pairs, inner) * (
            n_chunk * n_block // 2 * (HALVED_UNIT if kind == 2 else UNIT) + 16
        )
    beside = (4 if FORMATS[type].minima else 0) + (0 if inner else 4)
    return n_chunk * (GROUPS * RECORDS[type] + n_block * pairs * (64 + beside))


def residents(type: GGMLType, pairs: int, listed: bool, inner: bool) -> tuple[int, ...]:
    """CTAs that a multiprocessor should hold, as registers allow (moe.cu takes one less where its compiler needs more of them). There is a
    build for each, and `n_resident` chooses."""
    of = PARTS_REGISTERS if type in IN_PARTS else INTEGER_REGISTERS
    registers = of[pairs, listed] if planes_of(type, inner) else (REGISTERS[pairs],)
    return tuple(65536 // (n * 32 * GROUPS) for n in registers)


def in_parts(type: GGMLType, inner: bool) -> bool:
    """Whether columns are summed in two parts: in all builds, because otherwise bits would depend on the build."""
    return type in IN_PARTS and planes_of(type, inner) > 0


def splits(type: GGMLType, pairs: int, listed: bool, inner: bool) -> bool:
    """Whether there is a build with separate warps for the parts of columns, used when CTAs are few."""
    return (pairs, listed) == BUILDS[0] and in_parts(type, inner)


def n_stages(type: GGMLType, pairs: int, capability: tuple[int, int], inner: bool = False) -> int:
    """At most 8, as many as fit beside `residents`; but LEAST_STAGES, or at least 2, if they fit one CTA; else 0."""
    size, most = stage_bytes(type, pairs, inner), n_shared(capability)
    if planes_of(type, inner):
        return INTEGER_STAGES
    share = most // residents(type, pairs, True, inner)[0] - 1024  # which is the driver's
    fit = min(most // size, max(LEAST_STAGES, share // size))
    return min(8, fit) if fit >= 2 else 0


def n_resident(n_job: float, choices: Sequence[int], n_multiprocessor: int) -> int:
    """CTAs that a multiprocessor should hold, for `n_job` jobs of equal work.

    The last wave takes as long as a full one, so it is best empty or nearly full. If all CTAs run at once, fewer have more registers;
    else more of them hide more latency.
    """

    def waste(k: int) -> tuple[float, int]:
        waves = n_job / (k * n_multiprocessor)
        return (0.0, k) if waves <= 1 else (k * max(0.0, LAST - waves % 1), -k)

    return min(choices, key=waste)


def n_taken(n_expert: int, n_used: int, n_row: int) -> float:
    """Expected number of experts taken by any row, if all are equally likely. n_expert: may be a few of a model's, fewer than a row uses."""
    return n_expert * (1 - (1 - min(1.0, n_used / n_expert)) ** n_row)


def layout_of(type: GGMLType | None) -> int:
    """Of rows that such gates and ups multiply."""
    return PLANES if planes_of(type, inner=True) else BLOCKED


def between_bytes(type: GGMLType, n_ff: int) -> int:
    """Of a row of n_ff columns that such downs multiply, padded to whole chunks of 256."""
    kind = planes_of(type, inner=False)
    return (
        4 * HALVED_UNIT * -(-n_ff // 256) if kind == 2 else row_bytes(n_ff, PLANES if kind else BLOCKED)
    )


@dataclass(frozen=True, slots=True)
class MoeBuild:
    """One build of moe.cu.

    next      of gates and ups, the type of the downs
    resident  one of `residents`, 0 the first
    cut       of a gated activation (`MoeSpec.cut`)
    split     parts of columns have warps of their own
    biased    products have biases
    """

    type: GGMLType
    pairs: int
    stages: int
    act: int
    inner: bool
    listed: bool = True
    adds: bool = False
    next: GGMLType | None = None
    resident: int = 0
    cut: float | Betas = 0.0
    split: bool = False
    biased: bool = False

    def defines(self) -> dict[str, int | str]:
        """Macros of moe.cu."""
        type, pairs, inner = self.type, self.pairs, self.inner
        kind = planes_of(type, inner)
        tile = INTEGER_FEW if kind else 8
        return (
            {
                "TYPE": FORMATS[type].code,
                "CHUNK": CHUNKS[type],
                "RECORD": RECORDS[type],
                "WARPS_M": GROUPS,
                "WARPS_N": 1,
                "TILES_M": 16 // GROUPS,
                "EPILOGUE": 0,
                "TILES_N": most_pairs(type, pairs, inner) // tile,
                "TILE_ROWS": tile,
                "PER_STAGE": stage_chunks(type, pairs, inner),
                "STAGES": self.stages,
                "RESIDENT": SPLIT_RESIDENT
                if self.split
                else self.resident or residents(type, pairs, self.listed, inner)[0],
                "LISTED": int(self.listed),
                "ACT": self.act,
                "INNER": int(inner),
                "ADDS": int(self.adds),
                "PLANES": kind,
                "NEXT_PLANES": planes_of(self.next, inner=False),
            }
            | ({"PARTS": PARTS} if in_parts(type, inner) else {})
            | ({"SPLIT": PARTS} if self.split else {})
            | (macros_of(self.cut) if self.act in GATED else {})
            | ({"BIASED": 1} if self.biased else {})
        )


def macros_of(cut: float | Betas) -> dict[str, int | str]:
    """Of the numbers of an activation."""
    if isinstance(cut, tuple):
        return {"BETA": f"{cut[0]!r}f", "LINEAR_BETA": f"{cut[1]!r}f"}
    return cut_macros(cut)


def programs(spec: MoeSpec, target: GpuKind) -> Iterable[Program]:
    if spec.up is None or spec.down is None or not _fits(spec, target):
        return
    yield from _programs_of(spec.up, ACTS[spec.act], spec.down, spec.cut, spec.biased, target)
    yield from _programs_of(spec.down, NONE, None, 0.0, spec.biased, target)
    yield target.program("moe_pairs")
    for kind in (PrepKind.PLAIN, PrepKind.NORM):
        yield from rows_builds(spec.n_in, kind, 0, layout_of(spec.up), target)


def _programs_of(
    type: GGMLType, act: int, next: GGMLType | None, cut: float | Betas, biased: bool, target: GpuKind
) -> Iterable[Program]:
    """Of gates and ups, or of downs (`next` is None)."""
    inner = next is not None
    ways = [(pairs, listed, False) for pairs, listed in BUILDS]
    if not inner:
        ways.append((*ADDING, True))
    for pairs, listed, adds in ways:
        stages = n_stages(type, pairs, target.capability, inner)
        kinds = [(n, False) for n in residents(type, pairs, listed, inner)]
        if splits(type, pairs, listed, inner):
            kinds.append((0, True))
        for resident, split in kinds:
            of = pairs, stages, act, inner, listed, adds, next, resident, cut, split, biased
            build = MoeBuild(type, *of)
            yield target.program("moe", build.defines())


def _fits(spec: MoeSpec, target: GpuKind) -> bool:
    return all(
        type in CHUNKS and n_stages(type, MANY_PAIRS, target.capability) for type in (spec.up, spec.down)
    )
