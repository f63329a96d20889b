"""A dense feed-forward: gated, or of one matrix and relu^2."""

from __future__ import annotations

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

    silu, gelu  down(act(gate n) * up n), gelu by its tanh form
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
        if self.act != "relu2":
            named = {"ffn_gate.weight": up, "ffn_up.weight": up, "ffn_down.weight": down}
        else:
            biases = Want((f,), optional=True, cut=Cut(0, inner)), Want((n,), optional=True)
            named = {
                "ffn_up.weight": up,
                "ffn_up.bias": biases[0],
                "ffn_down.weight": down,
                "ffn_down.bias": biases[1],
            }
        return {at.name(name): want for name, want in named.items()}

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
            y = f.gated(n, *names, self.act, self.n_ff, limit=self.limit)
            return f.summed(y, "ffn_down.weight", x.width, stream)
        y = f.product(n, "ffn_up.weight", n_out=self.n_ff)
        y = f.relu2(f.biased(y, f.optional("ffn_up.bias")))
        y = f.summed(y, "ffn_down.weight", x.width, stream)
        return f.biased(y, f.optional("ffn_down.bias"))
