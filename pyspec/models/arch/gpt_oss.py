"""`gpt-oss`: windows in every other block, sinks, one stretched rope, and experts with biases and a gating of their own."""

from __future__ import annotations

from dataclasses import replace

from pyspec.errors import ModelError
from pyspec.gguf import GGUFFile
from pyspec.models.block import BlockSpec, pair
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.moe import Experts
from pyspec.models.model import ModelSpec
from pyspec.models.read import block_count, read_attention, read_decoder, read_rope, read_windows

CHOSEN, UNSET = 3, 0  # expert_gating_func: softmax over the scores of the chosen
LIMIT = 7.0  # of gates and ups; no key says so
PATTERN = 2  # where a file does not say: each second block sees all


def read(file: GGUFFile) -> ModelSpec:
    shape, n_block = read_attention(file), block_count(file)
    rope, experts = read_rope(file, shape, neox=True), _experts(file)
    near = replace(rope, base=file.hparams.number("rope.freq_base_swa", rope.base))

    def block(window: int) -> BlockSpec:
        attention = Attention(shape, near if window else rope, window, biased=True, sinks=True)
        return pair(attention, experts, "post_attention_norm")

    blocks = map(block, read_windows(file, n_block, PATTERN, 0))
    return read_decoder(file, blocks, experts.n_inner, ties_head=False)


def _experts(file: GGUFFile) -> Experts:
    h = file.hparams
    if (func := h.integer("expert_gating_func", CHOSEN)) not in (CHOSEN, UNSET):
        raise ModelError(
            f"{h.key('expert_gating_func')} is {func}; this architecture weighs the chosen by their scores, {CHOSEN}"
        )
    return Experts(
        n_expert=h.integer("expert_count"),
        n_used=h.integer("expert_used_count"),
        n_ff=h.integer("expert_feed_forward_length"),
        router="chosen",
        renorm=False,
        act="swiglu_oai",
        shifted=True,
        limit=LIMIT,
    )
