"""A gated short convolution (lfm2): one projection to two gates and inputs, a convolution over the slot's window, one projection."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pyspec.cuda.ops.short_conv.ref import ShortConvSpec, flush
from pyspec.cuda.ops.short_conv.shape import ShortConvShape
from pyspec.forward.call import Value
from pyspec.forward.trace import Forward
from pyspec.models.cuts import Cut, Units, each_of
from pyspec.models.part import Place, Plain, column_block
from pyspec.models.wants import Want
from pyspec.slots.parts import STATE, LayerParts, Recurrent


@dataclass(frozen=True, slots=True)
class ShortConv(Plain):
    """A gated short convolution as data. block: columns of its last matrix that stand together in the file."""

    shape: ShortConvShape
    block: int = 1
    folds = "short_conv", flush

    def tensors(self, at: Place) -> dict[str, Want]:
        s, n = self.shape, at.n_embd
        own = Units(s.n_channel, "channels of the convolution", block=self.block)
        return {
            at.name("shortconv.in_proj.weight"): Want((3 * s.n_channel, n), cut=Cut(0, (own,) * 3)),
            at.name("shortconv.conv.weight"): Want((s.n_channel, s.n_conv), cut=Cut(0, (own,))),
            at.name("shortconv.out_proj.weight"): Want((n, s.n_channel), cut=Cut(1, (own,))),
        }

    def memory(self) -> LayerParts:
        return {STATE: Recurrent(self.shape)}

    def share(self, n: int) -> ShortConv:
        return replace(self, shape=self.shape.of_channels(each_of(self.shape.n_channel, n, self.block)))

    def of_file(self, at: Place) -> ShortConv:
        """See `PartSpec.of_file`."""
        return replace(self, block=column_block(at, "shortconv.out_proj.weight"))

    def forward(self, f: Forward, x: Value, stream: Value | None) -> Value:
        n, spec = self.shape.n_channel, ShortConvSpec(f.device, self.shape)
        m = f.product(f.normed(x), "shortconv.in_proj.weight", n_out=3 * n)
        taps = f.vector("shortconv.conv.weight")
        y = f.op("short_conv", spec, m, taps, f.state, f.batch, shape=(n,))
        return f.summed(y, "shortconv.out_proj.weight", x.width, stream)
