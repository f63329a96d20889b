"""Values of attention that experts make (k2-horizon): each row chooses some, whose values it sums.

All experts' values are made, because they are few and small, and those that the row did not choose are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyspec.cuda.ops.moe.ref import Router, RouteSpec
from pyspec.forward.call import Value
from pyspec.forward.trace import Forward
from pyspec.models.cuts import Cut, Divided
from pyspec.models.part import Place
from pyspec.models.stacks import AS_THEY_ARE, router_of, unchanged
from pyspec.models.wants import Want

STACK, BIAS = "attn_v_exps.weight", "attn_v_gate.bias"


@dataclass(frozen=True, slots=True)
class ValueExperts:
    """Experts of values as data; fields as of `moe.Experts`."""

    n_expert: int
    n_used: int
    router: Router
    renorm: bool
    scale: float

    def tensors(self, at: Place, n_out: int, heads: Divided) -> dict[str, Want]:
        """n_out: numbers of all key heads, which ranks divide."""
        stack = Want((self.n_expert, n_out, at.n_embd), cut=Cut(1, (heads,)))
        return {
            at.name("attn_v_gate.weight"): Want((self.n_expert, at.n_embd)),
            at.name(BIAS): Want((self.n_expert,), optional=True),
            at.name(STACK): stack,
        }

    def forward(self, f: Forward, n: Value, n_out: int) -> Value:
        """Values [row, n_out] of normed rows."""
        own = self.n_expert, self.n_used, self.router, self.renorm, self.scale
        bias = f.optional(BIAS)
        spec = RouteSpec(f.device, n.width, *own, biased=bias is not None, eps=AS_THEY_ARE)
        norm, matrix = f.read(unchanged, n=n.width), f.read(router_of, "attn_v_gate.weight")
        routes = f.op("moe_route", spec, n, norm, matrix, bias, None, shape=(2 * self.n_used,))
        shape = self.n_expert, n.width
        every = f.view(
            f.side_by_side(*(n,) * self.n_expert), f".view(-1, {shape[0]}, {shape[1]})", shape
        )
        y = f.heads(every, STACK, n_out)
        return f.op("of_values", None, y, routes, shape=(n_out,))
