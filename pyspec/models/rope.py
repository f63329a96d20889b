"""Rotary embedding as a value of each attention, and its angles, made once a forward for each distinct value."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyspec.cpu.tensors import scaled
from pyspec.cuda.ops.angles.op import angles
from pyspec.cuda.ops.angles.ref import AnglesSpec
from pyspec.models.rope_scaling import NOT_STRETCHED, RopeScaling
from pyspec.models.wants import Want
from pyspec.models.weights import Embedding, Weights

DIVISORS = "rope_freqs.weight"  # llama 3's

Angles = tuple[Tensor, Tensor]
"""cos, sin [row, 1, n_rot/2] f32"""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotation of a head's first `n_rot` dimensions.

    neox      pairs (d, d + n_rot/2); otherwise adjacent pairs (2d, 2d + 1), as llama's converter permutes them
    scaling   how the file stretches it
    divisors  the tensor [n_rot/2] f32 that divides the frequencies, where the file has it; "" for none
    """

    n_rot: int
    base: float
    neox: bool
    scaling: RopeScaling = NOT_STRETCHED
    divisors: str = DIVISORS

    def tensors(self) -> dict[str, Want]:
        return {self.divisors: Want((self.n_rot // 2,), optional=True)} if self.divisors else {}

    def bind(self, weights: Weights) -> Rope:
        return Rope(self, weights.device, weights.optional(self.divisors) if self.divisors else None)


class Rope:
    """A rope on a device."""

    def __init__(self, spec: RopeSpec, device: torch.device, divisors: Tensor | None = None) -> None:
        scaling, n_rot, base = spec.scaling, spec.n_rot, spec.base
        self.factor, self.length = scaling.factor, scaling.length
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

    def embedded(self, embedding: Embedding, tokens: Tensor, positions: Tensor) -> tuple[Tensor, tuple[Angles, ...]]:
        """The first two things of a forward: the tokens' rows of the embedding, and the angles of their positions."""
        if not self.bound:
            return embedding(tokens), ()
        first, *others = self.bound.values()
        rows, angles = first.embedded(embedding, tokens, positions)
        return rows, (angles, *(rope.angles(positions) for rope in others))
