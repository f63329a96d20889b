"""The contract of a block's parts: frozen data that says everything about itself, and the part bound to weights.

A part is a mixer (attention, a recurrence) or a feed-forward. Its data gives its tensors, the memory of a slot, a rank's share, the
kernels that binding will ask for, and the bound part. Plans and drafters are folds over this; none of them knows which parts exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from pyspec.cuda import fuse
from pyspec.cuda.op import Op
from pyspec.cuda.ops.rows.ref import Norm
from pyspec.gguf import GGUFFile
from pyspec.models.rope import Angles, Ropes
from pyspec.models.wants import Want
from pyspec.models.weights import Weights
from pyspec.slots.batch import Batch
from pyspec.slots.kv import KvFormat
from pyspec.slots.memory import Memory
from pyspec.slots.parts import LayerParts

Request = tuple[Op[Any, Any], Any]
"""An op and the spec that it is bound with."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of an attention.

    gated  the q projection emits [query | gate] per head; the output is multiplied by sigmoid(gate)
    scale  of scores; None: 1/sqrt(head_dim)
    """

    n_head: int
    n_kv_head: int
    head_dim: int
    gated: bool = False
    scale: float | None = None

    def share(self, n: int) -> AttentionShape:
        """Of each of `n` ranks; with fewer key heads than ranks several ranks have the same one."""
        return AttentionShape(self.n_head // n, max(1, self.n_kv_head // n), self.head_dim, self.gated, self.scale)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a block stands: in a file, behind a prefix (blk.N), in a model of this width and this eps of norms."""

    file: GGUFFile
    prefix: str
    n_embd: int
    eps: float

    def name(self, tensor: str) -> str:
        return f"{self.prefix}.{tensor}"

    def has(self, tensor: str) -> bool:
        return self.name(tensor) in self.file.tensors


@dataclass(frozen=True, slots=True)
class LoadTypes:
    """Choices of a load that kernels depend on.

    kv     types of keys and values
    dense  dtype that matrices are unpacked to; None: they stay packed
    """

    device: torch.device
    kv: KvFormat
    dense: torch.dtype | None

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def streams(self) -> bool:
        """True if kernels read packed matrices, and prepare rows for them."""
        return self.is_cuda and self.dense is None


@dataclass(frozen=True, slots=True)
class Binding:
    """Where a part is bound.

    layer  the number of its memory
    norm   GGUF name of the norm before it, without prefix and ending
    kv     types of keys and values
    """

    weights: Weights
    prefix: str
    layer: int
    norm: str
    n_embd: int
    eps: float
    kv: KvFormat
    ropes: Ropes

    def name(self, tensor: str) -> str:
        return f"{self.prefix}.{tensor}"

    def bound_norm(self) -> Norm:
        return Norm(self.weights.vector(self.name(f"{self.norm}.weight")), self.eps)


@dataclass(frozen=True, slots=True)
class Pass:
    """Arguments of every part of a forward, besides the residual stream. angles: of the model's ropes, by their places."""

    angles: tuple[Angles, ...]
    memory: Memory
    batch: Batch


class PartSpec(Protocol):
    """A mixer or a feed-forward as data.

    captures_prompts  a CUDA graph may hold it in the forward of a prompt that stands alone
    attends           shape of its attention, whose partial sums need room; None: it has none
    """

    @property
    def captures_prompts(self) -> bool: ...
    @property
    def attends(self) -> AttentionShape | None: ...

    def tensors(self, at: Place) -> dict[str, Want]:
        """The tensors it needs, without its norms."""
        ...

    def memory(self) -> LayerParts:
        """Its memory for the slots."""
        ...

    def share(self, n: int) -> Self:
        """The part of each of `n` ranks."""
        ...

    def requests(self, at: Place, on: LoadTypes) -> Iterator[Request]:
        """The ops that binding it asks for, products apart."""
        ...

    def bind(self, at: Binding) -> BoundPart: ...


class BoundPart(Protocol):
    """A part bound to its weights.

    capturable        a CUDA graph may hold it: it looks at no list of the host
    captures_prompts  and one of a prompt that stands alone, too
    reads             the product that reads the stream, and the norm before it, if it begins with these
    gives             the sum of ranks that it ends with, if it does
    fold              folds a slot's records, if it has a recurrence
    """

    @property
    def capturable(self) -> bool: ...
    @property
    def captures_prompts(self) -> bool: ...
    @property
    def reads(self) -> fuse.FirstRead | None: ...
    @property
    def gives(self) -> fuse.GivesSum | None: ...
    @property
    def fold(self) -> fuse.Fold | None: ...

    def __call__(self, x: Tensor, residual: Tensor | None, run: Pass) -> Tensor:
        """The residual stream x [row, n_embd] f32 -> residual + part(norm(x)); without a residual part(norm(x)) alone."""
        ...
