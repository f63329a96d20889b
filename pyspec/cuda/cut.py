"""Where gated activations are cut. A limit c > 0: gates at c before silu, ups at plus and minus c; -c: silu(gates) and ups alike; 0: nowhere.

silu rises beyond its minimum, which is negative, so that cutting it at c is cutting its argument where it is c.
"""

from __future__ import annotations

import math

from torch import Tensor


def bounds(limit: float) -> tuple[float, float]:
    """Of gates before silu, from above, and of ups, from both sides; zeros: none."""
    if limit >= 0:
        return limit, limit
    most = gate = -limit
    for _ in range(20):  # gate = c (1 + e^-gate), whose slope is flat beyond the root
        share = 1 / (1 + math.exp(-gate))
        gate -= (gate * share - most) / (share * (1 + gate * (1 - share)))
    return gate, most


def cut_gates(gate: Tensor, up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Gates and ups as activations take them."""
    of_gate, of_up = bounds(limit)
    return (gate.clamp(max=of_gate), up.clamp(-of_up, of_up)) if limit else (gate, up)


def cut_macros(limit: float) -> dict[str, int | str]:
    """Of cut.cuh."""
    of_gate, of_up = bounds(limit)
    return {"LIMIT": f"{of_up!r}f", "GATE_LIMIT": f"{of_gate!r}f"} if limit else {}
