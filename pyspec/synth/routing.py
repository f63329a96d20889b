"""Routing of a random model by one of three curves: which share of a layer's picks falls on its most picked experts (`placement.HITS`).

It is a property of the file, so whatever runs it has that routing. Scores of an expert are normal over the tokens of a text, and as wide as
its share wants: rows of a router are that much longer. Other tokens have other experts only if rows of a layer have little in common, and
blocks add what is common to all; so the embedding is loud beside them, and biases are small.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from statistics import NormalDist

import numpy as np

from pyspec.errors import ConfigError
from pyspec.models.placement import HITS
from pyspec.models.wants import EMBEDDING
from pyspec.synth.dims import Dims
from pyspec.synth.layout import POINTED, Spec

ROUTING = "pyspec.synthetic_routing"
"""The key of a file that says it. `pyspec bench` reports it, and nothing else reads it."""
ROUTER, BIASES = "ffn_gate_inp.weight", ("exp_probs_b.bias", "ffn_gate_inp.bias")
MOST = 0.45  # of a layer's tokens, that pick one expert


def hit_rate(routing: str, share: float) -> float:
    """Share of the picks that fall on this share of the experts, those that are picked most."""
    return float(1.0 - (1.0 - share) ** HITS[routing])


def sizes(n_expert: int, n_used: int, power: int) -> np.ndarray:
    """[expert] f64: the standard deviation of each one's scores beside POINTED, those that are picked most first."""
    usual, rank = n_used / n_expert, (np.arange(n_expert) + 0.5) / n_expert
    shares = np.minimum(usual * power * (1.0 - rank) ** (power - 1), MOST)
    normal = NormalDist()
    least = normal.inv_cdf(1.0 - min(usual, MOST))  # of the scores that are picked
    return np.array([least / normal.inv_cdf(1.0 - share) for share in shares.tolist()])


def routed(dims: Dims, specs: Iterable[Spec], routing: str, seed: int) -> Iterator[Spec]:
    """The tensors with this routing. Errors: ConfigError for a model that can not have it."""
    if routing not in HITS:
        raise ConfigError(f"no routing {routing!r}; known are {', '.join(HITS)}")
    why = (
        "it has no experts" if not dims.n_expert
        else "its embedding is its head" if dims.tied
        else "groups limit its choice" if dims.expert_groups != (1, 1)
        else "a table of tokens chooses in its first layers" if dims.n_hash
        else ""
    )  # fmt: skip
    if why:
        raise ConfigError(f"{dims.name} can not have the routing {routing!r}: {why}")
    found = sizes(dims.n_expert, dims.n_used, HITS[routing])
    for spec in specs:
        name = spec.name.split(".", 2)[-1]
        if name == ROUTER:
            order = np.random.default_rng([seed, zlib.crc32(spec.name.encode()), 1])
            yield replace(spec, gain=POINTED, rows=tuple(order.permutation(found).tolist()))
        elif spec.name == EMBEDDING:  # in the mean of columns 2 * sqrt(n_layer)
            yield replace(spec, gain=(dims.n_embd * dims.n_layer) ** 0.5)
        else:
            most = 0.0 if name in BIASES else 1.0 if spec.kind == "bias" else spec.gain
            yield replace(spec, gain=min(spec.gain, most))
