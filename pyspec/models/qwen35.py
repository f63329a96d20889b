"""`qwen35` (Qwen3.5, 3.6, 3.8 dense): Gated DeltaNet layers, every fourth one gated full attention, an MTP block.

Text uses one position per token, so the file's interleaved rope sections reduce to plain partial rope; the key must be
there all the same. The MTP block counts in `block_count` and is always attention.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspec.cuda.ops.gdn.shape import GdnShape
from pyspec.errors import ModelError
from pyspec.gguf import GGUFFile
from pyspec.models.decoder import DecoderConfig, Layer, read_attention, rope_factor, vocab_size
from pyspec.models.moe import MoeShape

NORM = "post_attention_norm"  # before the feed-forward


def read_state(file: GGUFFile) -> GdnShape:
    a = file.architecture
    dim, n_k = file.get_int(f"{a}.ssm.state_size"), file.get_int(f"{a}.ssm.group_count")
    n_v, inner = file.get_int(f"{a}.ssm.time_step_rank"), file.get_int(f"{a}.ssm.inner_size")
    if dim < 1 or n_k < 1 or n_v < 1 or n_v % n_k or inner != n_v * dim:
        raise ModelError(f"state of {n_v} value heads, {n_k} key heads, size {dim} does not give inner size {inner}")
    return GdnShape(n_k, n_v, dim, file.get_int(f"{a}.ssm.conv_kernel"), (2 * n_k + n_v) * dim)


def recurrent_layers(file: GGUFFile, n_layer: int) -> Sequence[bool]:
    """Which trunk layers are Gated DeltaNet: the explicit list if the file has it, else the interval rule."""
    a = file.architecture
    if f"{a}.attention.recurrent_layers" in file.metadata:
        flags = [bool(x) for x in file.get_numbers(f"{a}.attention.recurrent_layers")]
        if len(flags) < n_layer:
            raise ModelError(f"{a}.attention.recurrent_layers has {len(flags)} entries for {n_layer} layers")
        return flags[:n_layer]
    every = file.get_int(f"{a}.full_attention_interval", 4)
    if every < 1:
        raise ModelError(f"{a}.full_attention_interval is {every}, want at least 1")
    return [(i + 1) % every != 0 for i in range(n_layer)]


def read(file: GGUFFile) -> DecoderConfig:
    return read_hybrid(file, n_ff=file.get_int("qwen35.feed_forward_length"))


def read_hybrid(file: GGUFFile, *, n_ff: int, feed: str = "swiglu", moe: MoeShape | None = None) -> DecoderConfig:
    """The configuration of this family with any kind of feed-forward."""
    a = file.architecture
    attention = read_attention(file, gated=True)
    n_block, n_nextn = file.get_int(f"{a}.block_count"), file.get_int(f"{a}.nextn_predict_layers", 0)
    if not 0 <= n_nextn < n_block:
        raise ModelError(f"{n_nextn} MTP blocks among {n_block} blocks ({a}.nextn_predict_layers, block_count)")
    sections = file.get_numbers(f"{a}.rope.dimension_sections")
    n_rot = file.get_int(f"{a}.rope.dimension_count")
    if 2 * sum(int(x) for x in sections) < n_rot:
        raise ModelError(f"rope sections {[int(x) for x in sections]} cover fewer than {n_rot // 2} frequencies")
    n_layer = n_block - n_nextn
    return DecoderConfig(
        arch=a,
        n_vocab=vocab_size(file),
        n_embd=file.get_int(f"{a}.embedding_length"),
        n_layer=n_layer,
        n_nextn=n_nextn,
        n_ff=n_ff,
        n_ctx_train=file.get_int(f"{a}.context_length"),
        eps=file.get_float(f"{a}.attention.layer_norm_rms_epsilon"),
        attention=attention,
        n_rot=n_rot,
        rope_base=file.get_float(f"{a}.rope.freq_base"),
        rope_factor=rope_factor(file),
        rope_neox=True,
        qk_norm=True,
        layers=tuple(Layer("delta" if r else "attention", feed, NORM, moe) for r in recurrent_layers(file, n_layer)),
        mtp_layer=Layer("attention", feed, NORM, moe),
        state=read_state(file),
    )
