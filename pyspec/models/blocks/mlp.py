"""A dense feed-forward: gated, or of one matrix and relu^2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Literal

from pyspec.forward.call import Value
from pyspec.forward.trace import Forward
from pyspec.models.cuts import Cut, Units, each_of
from pyspec.models.part import Place, Plain, column_block
from pyspec.models.wants import Want

Act = Literal["silu", "gelu", "relu2", "situ"]


@dataclass(frozen=True, slots=True)
class Mlp(Plain):
    """A feed-forward of `n_ff` inner values, as data.

    silu, gelu  down(act(gate n) * up n), gelu by its tanh form, with biases where the file has them
    situ        of `betas` (`Forward.situ`)
    relu2       down(relu(up n)^2), biases where the file has them
    block       columns of `ffn_down` that stand together in the file: ranks get whole ones
    limit       of silu's gates and ups (`cuda/cut.py`)
    """

    n_ff: int
    act: Act = "silu"
    block: int = 1
    limit: float = 0.0
    betas: tuple[float, float] = (0.0, 0.0)

    def tensors(self, at: Place) -> dict[str, Want]:
        n, f, inner = at.n_embd, self.n_ff, (Units(self.n_ff, "inner values", block=self.block),)
        up, down = Want((f, n), cut=Cut(0, inner)), Want((n, f), cut=Cut(1, inner))
        named = {f"ffn_{x}.weight": up for x in self.inner} | {"ffn_down.weight": down}
        if self.may_be_biased:
            bias = Want((f,), optional=True, cut=Cut(0, inner))
            named |= {f"ffn_{x}.bias": bias for x in self.inner}
            named["ffn_down.bias"] = Want((n,), optional=True)
        return {at.name(name): want for name, want in named.items()}

    @property
    def inner(self) -> tuple[str, ...]:
        """The matrices before the activation."""
        return ("up",) if self.act == "relu2" else ("gate", "up")

    @property
    def may_be_biased(self) -> bool:
        return self.act != "situ" and not self.limit

    def is_biased(self, has: Callable[[str], bool]) -> bool:
        """has: whether the file has a tensor of that name."""
        return self.may_be_biased and any(has(f"ffn_{x}.bias") for x in (*self.inner, "down"))

    def share(self, n: int) -> Mlp:
        return replace(self, n_ff=each_of(self.n_ff, n, self.block))

    def of_file(self, at: Place) -> Mlp:
        """See `PartSpec.of_file`."""
        return replace(self, block=column_block(at, "ffn_down.weight"))

    def forward(self, f: Forward, x: Value, stream: Value | None) -> Value:
        if f.at.away:  # by name, because experts come with it
            made: Value = import_module("pyspec.models.blocks.one_expert").forward(self, f, x, stream)
            return made
        n = f.normed(x)
        if self.act != "relu2":
            names = "ffn_gate.weight", "ffn_up.weight"
            if self.act == "situ":
                y = f.situ(n, *names, self.n_ff, self.betas)
                return f.summed(y, "ffn_down.weight", x.width, stream)
            if not self.is_biased(f.at.has):
                y = f.gated(n, *names, self.act, self.n_ff, limit=self.limit)
                return f.summed(y, "ffn_down.weight", x.width, stream)
            both = f.split(f.product(n, *names, n_out=2 * self.n_ff), (self.n_ff, self.n_ff))
            g, u = (
                f.biased(y, f.optional(f"ffn_{x}.bias")) for x, y in zip(self.inner, both, strict=True)
            )
            y = f.gate_times(g, u, self.act, self.n_ff)
        else:
            y = f.product(n, "ffn_up.weight", n_out=self.n_ff)
            y = f.relu2(f.biased(y, f.optional("ffn_up.bias")))
        y = f.summed(y, "ffn_down.weight", x.width, stream)
        return f.biased(y, f.optional("ffn_down.bias"))
