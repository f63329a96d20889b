"""A feed-forward without experts in the host's memory: an expert that all rows take."""

from __future__ import annotations

from pyspec.cuda.ops.moe.ref import Act, MoeSpec
from pyspec.forward.call import Value
from pyspec.forward.trace import Forward, Site
from pyspec.models.blocks.mlp import Mlp
from pyspec.models.stacks import stack_of_one
from pyspec.models.wants import scale_of

ACTS: dict[str, Act] = {"silu": "swiglu", "gelu": "geglu", "relu2": "relu2", "situ": "situ"}
"""The names of experts for what `Mlp` calls so."""


def spec_of(mlp: Mlp, at: Site) -> MoeSpec:
    """Of its matrices at this place, none of which is on the card."""
    up, down = at.type_of("ffn_up.weight"), at.type_of("ffn_down.weight")
    gate = up if mlp.act == "relu2" else at.type_of("ffn_gate.weight")
    return MoeSpec(
        at.device,
        1,
        at.n_embd,
        mlp.n_ff,
        ACTS[mlp.act],
        up,
        down,
        any(at.has(scale_of(f"ffn_{x}.weight")) for x in ("gate", "up", "down")),
        n_expert=1,
        limit=mlp.limit,
        gate=None if gate is up else gate,
        biased=mlp.is_biased(at.has),
        slots=0,
        betas=mlp.betas,
    )


def forward(mlp: Mlp, f: Forward, x: Value, stream: Value | None) -> Value:
    """As `Mlp.forward`."""
    n, spec = f.normed(x), spec_of(mlp, f.at)
    stacks = f.read(stack_of_one, "ffn", act=spec.act, biased=spec.biased)
    routes = f.op("one_expert", None, x, shape=(2,))
    return f.add(stream, f.experts(spec, n, routes, None, stacks))
