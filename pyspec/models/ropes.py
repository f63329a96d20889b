"""The ropes of a model on a device: they make the angles of a forward, once for each distinct rope."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.config import EngineSettings
from pyspec.cpu.tensors import query_factors, scaled
from pyspec.cuda.ops.angles.op import angles
from pyspec.cuda.ops.angles.ref import AnglesSpec
from pyspec.errors import BadTensors, EngineBug
from pyspec.models.matrices import Embedding
from pyspec.models.rope import RopeFlags, RopeSpec
from pyspec.models.weights import Weights
from pyspec.slots.batch import Batch

Angles = tuple[Tensor, Tensor]
"""cos, sin [row, 1, n_rot/2] f32"""


def flags_of(s: EngineSettings) -> RopeFlags:
    """Those of settings."""
    return RopeFlags(
        kind=s.rope_scaling,
        factor=1 / s.rope_freq_scale if s.rope_freq_scale else s.rope_scale,
        base=s.rope_freq_base,
        n_ctx_orig=s.yarn_orig_ctx,
        ramp=s.yarn_ext_factor,
        length=s.yarn_attn_factor,
        turns=(s.yarn_beta_fast, s.yarn_beta_slow),
        n_ctx=s.ctx,
    )


class Rope:
    """A rope on a device."""

    def __init__(self, spec: RopeSpec, device: torch.device, divisors: Tensor | None = None) -> None:
        scaling, n_rot, base = spec.scaling, spec.n_rot, spec.base
        self.factor, self.length, self.queries = scaling.divisor, scaling.length, spec.queries
        d = torch.arange(0, n_rot, 2, device=device, dtype=torch.float32)
        freq = base ** (-d / n_rot) if spec.turns else torch.zeros_like(d)
        self.freq = freq if divisors is None else freq / divisors
        if scaling.ramp:
            kept = scaling.kept(n_rot, base, device) * scaling.ramp
            self.freq, self.factor = self.freq * (kept + (1 - kept) / scaling.divisor), 1.0
        self.launch = angles.bind(AnglesSpec(device))
        self.axis = None
        if spec.axes:
            of = [spec.axis_of(i) for i in range(n_rot // 2)]
            self.axis = torch.tensor(of, device=device).view(1, 1, 1, -1)

    def angles(self, positions: Tensor) -> Angles:
        """Of positions [row]."""
        return self._lengthened(self.launch(positions, self.freq, self.factor))

    def of(self, batch: Batch) -> Angles:
        """Of the rows of a batch."""
        return self._in_pictures(self.angles(self._positions(batch)), batch)

    def embedded(self, embedding: Embedding, batch: Batch) -> tuple[Tensor, Angles]:
        """The tokens' rows of the embedding, and the angles of a batch, in one launch where a kernel has it."""
        at = self._positions(batch)
        rows, angles = embedding.with_angles(batch.tokens, at, self.freq, self.factor)
        return rows, self._in_pictures(self._lengthened(angles), batch)

    def _positions(self, batch: Batch) -> Tensor:
        return batch.positions if self.axis is None else batch.rope_at

    def _in_pictures(self, angles: Angles, batch: Batch) -> Angles:
        """With those of pictures' rows, each frequency by its own axis."""
        if self.axis is None or (pictures := batch.pictures) is None:
            return angles
        n, is_row = pictures.axes.shape[1], pictures.is_row[..., None]
        own, index = self.angles(pictures.axes.flatten()), self.axis.expand(1, n, 1, -1)
        cos, sin = (x.view(3, n, 1, -1).gather(0, index)[0] for x in own)
        return torch.where(is_row, cos, angles[0]), torch.where(is_row, sin, angles[1])

    def _lengthened(self, angles: Angles) -> Angles:
        if self.length == 1.0:
            return angles
        cos, sin = (scaled(each.flatten(1), self.length).unsqueeze(1) for each in angles)
        return cos, sin


class Ropes:
    """The distinct ropes of a list of blocks, as flags change them. A block keeps its rope's place here, and a forward makes the angles of
    all.

    known: ropes of a model whose blocks these go with; equal ones are shared.
    """

    def __init__(self, weights: Weights, known: Ropes | None = None) -> None:
        self._weights, self._known = weights, {} if known is None else known.bound
        self.bound: dict[RopeSpec, Rope] = {}

    @property
    def flags(self) -> RopeFlags:
        """What changes them."""
        return self._weights.rope

    def place(self, spec: RopeSpec, *, is_near: bool = False) -> int:
        """Where a forward's angles have those of `spec`. is_near: as of `RopeSpec.flagged`"""
        spec = spec.flagged(self._weights.rope, is_near=is_near)
        if spec not in self.bound:
            known = self._known.get(spec)
            self.bound[spec] = bound(spec, self._weights) if known is None else known
        return list(self.bound).index(spec)

    def angles(self, positions: Tensor) -> tuple[Angles, ...]:
        return tuple(rope.angles(positions) for rope in self.bound.values())

    def queries(self, positions: Tensor) -> tuple[Tensor | None, ...]:
        """What each rope's queries are multiplied with, by places [row] f32; None: nothing."""
        found = [rope.queries for rope in self.bound.values()]
        return tuple(
            None if own is None else query_factors(positions, own.scale, own.n_ctx, own.offset)
            for own in found
        )

    def embedded(self, embedding: Embedding, batch: Batch) -> tuple[Tensor, tuple[Angles, ...]]:
        """The first two things of a forward: the rows of the embedding, in pictures those of their encoder, and the angles."""
        if not self.bound:
            return seen_rows(embedding(batch.tokens), batch), ()
        first, *others = self.bound.values()
        rows, angles = first.embedded(embedding, batch)
        return seen_rows(rows, batch), (angles, *(rope.of(batch) for rope in others))


def seen_rows(x: Tensor, batch: Batch) -> Tensor:
    """x [row, n] f32 with the first n numbers of pictures' rows in their places. EngineBug where nobody has sent them."""
    if (pictures := batch.pictures) is None:
        return x
    if pictures.rows is None or pictures.rows.shape[1] < x.shape[1]:
        raise EngineBug(f"pictures without rows of {x.shape[1]} numbers")
    return torch.where(pictures.is_row, pictures.rows[:, : x.shape[1]], x)


def bound(spec: RopeSpec, weights: Weights) -> Rope:
    """BadTensors for divisors that are no positive numbers."""
    divisors = weights.optional(spec.divisors) if spec.divisors else None
    if divisors is not None and not bool(((divisors > 0) & divisors.isfinite()).all()):
        raise BadTensors(f"{spec.divisors} has numbers that are not positive and finite")
    return Rope(spec, weights.device, divisors)
