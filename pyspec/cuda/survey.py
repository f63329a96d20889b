"""What runs on this machine: for each op and shape the implementation that is chosen, and why others are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from pyspec.cuda import registry
from pyspec.cuda.op import Op
from pyspec.slots.kv import name_of

Ask = tuple[Op[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class RefusedImpl:
    impl: str
    reason: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One op in one shape. `own`: what runs is not the torch reference."""

    op: str
    shape: str
    choice: str
    own: bool
    refused: tuple[RefusedImpl, ...]


def standard(device: torch.device) -> list[Ask]:
    """Every op in shapes that models have."""
    return [(op, spec) for op in registry.ops() for spec in op.shapes(device)]


def products(device: torch.device) -> list[Ask]:
    """What a package is compiled for besides: matrices of every packed type with every epilogue."""
    return [(op, spec) for op in registry.every() for spec in op.more_shapes(device)]


def asked() -> list[Ask]:
    """What was decided so far for what this thread wants ops to run as: after a load, everything the model and its drafter run with."""
    return [(op, spec) for op in registry.ops() for spec in op.decided]


def findings(asks: Iterable[Ask]) -> list[Finding]:
    """Have each checked, as a load does, and tell what came of it."""
    out = []
    for op, spec in asks:
        chosen = op.chosen(spec)
        refused = []
        for name, why in op.choices(spec):
            if name == chosen.name:
                break
            refused.append(RefusedImpl(name, why or ""))
        out.append(Finding(op.name, shape_of(spec), chosen.name, chosen is not op.reference, tuple(refused)))
    return out


def shape_of(spec: Any) -> str:
    """A spec in words, without its device."""
    parts = []
    for field in dataclasses.fields(spec):
        if not field.repr:  # sizes of one engine, for which nothing is chosen
            continue
        value = getattr(spec, field.name)
        if isinstance(value, Enum):
            parts.append(value.name)
        elif dataclasses.is_dataclass(value):
            parts.append(shape_of(value))
        elif isinstance(value, bool):
            parts += [field.name] * value
        elif isinstance(value, float):
            parts.append(f"{field.name} {value:.4g}")
        elif isinstance(value, torch.dtype):
            parts.append(f"{field.name} {name_of(value)}")
        elif not isinstance(value, torch.device):
            parts.append(f"{field.name} {value}")
    return ", ".join(parts)
