"""Rotary embedding as a value of each attention, and its angles, made once a forward for each distinct value.

A file or llama-server's flags, which take precedence, may stretch it beyond the context that its model was trained on: evenly (linear), by YaRN, or by divisors
of the file, which are one tensor (Llama 3) or one for short and one for long contexts (longrope).

YaRN (arXiv:2309.00071) leaves frequencies that turn often within the old context as they are, divides those that hardly turn by the
factor, and mixes those between; queries and keys become a little longer. Keys and defaults are those of llama.cpp for these
architectures: a factor without a type is linear, and `rope.scale_linear` is the factor's old name. Converters write more keys than
llama.cpp reads: these change no text.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyspec.errors import ModelError
from pyspec.gguf import GGUFFile
from pyspec.models.wants import Want
from pyspec.ranges import quoted

log = logging.getLogger(__name__)

KINDS = ("none", "linear", "yarn", "longrope")
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
class RopeFlags:
    """Values of the flags, for all models of a load. The defaults below stand for the file's own value.

    kind        none, linear or yarn; ""
    factor      divides positions; 0
    base        0
    n_ctx_orig  tokens of the context that the model was trained on; 0
    ramp        share of YaRN's ramp: 0 divides all frequencies; -1
    length      multiplies cos and sin where there is no ramp; -1
    turns       YaRN's: more than the first stay, fewer than the second are divided; -1
    n_ctx       tokens of a request: longrope has divisors for short and long ones
    """

    kind: str = ""
    factor: float = 0.0
    base: float = 0.0
    n_ctx_orig: int = 0
    ramp: float = -1.0
    length: float = -1.0
    turns: tuple[float, float] = (-1.0, -1.0)
    n_ctx: int = 0

    def words(self) -> list[str]:
        """The values that were given, with their names."""
        given = (
            (f"scaling {self.kind}", bool(self.kind)),
            (f"factor {self.factor:g}", self.factor > 0),
            (f"base {self.base:g}", self.base > 0),
            (f"original context {self.n_ctx_orig}", self.n_ctx_orig > 0),
            (f"share of the ramp {self.ramp:g}", self.ramp >= 0),
            (f"length {self.length:g}", self.length >= 0),
            (f"fast turns {self.turns[0]:g}", self.turns[0] >= 0),
            (f"slow turns {self.turns[1]:g}", self.turns[1] >= 0),
        )
        return [words for words, is_given in given if is_given]


NO_FLAGS = RopeFlags()


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rope is stretched.

    factor      divides positions, unless the kind is none
    kind        one of KINDS
    n_ctx_orig  tokens of the context that the model was trained on
    extra       multiplies cos and sin, beside what YaRN does
    turns       within the old context: frequencies of more turns than the first stay, those of fewer than the second are divided
    ramp        share of YaRN's ramp that is used; 0: all frequencies are divided
    multiplier  YaRN's length is divided by one with this multiplier of the logarithm, which scores may have instead
    is_level    and multiplied with one, so that cos and sin keep their length (deepseek2)
    """

    factor: float = 1.0
    kind: str = "linear"
    n_ctx_orig: int = 1
    extra: float = 1.0
    turns: tuple[float, float] = (BETA_FAST, BETA_SLOW)
    ramp: float = 0.0
    multiplier: float = 0.0
    is_level: bool = False

    @property
    def divisor(self) -> float:
        """Of positions, or of the frequencies that YaRN divides."""
        return 1.0 if self.kind == "none" else self.factor

    def _grown(self, multiplier: float = 1.0) -> float:
        return 1.0 + 0.1 * multiplier * math.log(max(1.0, self.divisor))

    @property
    def length(self) -> float:
        """Multiplies cos and sin."""
        if not self.ramp:
            return self.extra
        own = self.multiplier if self.is_level and self.multiplier else 1.0
        return self.extra * self._grown(own) / self._grown(self.multiplier)

    @property
    def score_factor(self) -> float:
        """Multiplies scores of deepseek2; YaRN leaves cos and sin as they are there. As llama.cpp, also where nothing but the factor is given."""
        length = self.length if self.ramp else self.extra * self._grown()
        return (length * self._grown(self.multiplier)) ** 2

    def flagged(self, flags: RopeFlags, *, is_near: bool = False) -> RopeScaling:
        """As flags change it. is_near: of blocks with a window, whose factor is always the file's."""
        kind = flags.kind or self.kind
        ramp = self.ramp if not flags.kind else 1.0 if flags.kind == "yarn" else 0.0
        ramp = flags.ramp if flags.ramp >= 0 else ramp
        fast, slow = (
            given if given >= 0 else own for given, own in zip(flags.turns, self.turns, strict=True)
        )
        return replace(
            self,
            factor=self.divisor if is_near else flags.factor or self.factor,
            kind="linear" if is_near else kind,
            n_ctx_orig=flags.n_ctx_orig or self.n_ctx_orig,
            extra=self.extra * (flags.length if flags.length >= 0 and not ramp else 1.0),
            turns=(fast, slow),
            ramp=ramp,
        )

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


