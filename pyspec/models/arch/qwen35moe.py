"""`qwen35moe` (Qwen3.5, 3.6 with experts): as `qwen35`, and every feed-forward, the MTP block's too, is one of experts.

The router is fixed by the architecture, not by metadata: softmax over all experts, weights of the chosen ones divided by
their sum, no bias. The shared expert has a gate of its own.
"""

from __future__ import annotations

from pyspec.errors import ModelError
from pyspec.gguf import GGUFFile
from pyspec.models.arch.qwen35 import read_hybrid, read_state
from pyspec.models.blocks.gdn import DeltaNet
from pyspec.models.blocks.moe import Experts
from pyspec.models.experts import read_groups
from pyspec.models.model import ModelSpec


def _same(file: GGUFFile, key: str, default: int | None = None) -> int:
    """A number, or one for each block as some writers have it; blocks of different sizes are refused."""
    h = file.hparams
    if default is not None and key not in h:
        return default
    sizes = sorted(set(h.one_or_more(key)))
    if len(sizes) != 1:
        raise ModelError(f"{h.key(key)} has blocks of different sizes: {sizes[:8]}")
    return sizes[0]


def read(file: GGUFFile) -> ModelSpec:
    experts = read_experts(file)
    return read_hybrid(file, experts, experts.n_inner, DeltaNet(read_state(file)))


def read_experts(file: GGUFFile) -> Experts:
    """Experts with a gated shared one."""
    n_used, n_ff = _same(file, "expert_used_count"), _same(file, "feed_forward_length", 0)
    return Experts(
        n_expert=_same(file, "expert_count"),
        n_used=n_used,
        n_ff=_same(file, "expert_feed_forward_length", n_ff // max(n_used, 1)),
        n_ff_shared=_same(file, "expert_shared_feed_forward_length", n_ff),
        groups=read_groups(file),
        shared_gate=True,
    )
