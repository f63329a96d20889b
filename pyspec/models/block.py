"""A block: parts in order. Each reads the normed residual stream and adds its output to the stream, or stands between several streams."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pyspec.forward.call import Value
from pyspec.forward.trace import Forward
from pyspec.models.part import AttentionShape, PartSpec, Place
from pyspec.models.wants import Want
from pyspec.slots.parts import LayerParts


@dataclass(frozen=True, slots=True)
class Mix:
    """The coefficients of a part among `n` streams: its share of each as it reads them, and the way that they go on (op `streams`). name: as a norm's."""

    name: str
    n: int

    def tensors(self, at: Place) -> dict[str, Want]:
        return mix_tensors(at.name(self.name), self.n * at.n_embd, (2 + self.n) * self.n, 3)


def mix_tensors(name: str, n_in: int, n_out: int, n_scale: int) -> dict[str, Want]:
    """Wanted tensors of `n_out` coefficients."""
    shapes = {"fn": (n_out, n_in), "base": (n_out,), "scale": (n_scale,)}
    return {f"{name}_{x}.weight": Want(shape) for x, shape in shapes.items()}


@dataclass(frozen=True, slots=True)
class NormKind:
    """How rows are normed, if not by RMSNorm over all columns.

    takes_mean  LayerNorm without a bias
    n_slice     RMSNorm of each of so many slices, times weights of all columns
    """

    takes_mean: bool = False
    n_slice: int = 1


RMS, LAYER = NormKind(), NormKind(takes_mean=True)


@dataclass(frozen=True, slots=True)
class Part:
    """x + f spec(norm(x)), or x + f post(spec(norm(x))). norm, post: GGUF names without prefix and ending; "": none.

    mix     for a model of several streams
    factor  f, of what the part adds to the stream
    post_eps  of the norm `post`; 0.0: the model's
    kind    of the norm before it
    bank    a `bank.Bank`: it reads the stream mixed with rows that were kept of it; None: as it is
    """

    norm: str
    spec: PartSpec
    post: str = ""
    mix: Mix | None = None
    factor: float = 1.0
    post_eps: float = 0.0
    kind: NormKind = RMS
    bank: Any = None

    def forward(self, f: Forward, x: Value, stream: Value | None) -> Value:
        """`PartSpec.forward` behind its norm."""
        if self.kind == RMS:
            return self.spec.forward(f.behind(self.norm), x, stream)
        norm = f"{self.norm}.weight"
        if self.kind.takes_mean:
            n = f.norm_apart(x, f.vector(norm), takes_mean=True)
        else:
            n = f.slice_norm(x, norm, n_slice=self.kind.n_slice)
        return self.spec.forward(f.behind(""), n, stream)

    def alone(self, f: Forward, x: Value) -> Value:
        """What it adds to a stream."""
        y = self.forward(f, x, None)
        if self.post:
            y = f.norm_apart(y, f.vector(f"{self.post}.weight"), eps=self.post_eps)
        return f.scaled(y, self.factor)

    @property
    def norms(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.norm, self.post)))


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """A block as data.

    scale     the tensor with one number that the stream behind it is multiplied with, where the file has it; "": none
    n_stream  streams that its rows have side by side
    bank      a `bank.Bank` that mixes the stream behind all parts; None: none
    """

    parts: tuple[Part, ...]
    scale: str = ""
    n_stream: int = 1
    bank: Any = None

    @property
    def specs(self) -> tuple[PartSpec, ...]:
        return tuple(part.spec for part in self.parts)

    @property
    def attention(self) -> tuple[AttentionShape, ...]:
        """Shapes of its attentions."""
        return tuple(spec.attends for spec in self.specs if spec.attends is not None)

    def tensors(self, at: Place) -> dict[str, Want]:
        """Every tensor that it needs."""
        wants: dict[str, Want] = {}
        for part in self.parts:
            wants |= {at.name(f"{norm}.weight"): Want((at.n_embd,)) for norm in part.norms}
            wants |= part.spec.tensors(at)
            wants |= {} if part.mix is None else part.mix.tensors(at)
            wants |= {} if part.bank is None else part.bank.tensors(at)
        wants |= {} if self.bank is None else self.bank.tensors(at)
        return wants | ({at.name(self.scale): Want((1,), optional=True)} if self.scale else {})

    def memory(self) -> LayerParts:
        """Its memory for the slots."""
        return {name: kept for spec in self.specs for name, kept in spec.memory().items()}

    def share(self, n: int) -> BlockSpec:
        """The block of each of `n` ranks."""
        parts = tuple(replace(part, spec=part.spec.share(n)) for part in self.parts)
        return replace(self, parts=parts)

    def of_file(self, at: Place) -> BlockSpec:
        """The block with the sizes of blocks of this file's types, where shares depend on them."""
        parts = tuple(replace(part, spec=part.spec.of_file(at)) for part in self.parts)
        return self if parts == self.parts else replace(self, parts=parts)

    def forward(self, f: Forward, x: Value) -> Value:
        """The stream x [row, n_stream * n_embd] behind the block."""
        for part in self.parts:
            adds = not part.post and part.factor == 1.0
            y = x if part.bank is None else part.bank.forward(f, x)
            if part.bank is not None and part.bank.restarts:
                part.bank.keep(f, x)
                x = part.alone(f, y)
            else:
                x = part.forward(f, y, x) if adds else f.add(x, part.alone(f, y))
        if self.bank is not None:
            x = self.bank.forward(f, x)
        if self.scale and f.at.has(self.scale):
            x = f.scaled(x, f.read(_number, self.scale))
        return x


def pair(mixer: PartSpec, feed: PartSpec, norm: str = "ffn_norm") -> BlockSpec:
    """A block of a mixer and a feed-forward. norm: the one before the feed-forward."""
    return BlockSpec((Part("attn_norm", mixer), Part(norm, feed)))


def _number(w: Any, name: str) -> float:
    return float(w.vector(name).item())