def read_scaling(file: GGUFFile, *, reads_ramp: bool = False, is_level: bool = False) -> RopeScaling:
    """The scaling of a file. ModelError for an unknown kind, BadGGUF for values out of range.

    reads_ramp: YaRN's ramp and the multiplier of its length are the file's, as llama.cpp reads them for some architectures.
    is_level: as of `RopeScaling`; the file has a tenth of the multiplier
    """
    h = file.hparams
    kind = h.label("rope.scaling.type", "linear")
    if kind not in KINDS:
        raise ModelError(f"rope scaling {quoted(kind)} is not supported ({', '.join(KINDS)} are)")
    turns = (BETA_FAST, BETA_SLOW)
    if reads_ramp:
        names = ("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow")
        fast, slow = (h.number(name, plain) for name, plain in zip(names, turns, strict=True))
        turns = fast, slow
    elif kind == "yarn":
        _tell_unread(file, is_read=is_level)
    return RopeScaling(
        factor=h.number("rope.scaling.factor", h.number("rope.scale_linear", 0.0)) or 1.0,
        kind=kind,
        n_ctx_orig=h.integer("rope.scaling.original_context_length", h.integer("context_length")),
        extra=h.number("rope.scaling.attn_factor", 1.0),
        turns=turns,
        ramp=1.0 if kind == "yarn" else 0.0,
        multiplier=h.number(MULTIPLIER, 0.0) * (10 if is_level else 1)
        if reads_ramp or is_level
        else 0.0,
        is_level=is_level,
    )


def trained_length(file: GGUFFile, n_ctx_train: int, flags: RopeFlags) -> int:
    """Tokens that a model counts as trained for, n_ctx_train without flags: a factor of theirs stretches its original context."""
    if not flags.factor and not flags.kind:
        return n_ctx_train
    own = read_scaling(file)
    new = own.flagged(flags)
    if new.kind == "none" or new.divisor == own.factor:
        return n_ctx_train
    return max(1, int(new.n_ctx_orig * new.divisor))


def stretch_words(file: GGUFFile, flags: RopeFlags) -> str:
    """The changes of a file's rope by flags, and the choice among longrope's divisors, in words; "" without both."""
    words = flags.words()
    if file.hparams.label("rope.scaling.type", "") == "longrope":
        scaling = read_scaling(file)
        words.append(
            f"longrope's divisors of {'long' if flags.n_ctx > scaling.n_ctx_orig else 'short'} contexts"
        )
    return ", ".join(words)


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
    """Queries at position p are multiplied with 1 + scale ln(floor((p + offset) / n_ctx) + 1), behind their rope."""

    scale: float
    n_ctx: int
    offset: int = 0


def read_temperature(file: GGUFFile) -> QueryTemperature | None:
    """That of a file; None if it has none."""
    h = file.hparams
    scale = h.number("attention.temperature_scale", 0.0)
    n_ctx = h.integer("rope.scaling.original_context_length", h.integer("context_length"))
    n_ctx = h.integer("attention.temperature_length", 0) or n_ctx
    return QueryTemperature(scale, n_ctx) if scale else None


DIVISORS = "rope_freqs.weight"  # llama 3's
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"  # longrope's


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotation of a head's first `n_rot` dimensions.

    neox      pairs (d, d + n_rot/2); otherwise adjacent pairs (2d, 2d + 1), as llama's converter permutes them
    scaling   how the file stretches it
    divisors  the tensor [n_rot/2] f32 that divides the frequencies, where the file has it; "" for none. A file of the kind longrope has
              two instead
    queries   a factor of queries alone
    turns     False: these dimensions stay as they are, whatever flags say
    axes      frequencies of time, row and column, whose positions differ in pictures; (): all are of the row's number
    """

    n_rot: int
    base: float
    neox: bool
    scaling: RopeScaling = NOT_STRETCHED
    divisors: str = DIVISORS
    queries: QueryTemperature | None = None
    turns: bool = True
    axes: tuple[int, ...] = ()

    def axis_of(self, i: int) -> int:
        """0: frequency `i` is of time, 1: of the row, 2: of the column. They take turns, until one has had its own."""
        return i % 3 if self.axes and i < 3 * self.axes[i % 3] else 0

    def tensors(self) -> dict[str, Want]:
        is_long = self.scaling.kind == "longrope" and self.divisors == DIVISORS
        names = (SHORT, LONG) if is_long else (self.divisors,)
        return {name: Want((self.n_rot // 2,), optional=True) for name in names if name}

    def flagged(self, flags: RopeFlags, *, is_near: bool = False) -> RopeSpec:
        """As flags change it. is_near: of a block with a window, whose base and factor are always the file's."""
        if not self.turns:
            return self
        divisors = self.divisors
        if self.scaling.kind == "longrope" and divisors == DIVISORS:
            divisors = LONG if flags.n_ctx > self.scaling.n_ctx_orig else SHORT
        if divisors == self.divisors and replace(flags, n_ctx=0) == NO_FLAGS:
            return self
        return replace(
            self,
            base=self.base if is_near else flags.base or self.base,
            scaling=self.scaling.flagged(flags, is_near=is_near),
            divisors=divisors,
        )


NO_ROPE = RopeSpec(n_rot=0, base=1.0, neox=False, divisors="")
