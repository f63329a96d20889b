"""`qwen4exp` (Qwen3.8-Flash-Next): `qwen35moe`'s mixers and experts between several residual streams, with attention over blocks that an indexer
chooses and a table of n-grams.

Streams are read and written by gates of low rank, which stand in place of all norms. Outputs of Gated DeltaNet have gates by a sigmoid.
"""

from __future__ import annotations

from pyspec.cuda.ops.ngrams.ref import MOST_ID, NgramsSpec
from pyspec.errors import ModelError
from pyspec.gguf import GGUFFile
from pyspec.models.arch.qwen35 import read_state, recurrent_layers
from pyspec.models.arch.qwen35moe import read_experts
from pyspec.models.block import BlockSpec, Part
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.gated_part import GatedPart
from pyspec.models.blocks.gdn import DeltaNet
from pyspec.models.blocks.indexed_attention import IndexedAttention
from pyspec.models.blocks.ngram_rows import CPU, NgramRows
from pyspec.models.blocks.sparse_attention import IndexerShape
from pyspec.models.model import ModelSpec
from pyspec.models.part import PartSpec
from pyspec.models.read import (
    read_attention,
    read_axes,
    read_decoder,
    read_rope,
    trunk_layers,
    vocab_size,
)
from pyspec.models.residual import HEAD_MIX, Gates, Residual
from pyspec.models.wants import TOKEN_INPUTS
from pyspec.ranges import Whole


def read(file: GGUFFile) -> ModelSpec:
    experts = read_experts(file)
    n_layer, n_nextn = trunk_layers(file)
    n_block, residual = n_layer + n_nextn, read_residual(file)
    is_recurrent, tables = recurrent_layers(file, n_layer), read_tables(file, n_layer)
    ratios, linear = _ratios(file, n_block), DeltaNet(read_state(file), gate="sigmoid")

    def block(i: int, mixer: PartSpec) -> BlockSpec:
        parts = (
            Part("", GatedPart(mixer, gates)) for gates, mixer in _between(residual, mixer, experts)
        )
        before = (Part("", tables[i]),) if i in tables else ()
        return BlockSpec((*before, *parts), n_stream=residual.n)

    blocks = (
        block(i, linear if is_recurrent[i] else read_mixer(file, ratios[i])) for i in range(n_layer)
    )
    return read_decoder(
        file,
        blocks,
        experts.n_inner,
        n_nextn=n_nextn,
        mtp_block=block(n_layer, read_mixer(file, ratios[n_layer] if n_nextn else 0)),
        residual=residual,
        last_norm="",
    )


def _between(residual: Residual, mixer: PartSpec, experts: PartSpec) -> list[tuple[Gates, PartSpec]]:
    """The parts of a block with their gates."""
    assert residual.gates is not None
    n, low = residual.n, residual.gates.n_low
    return [(Gates("hc_attn", n, low), mixer), (Gates("hc_ffn", n, low), experts)]


def read_residual(file: GGUFFile) -> Residual:
    """Streams side by side."""
    h = file.hparams
    n = h.integer("hyper_connection.count", legal=Whole(2, 64))
    return Residual(n, gates=Gates(HEAD_MIX, n, h.integer("hyper_connection.low_rank")))


def read_mixer(file: GGUFFile, ratio: int) -> PartSpec:
    """Attention over all tokens, or over blocks of `ratio`."""
    h, shape = file.hparams, read_attention(file, gated=True)
    rope = read_axes(file, read_rope(file, shape, neox=True))
    attention = Attention(shape, rope, qk_norm=True)
    if not ratio:
        return attention
    n_head, dim, most = (
        h.integer(f"attention.indexer.{name}") for name in ("head_count", "key_length", "top_k")
    )
    if rope.n_rot > dim:
        raise ModelError(
            f"rope turns {rope.n_rot} dimensions, and keys of the indexer have {dim} ({h.key('attention.indexer.key_length')})"
        )
    if most < ratio:
        raise ModelError(
            f"{h.key('attention.indexer.top_k')} is {most}, less than a block of {ratio} tokens ({h.key('attention.compress_ratios')})"
        )
    return IndexedAttention(attention, IndexerShape(n_head, dim, most // ratio), ratio)


def _ratios(file: GGUFFile, n_block: int) -> list[int]:
    """Tokens of the blocks that each layer's indexer chooses among; 0: it has none."""
    key = "attention.compress_ratios"
    return file.hparams.each(key, n_block) if key in file.hparams else [0] * n_block


def read_tables(file: GGUFFile, n_layer: int) -> dict[int, NgramRows]:
    """The blocks before which rows of n-grams are added: one at most."""
    h = file.hparams
    if "ple.layers" not in h or not (layers := h.one_or_more("ple.layers")):
        return {}
    if len(layers) > 1 or layers[0] >= n_layer:
        raise ModelError(f"{h.key('ple.layers')} is {layers[:8]}; want one of {n_layer} blocks")
    n_gram, n, end = (
        h.integer(name) for name in ("ple.ngram_size", "embedding_length", "ple.eos_token_id")
    )
    n_head = (n_gram - 1) * h.integer("ple.heads_per_ngram")
    width = h.integer("embedding_length_per_layer_input", n // n_head)
    if n_head * width != n:
        raise ModelError(f"{n_head} rows of {width} numbers are gathered for a stream of {n} columns")
    if vocab_size(file) > MOST_ID:
        raise ModelError(f"{vocab_size(file)} tokens are more than the {MOST_ID} that n-grams can have")
    spec = NgramsSpec(
        CPU,
        n_gram,
        tuple(h.integers("ple.layer_multipliers", n_gram, or_more=True)),
        tuple(h.integers("ple.head_vocab_sizes", n_head)),
        tuple(h.integers("ple.head_offsets", n_head)),
        end,
        read_residual(file).n,
        n,
        h.integer("ple.conv_kernel"),
        h.number("attention.layer_norm_rms_epsilon"),
    )
    n_row = max(size + first for size, first in zip(spec.sizes, spec.offsets, strict=True))
    if TOKEN_INPUTS in file.tensors:  # it may have more
        n_row = max(n_row, file.tensors[TOKEN_INPUTS].shape[0])
    return {layers[0]: NgramRows(spec, n_row)}
