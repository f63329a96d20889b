"""Reading experts, with llama.cpp's rules for absent keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pyspec.cuda.ops.moe.ref import Router
from pyspec.errors import ModelError
from pyspec.gguf import GGUFFile
from pyspec.models.blocks.mlp import Mlp
from pyspec.models.blocks.moe import Experts
from pyspec.models.part import PartSpec

ROUTERS: dict[int, Router] = {1: "softmax", 2: "sigmoid", 4: "sqrtsoftplus"}


def read_groups(file: GGUFFile) -> tuple[int, int]:
    """Groups of experts and the number of them that a row uses; (1, 1) where there are none."""
    h = file.hparams
    n = h.integer("expert_group_count", 0)
    return (n, h.integer("expert_group_used_count", n)) if n > 1 else (1, 1)


def read_router(file: GGUFFile, default: Router) -> Router:
    """How experts are scored; `default` where the file does not say."""
    h = file.hparams
    kind = h.integer("expert_gating_func", 0)
    if kind and kind not in ROUTERS:
        raise ModelError(
            f"{h.key('expert_gating_func')} is {kind}; {', '.join(map(str, ROUTERS))} are supported"
        )
    return ROUTERS.get(kind, default)


def read_experts(file: GGUFFile, router: Router = "softmax", **own: Any) -> Experts:
    """The experts that a file's keys describe. router, own: fields of `Experts` that the architecture fixes."""
    h = file.hparams
    read = {
        "n_expert": h.integer("expert_count"),
        "n_used": h.integer("expert_used_count"),
        "router": router,
        "groups": read_groups(file),
    }
    if "n_ff" not in own:
        width = _width(file, "ffn_down_exps.weight", -1) or h.integer("feed_forward_length", 0)
        read["n_ff"] = h.integer("expert_feed_forward_length", width)
    return Experts(**{**read, **own})


def read_routed(file: GGUFFile, router: Router = "softmax", **own: Any) -> Experts:
    """Experts beside a shared one, whose scores and weights are as the file says. router: where it does not; own: as of `read_experts`."""
    h = file.hparams
    read = {
        "n_ff_shared": shared_width(file),
        "renorm": h.flag("expert_weights_norm", False),
        "scale": h.number("expert_weights_scale", 0.0) or 1.0,
    }
    return read_experts(file, read_router(file, router), **{**read, **own})


def shared_width(file: GGUFFile) -> int:
    """Inner values of the shared expert: as many as the file has. Of several, which are one in files, architectures name them in several ways:
    by a key of one's or of all, or by their count."""
    if found := _width(file, "ffn_up_shexp.weight", 0):
        return found
    h = file.hparams
    count = h.integer("expert_shared_count", 0)
    return h.integer(
        "expert_shared_feed_forward_length", h.integer("expert_feed_forward_length", 0) * count
    )


def _width(file: GGUFFile, name: str, axis: int) -> int:
    """The size of the first block's tensor of that name; 0: no block has it."""
    found = (info for each, info in file.tensors.items() if each.endswith(f".{name}"))
    return next((info.shape[axis] for info in found), 0)


def feeds(file: GGUFFile, n_layer: int, experts: Experts) -> Sequence[PartSpec]:
    """The feed-forward of each block: dense ones first, as many as the file says."""
    h = file.hparams
    n_dense = h.integer("leading_dense_block_count", 0)
    dense = Mlp(h.integer("feed_forward_length")) if n_dense else experts
    return [dense if i < n_dense else experts for i in range(n_layer)]


def cut_behind_silu(feed: PartSpec, limits: tuple[float, float]) -> PartSpec:
    """A feed-forward whose activations are cut behind silu, those of experts and of others; 0: nowhere."""
    own, shared = limits
    return cut(feed, (-own, -shared))


def cut(feed: PartSpec, limits: tuple[float, float]) -> PartSpec:
    """A feed-forward whose gates and ups are cut, those of experts and of others; 0: nowhere."""
    own, shared = limits
    if isinstance(feed, Mlp):
        return replace(feed, limit=shared)
    assert isinstance(feed, Experts)
    return replace(feed, limit=own, limit_shared=shared)
