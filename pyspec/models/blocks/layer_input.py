"""A part that lets a block's own input of each token (`per_layer.py`) into the stream: proj(gelu(gate x) * input)."""

from __future__ import annotations

from dataclasses import dataclass

from pyspec.cuda.ops.norms.spec import NormsSpec
from pyspec.forward.call import RunInput, Value, Weight
from pyspec.forward.trace import Forward
from pyspec.models.part import Place, Plain
from pyspec.models.per_layer import NORM, PRODUCT, PerLayer
from pyspec.models.wants import TOKEN_INPUTS, Want


@dataclass(frozen=True, slots=True)
class LayerInput(Plain):
    """Of block `layer`, which has `n` numbers a token. It reads the stream as it is."""

    layer: int
    n: int

    def tensors(self, at: Place) -> dict[str, Want]:
        return {
            at.name("inp_gate.weight"): Want((self.n, at.n_embd)),
            at.name("proj.weight"): Want((at.n_embd, self.n)),
        }

    def share(self, n: int) -> LayerInput:
        """All of it: it is small."""
        return self

    def forward(self, f: Forward, x: Value, stream: Value | None) -> Value:
        gate = f.product(x, "inp_gate.weight", n_out=self.n)
        y = f.gate_times(gate, RunInput("inputs", self.layer), "gelu", self.n)
        return f.add(stream, f.product(y, "proj.weight", n_out=x.width))


def layer_inputs(of: PerLayer, f: Forward, x: Value) -> Value:
    """The inputs of all blocks [row, n_layer, n], of rows x [row, n_embd] of the embedding."""
    shape, table = (of.n_layer, of.n), Weight("embedding", (TOKEN_INPUTS,), (("factor", of.n**0.5),))
    each = f".view(-1, {of.n})"
    of_stream = f.scaled(f.product(x, PRODUCT, n_out=of.width), of.n_embd**-0.5)
    spec, of_stream = NormsSpec(f.device, of.n, of.eps), f.view(of_stream, each, shape)
    of_stream = f.op("norms", spec, of_stream, f.vector(NORM), shape=shape)
    of_tokens = f.op("embedding", table, RunInput("tokens"), shape=(of.width,))
    both = f.scaled(f.add(of_stream, f.view(of_tokens, each, shape)), 0.5**0.5)
    return f.view(both, f".view(-1, {of.n_layer}, {of.n})", shape)
