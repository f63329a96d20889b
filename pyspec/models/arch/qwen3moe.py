"""`qwen3moe` (Qwen3 with experts): as `qwen3`, and every feed-forward is one of experts: softmax over all, renormed, none shared."""

from __future__ import annotations

from pyspec.gguf import GGUFFile
from pyspec.models.blocks.moe import Experts
from pyspec.models.model import ModelSpec
from pyspec.models.read import read_gqa


def read(file: GGUFFile) -> ModelSpec:
    h = file.hparams
    n_used = h.integer("expert_used_count")
    n_ff = h.integer("expert_feed_forward_length", h.integer("feed_forward_length", 0) // max(n_used, 1))
    scale = h.number("expert_weights_scale", 0.0) or 1.0
    experts = Experts(h.integer("expert_count"), n_used, n_ff, scale=scale)
    return read_gqa(file, neox=True, qk_norm=True, feed=experts, n_ff=experts.n_inner)
