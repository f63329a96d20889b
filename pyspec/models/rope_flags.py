"""llama-server's flags of rope, which take precedence over the keys of a file."""

from __future__ import annotations

from dataclasses import dataclass

from pyspec.config import EngineSettings


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

    @classmethod
    def of(cls, s: EngineSettings) -> RopeFlags:
        """Those of settings."""
        return cls(
            kind=s.rope_scaling,
            factor=1 / s.rope_freq_scale if s.rope_freq_scale else s.rope_scale,
            base=s.rope_freq_base,
            n_ctx_orig=s.yarn_orig_ctx,
            ramp=s.yarn_ext_factor,
            length=s.yarn_attn_factor,
            turns=(s.yarn_beta_fast, s.yarn_beta_slow),
            n_ctx=s.ctx,
        )

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
