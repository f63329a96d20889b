"""Rotary embedding as a value of each attention, and its angles, made once a forward for each distinct value.

A file may stretch it beyond the context that its model was trained on: evenly (linear), or by YaRN.

YaRN (arXiv:2309.00071) leaves frequencies that turn often within the old context as they are, divides those that hardly turn by the
factor, and mixes those between; queries and keys become a little longer. Keys and defaults are those of llama.cpp for these
architectures: a factor without a type is linear, and `rope.scale_linear` is the factor's old name. Converters write more keys than
llama.cpp reads: these change no text.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyspec.cpu.tensors import query_factors, scaled
from pyspec.cuda.ops.angles.op import angles
from pyspec.cuda.ops.angles.ref import AnglesSpec
from pyspec.errors import ModelError
from pyspec.gguf import GGUFFile
from pyspec.models.matrices import Embedding
from pyspec.models.wants import Want
from pyspec.models.weights import Weights
from pyspec.ranges import quoted

log = logging.getLogger(__name__)

KINDS = ("none", "linear", "yarn")
MULTIPLIER = "rope.scaling.yarn_log_multiplier"
BETA_FAST, BETA_SLOW = 32.0, 1.0
UNREAD = {
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_attn_factor": (1.0, -1.0),
    "rope.scaling.yarn_beta_fast": (BETA_FAST,),
    "rope.scaling.yarn_beta_slow": (BETA_SLOW,),
    MULTIPLIER: (0.0,),
}
"""Keys that llama.cpp reads of other architectures only, and the values that would change nothing."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rope is stretched.

    factor      divides positions
    is_yarn     fast frequencies stay as they were; otherwise all are divided
    n_ctx_orig  tokens of the context that the model was trained on
    length      multiplies cos and sin
    turns       within the old context: frequencies of more turns than the first stay, those of fewer than the second are divided
    """

    factor: float = 1.0
    is_yarn: bool = False
    n_ctx_orig: int = 1
    length: float = 1.0
    turns: tuple[float, float] = (BETA_FAST, BETA_SLOW)

    def kept(self, n_rot: int, base: float, device: torch.device) -> Tensor:
        """Share of each frequency that is left alone. [n_rot / 2] f32"""
        low, high = (turning_dimension(turns, n_rot, self.n_ctx_orig, base) for turns in self.turns)
        low, high = max(0.0, math.floor(low)), min(n_rot - 1.0, math.ceil(high))
        d = torch.arange(n_rot // 2, dtype=torch.float32, device=device)
        return 1 - ((d - low) / max(0.001, high - low)).clamp(0, 1)


def turning_dimension(turns: float, n_rot: int, n_ctx_orig: int, base: float) -> float:
    """The frequency, as a dimension, that makes `turns` turns within the old context."""
    if base <= 1.0:
        return 0.0  # all turn alike
    return n_rot * math.log(n_ctx_orig / (turns * 2 * math.pi)) / (2 * math.log(base))


NOT_STRETCHED = RopeScaling()


def read_scaling(file: GGUFFile, *, reads_ramp: bool = False, has_length: bool = True) -> RopeScaling:
    """The scaling of a file. ModelError for an unknown kind, BadGGUF for values out of range.

    reads_ramp: YaRN's ramp and the multiplier of its length are the file's, as llama.cpp reads them for some architectures.
    has_length: YaRN makes queries and keys longer; otherwise it multiplies scores (`score_factor`)
    """
    h = file.hparams
    kind = h.label("rope.scaling.type", "linear")
    if kind not in KINDS:
        raise ModelError(f"rope scaling {quoted(kind)} is not supported ({', '.join(KINDS)} are)")
    factor = h.number("rope.scaling.factor", h.number("rope.scale_linear", 0.0)) or 1.0
    is_yarn = kind == "yarn"
    length, turns = 1.0 + 0.1 * math.log(max(1.0, factor)), (BETA_FAST, BETA_SLOW)
    if is_yarn and reads_ramp:
        names = ("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow")
        fast, slow = (h.number(name, plain) for name, plain in zip(names, turns, strict=True))
        turns = fast, slow
        multiplier = h.number(MULTIPLIER, 0.0)
        length /= 1.0 + 0.1 * multiplier * math.log(max(1.0, factor))
    elif is_yarn:
        _tell_unread(file, is_read=not has_length)
    return RopeScaling(
        factor=1.0 if kind == "none" else factor,
        is_yarn=is_yarn,
        n_ctx_orig=h.integer("rope.scaling.original_context_length", h.integer("context_length")),
        length=h.number("rope.scaling.attn_factor", 1.0) * (length if is_yarn and has_length else 1.0),
        turns=turns,
    )


def score_factor(file: GGUFFile) -> float:
    """What YaRN multiplies scores with where it leaves cos and sin as they are (deepseek2): the file has a tenth of the multiplier."""
    h = file.hparams
    factor = h.number("rope.scaling.factor", 0.0) or 1.0
    if h.label("rope.scaling.type", "linear") != "yarn":
        return 1.0
    multiplier = 10 * h.number(MULTIPLIER, 0.0)
    return (1.0 + 0.1 * multiplier * math.log(max(1.0, factor))) ** 2


def _tell_unread(file: GGUFFile, is_read: bool) -> None:
    h = file.hparams
    for name, plain in UNREAD.items():
        if is_read and name == MULTIPLIER:
            continue
        if (value := h.number(name, plain[0])) not in plain:
            log.warning(
                "%s %g is not used, as llama.cpp does not for this architecture", h.key(name), value
            )


@dataclass(frozen=True, slots=True)
class QueryTemperature:
    """Queries at position p are multiplied with 1 + scale ln(floor(p / n_ctx) + 1), behind their rope: 1 within the old context."""

    scale: float
    n_ctx: int

    def factors(self, positions: Tensor) -> Tensor:
        """Of positions [row] int64. [row] f32"""
        return query_factors(positions, self.scale, self.n_ctx)


def read_temperature(file: GGUFFile) -> QueryTemperature | None:
    """That of a file; None if it has none."""
    h = file.hparams
    scale = h.number("attention.temperature_scale", 0.0)
    n_ctx = h.integer("rope.scaling.original_context_length", h.integer("context_length"))
    return QueryTemperature(scale, n_ctx) if scale else None


DIVISORS = "rope_freqs.weight"  # llama 3's

Angles = tuple[Tensor, Tensor]
"""cos, sin [row, 1, n_rot/2] f32"""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotation of a head's first `n_rot` dimensions.

    neox      pairs (d, d + n_rot/2); otherwise adjacent pairs (2d, 2d + 1), as llama's converter permutes them
    scaling   how the file stretches it
    divisors  the tensor [n_rot/2] f32 that divides the frequencies, where the file has it; "" for none
    queries   what queries alone are multiplied with
    """

    n_rot: int
    base: float
    neox: bool
    scaling: RopeScaling = NOT_STRETCHED
    divisors: str = DIVISORS
    queries: QueryTemperature | None = None

    def tensors(self) -> dict[str, Want]:
        return {self.divisors: Want((self.n_rot // 2,), optional=True)} if self.divisors else {}

    def bind(self, weights: Weights) -> Rope:
        return Rope(self, weights.device, weights.optional(self.divisors) if self.divisors else None)


NO_ROPE = RopeSpec(n_rot=0, base=1.0, neox=False)


class Rope:
    """A rope on a device."""

    def __init__(self, spec: RopeSpec, device: torch.device, divisors: Tensor | None = None) -> None:
        scaling, n_rot, base = spec.scaling, spec.n_rot, spec.base
        self.factor, self.length, self.queries = scaling.factor, scaling.length, spec.queries
        d = torch.arange(0, n_rot, 2, device=device, dtype=torch.float32)
        freq = base ** (-d / n_rot)
        self.freq = freq if divisors is None else freq / divisors
        if scaling.is_yarn:
            kept = scaling.kept(n_rot, base, device)
            self.freq, self.factor = self.freq * (kept + (1 - kept) / scaling.factor), 1.0
        self.launch = angles.bind(AnglesSpec(device))

    def angles(self, positions: Tensor) -> Angles:
        """Of positions [row]."""
        return self._lengthened(self.launch(positions, self.freq, self.factor))

    def embedded(self, embedding: Embedding, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Angles]:
        """The tokens' rows of the embedding, and the angles of their positions, in one launch where a kernel has it."""
        rows, angles = embedding.with_angles(tokens, positions, self.freq, self.factor)
        return rows, self._lengthened(angles)

    def _lengthened(self, angles: Angles) -> Angles:
        if self.length == 1.0:
            return angles
        cos, sin = (scaled(each.flatten(1), self.length).unsqueeze(1) for each in angles)
        return cos, sin


class Ropes:
    """The distinct ropes of a list of blocks. A block keeps its rope's place here, and a forward makes the angles of all.

    known: ropes of a model whose blocks these go with; equal ones are shared.
    """

    def __init__(self, weights: Weights, known: Ropes | None = None) -> None:
        self._weights, self._known = weights, {} if known is None else known.bound
        self.bound: dict[RopeSpec, Rope] = {}

    def place(self, spec: RopeSpec) -> int:
        """Where a forward's angles have those of `spec`."""
        if spec not in self.bound:
            known = self._known.get(spec)
            self.bound[spec] = spec.bind(self._weights) if known is None else known
        return list(self.bound).index(spec)

    def angles(self, positions: Tensor) -> tuple[Angles, ...]:
        return tuple(rope.angles(positions) for rope in self.bound.values())

    def queries(self, positions: Tensor) -> tuple[Tensor | None, ...]:
        """What each rope's queries are multiplied with, by places [row] f32; None: nothing."""
        found = [rope.queries for rope in self.bound.values()]
        return tuple(None if own is None else own.factors(positions) for own in found)

    def embedded(
        self, embedding: Embedding, tokens: Tensor, positions: Tensor
    ) -> tuple[Tensor, tuple[Angles, ...]]:
        """The first two things of a forward: the tokens' rows of the embedding, and the angles of their positions."""
        if not self.bound:
            return embedding(tokens), ()
        first, *others = self.bound.values()
        rows, angles = first.embedded(embedding, tokens, positions)
        return rows, (angles, *(rope.angles(positions) for rope in others))
