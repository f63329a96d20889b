"""A gated short convolution (lfm2): one projection to two gates and inputs, a convolution over the slot's window, one projection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from pyspec.cuda import fuse
from pyspec.cuda.ops.rows.op import rows
from pyspec.cuda.ops.rows.ref import PrepKind, RowsSpec
from pyspec.cuda.ops.short_conv.op import short_conv
from pyspec.cuda.ops.short_conv.ref import ShortConvSpec, flush
from pyspec.cuda.ops.short_conv.shape import ShortConvShape
from pyspec.models.cuts import Cut, Units, each_of
from pyspec.models.matrices import sum_of
from pyspec.models.part import Binding, LoadTypes, Pass, Place, Request, column_block
from pyspec.models.wants import Want
from pyspec.slots.memory import STATE
from pyspec.slots.parts import LayerParts, Recurrent


@dataclass(frozen=True, slots=True)
class ShortConv:
    """A gated short convolution as data. block: columns of its last matrix that stand together in the file."""

    shape: ShortConvShape
    block: int = 1
    captures_prompts = False  # not tried
    attends = scratch = None

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
        """As of ReadsBlocks."""
        return replace(self, block=column_block(at, "shortconv.out_proj.weight"))

    def requests(self, at: Place, on: LoadTypes) -> Iterator[Request]:
        yield short_conv, ShortConvSpec(on.device, self.shape)
        if on.streams:
            yield rows, RowsSpec(on.device, at.n_embd, PrepKind.NORM)

    def bind(self, at: Binding) -> BoundShortConv:
        return BoundShortConv(self.shape, at)


class BoundShortConv:
    """A gated short convolution over the slot's window."""

    captures_prompts = False

    def __init__(self, shape: ShortConvShape, at: Binding) -> None:
        w = at.weights
        self.layer, self.norm = at.layer, at.bound_norm()
        self.proj = w.matrix(at.name("shortconv.in_proj.weight"))
        self.out = w.summed(at.name("shortconv.out_proj.weight"))
        self.reads, self.gives = (self.proj, self.norm), sum_of(self.out)
        self.taps = w.vector(at.name("shortconv.conv.weight"))
        spec = ShortConvSpec(w.device, shape)
        self.short_conv, self.capturable = short_conv.bind(spec), short_conv.chosen(spec).capturable
        self.fold = fuse.folder(self.short_conv, flush)

    def __call__(self, x: Tensor, residual: Tensor | None, run: Pass) -> Tensor:
        m = self.proj(x, self.norm)
        y = self.short_conv(m, self.taps, run.memory.states[self.layer], run.batch)
        return self.out(y, residual=residual)
