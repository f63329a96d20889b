"""`qwen35` (Qwen3.5, 3.6, 3.8 dense): Gated DeltaNet layers, every fourth one gated full attention, an MTP block.

Frequencies of the partial rope belong to time, row or column, interleaved, which differ in pictures only. The MTP block counts in `block_count` and is always attention.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspec.cuda.ops.gdn.shape import GdnShape
from pyspec.errors import ModelError
from pyspec.gguf import GGUFFile
from pyspec.models.block import pair
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.gdn import DeltaNet
from pyspec.models.blocks.mlp import Mlp
from pyspec.models.model import ModelSpec
from pyspec.models.part import PartSpec
from pyspec.models.read import read_attention, read_axes, read_decoder, read_rope, trunk_layers

NORM = "post_attention_norm"  # before the feed-forward


def read_state(file: GGUFFile) -> GdnShape:
    h = file.hparams
    dim, n_k = h.integer("ssm.state_size"), h.integer("ssm.group_count")
    n_v, inner = h.integer("ssm.time_step_rank"), h.integer("ssm.inner_size")
    if n_v % n_k or inner != n_v * dim:
        raise ModelError(
            f"state of {n_v} value heads, {n_k} key heads, size {dim} does not give inner size {inner}"
        )
    return GdnShape(n_k, n_v, dim, h.integer("ssm.conv_kernel"), (2 * n_k + n_v) * dim)


def recurrent_layers(file: GGUFFile, n_layer: int) -> Sequence[bool]:
    """Which trunk layers are Gated DeltaNet: the explicit list if the file has it, else the interval rule."""
    h = file.hparams
    if "attention.recurrent_layers" in h:
        return h.flags("attention.recurrent_layers", n_layer, or_more=True)
    every = h.integer("full_attention_interval", 4)
    return [(i + 1) % every != 0 for i in range(n_layer)]


def read(file: GGUFFile) -> ModelSpec:
    n_ff = file.hparams.integer("feed_forward_length")
    return read_hybrid(file, Mlp(n_ff), n_ff, DeltaNet(read_state(file)))


def read_hybrid(
    file: GGUFFile, feed: PartSpec, n_ff: int, mixer: DeltaNet, *, has_axes: bool = True
) -> ModelSpec:
    """A model of this family with any kind of feed-forward, of `n_ff` inner values. has_axes: its rope has sections."""
    shape = read_attention(file, gated=True)
    n_layer, n_nextn = trunk_layers(file)
    rope = read_rope(file, shape, neox=True)
    rope = read_axes(file, rope) if has_axes else rope
    full = pair(Attention(shape, rope, qk_norm=True), feed, NORM)
    recurrent = pair(mixer, feed, NORM)
    blocks = (recurrent if r else full for r in recurrent_layers(file, n_layer))
    return read_decoder(file, blocks, n_ff, n_nextn=n_nextn, mtp_block=full)
