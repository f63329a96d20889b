"""A DFlash file: its configuration, its manifest, and the checks against a target.

GGUF of llama.cpp (`dflash`) and of forks (`dflash-draft`: other names, taps stored without the +1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from pyspec.errors import ModelError, PairError
from pyspec.gguf import GGUFFile
from pyspec.models.block import BlockSpec, Part
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.mlp import Mlp
from pyspec.models.cuts import each_of
from pyspec.models.model import ModelSpec
from pyspec.models.own_vocabulary import check_own
from pyspec.models.part import AttentionShape, Place, column_block
from pyspec.models.read import attention_shape, block_count, check_rope
from pyspec.models.rope import RopeSpec, read_scaling
from pyspec.models.wants import Want
from pyspec.models.weight_bytes import row_bytes
from pyspec.ranges import Real

FORK = "dflash-draft"
ARCHS = ("dflash", FORK)
SELECTOR, CONVOLUTION, MARKOV = "selector_hidden.weight", "blk.0.attn_conv_base", "markov_w1.weight"


@dataclass(frozen=True, kw_only=True)
class DFlashConfig:
    """The configuration of a drafter.

    block   rows of the block that it was trained with
    n_trained  tokens of a context that it was trained for; 0: the file does not say
    taps    0-based target layers whose outputs are read
    windows  of each layer; 0: it sees all
    causal  of each layer: rows do not see those behind them in the block
    ff_block  columns of `ffn_down` that stand together in the file, the most of all layers
    """

    n_embd: int
    n_ff: int
    attention: AttentionShape
    eps: float
    rope: RopeSpec
    block: int
    n_trained: int
    mask_id: int
    taps: tuple[int, ...]
    windows: tuple[int, ...]
    causal: tuple[bool, ...]
    alias: Mapping[str, str]
    ff_block: int = 1

    @property
    def most(self) -> int:
        """Tokens that a block drafts at most."""
        return self.block - 1

    @property
    def adds_scores(self) -> str:
        """Why drafts need the target's logits and not only the best tokens; "": they do not."""
        return ""

    @property
    def divides(self) -> bool:
        """Whether `share` is known: ranks can divide its layers."""
        return True

    @property
    def tells_in_parts(self) -> bool:
        """Whether it gives its drafts' probabilities where each rank has a part of the logits."""
        return False

    @property
    def blocks(self) -> tuple[BlockSpec, ...]:
        """Its layers."""
        feed = Part("ffn_norm", Mlp(self.n_ff, block=self.ff_block))
        return tuple(BlockSpec((Part("attn_norm", mixer), feed)) for mixer in self.mixers)

    @property
    def mixers(self) -> tuple[Attention, ...]:
        """The attention of each layer."""
        return tuple(
            Attention(self.attention, self.rope, window, qk_norm=True) for window in self.windows
        )

    def share(self, n: int) -> Self:
        """The drafter of each of `n` ranks: a share of the heads and inner values of every layer."""
        if n == 1:
            return self
        n_ff = each_of(self.n_ff, n, self.ff_block)
        return replace(self, attention=self.attention.share(n), n_ff=n_ff)

    @property
    def row_bytes(self) -> int:
        """Of a row of a forward."""
        return row_bytes(self.n_ff, self.n_embd)

    def place(self, file: GGUFFile, i: int) -> Place:
        """Of layer `i`."""
        return Place(file, f"blk.{i}", self.n_embd, self.eps)

    def layer_tensors(self, file: GGUFFile) -> dict[str, Want]:
        """The manifest of its layers. Keys and values are made of taps, too: they have matrices of their own beside a fused one."""
        wants: dict[str, Want] = {}
        for i, (block, mixer) in enumerate(zip(self.blocks, self.mixers, strict=True)):
            at = self.place(file, i)
            wants |= block.tensors(at) | mixer.matrices(at)
        return wants


def _layers(file: GGUFFile, n_layer: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Window and causality per layer."""
    h = file.hparams
    window = h.integer("attention.sliding_window", 0)
    pattern = [window > 0] * n_layer
    has_pattern = "attention.sliding_window_pattern" in h
    if has_pattern:
        pattern = h.flags("attention.sliding_window_pattern", n_layer)
        if any(pattern) and window < 1:
            raise ModelError(f"{h.key('attention.sliding_window')} is {window}, but some layers slide")
    causal = [slides and has_pattern for slides in pattern]
    # The forks always write false and do not mean it
    if file.architecture != FORK and "attention.causal" in h:
        causal = [h.flag("attention.causal", False)] * n_layer
    return tuple(window if slides else 0 for slides in pattern), tuple(causal)


def _aliases(file: GGUFFile, n_layer: int) -> dict[str, str]:
    """The forks' tensor names. Their post_attention_norm is the norm before the feed-forward."""
    if file.architecture != FORK:
        return {}
    names = {"fc.weight": "dflash_fc.weight", "enc.output_norm.weight": "dflash_hidden_norm.weight"}
    if "blk.0.ffn_norm.weight" not in file.tensors:
        names |= {
            f"blk.{i}.ffn_norm.weight": f"blk.{i}.post_attention_norm.weight" for i in range(n_layer)
        }
    return names


def _refuse_relatives(file: GGUFFile) -> None:
    """Refuse files of this architecture that are for other drafters."""
    for tensor, what, kind in (
        (SELECTOR, "DFlash2 (candidate selector)", "dflash2"),
        (CONVOLUTION, "DFlash2 (convolutions)", "dflash2"),
        (MARKOV, "DSpark (Markov head)", "dspark"),
    ):
        if tensor in file.tensors:
            raise PairError(f"the drafter is {what}: --spec-type {kind}, not dflash")


def _refuse_parts(file: GGUFFile) -> None:
    """Refuse layers with parts that are not known: their tensors would only be warned of, and drafts would be wrong."""
    for tensor, what in (
        ("blk.0.layer_output_scale.weight", "layer scales"),
        ("blk.0.post_ffw_norm.weight", "output norms"),
    ):
        if tensor in file.tensors:
            raise PairError(f"the drafter has {what}, which are not supported; plain layers are")
    h = file.hparams
    for key in ("embedding_scale", "attention.value_scale"):
        if (scale := h.number(key, 1.0, legal=Real(-1e6, 1e6))) != 1.0:
            raise PairError(f"{h.key(key)} of the drafter is {scale:g}; 1 is supported")
    if (act := h.label("hidden_activation", "silu", max_chars=64)) != "silu":
        raise PairError(f"the drafter's activation is {act}; silu is supported")


def check_is_dflash(file: GGUFFile, what: str, tensors: tuple[str, ...] = ()) -> None:
    """Refuse a file that is none of the architecture, or that has none of the tensors that make it `what`."""
    if file.architecture not in ARCHS:
        raise PairError(f"a {what} drafter is of architecture dflash; this file is {file.architecture}")
    if tensors and not any(name in file.tensors for name in tensors):
        raise PairError(
            f"a {what} drafter has {tensors[0]}; this file has not: --spec-type dflash or auto"
        )


def read_config(file: GGUFFile) -> DFlashConfig:
    """The configuration of a drafter with plain blocks; PairError with the kind of drafter that it is, if it is another one."""
    check_is_dflash(file, "DFlash")
    _refuse_relatives(file)
    return read_layers(file)


def read_layers(file: GGUFFile) -> DFlashConfig:
    """The configuration that all drafters of this architecture share."""
    _refuse_parts(file)
    h = file.hparams
    is_fork = file.architecture == FORK
    n_layer = block_count(file)
    attention = attention_shape(
        file, h.integer("attention.head_count"), h.integer("attention.head_count_kv")
    )
    n_rot = h.integer("rope.dimension_count", attention.head_dim)
    check_rope(n_rot, attention.head_dim)
    windows, causal = _layers(file, n_layer)
    stored = h.integers("dflash.target_layer_ids" if is_fork else "target_layers")
    return DFlashConfig(
        n_embd=h.integer("embedding_length"),
        n_ff=h.integer("feed_forward_length"),
        attention=attention,
        eps=h.number("attention.layer_norm_rms_epsilon"),
        rope=RopeSpec(n_rot, h.number("rope.freq_base"), True, read_scaling(file)),
        block=h.integer("dflash.block_size" if is_fork else "block_size", 16),
        n_trained=h.integer("context_length", 0),
        mask_id=h.integer("dflash.mask_token_id")
        if is_fork
        else file.fields.integer("tokenizer.ggml.mask_token_id"),
        taps=tuple(stored if is_fork else (x - 1 for x in stored)),
        windows=windows,
        causal=causal,
        alias=_aliases(file, n_layer),
        ff_block=max(
            column_block(Place(file, f"blk.{i}", 0, 0.0), "ffn_down.weight") for i in range(n_layer)
        ),
    )


def drafter_tensors(c: DFlashConfig, file: GGUFFile, n_target: int) -> dict[str, Want]:
    """The manifest; `n_target` is the target's hidden size. An embedding and a head of its own have rows of the file's choice."""
    n = c.n_embd
    wants = {
        "fc.weight": Want((n, len(c.taps) * n_target)),
        "enc.output_norm.weight": Want((n,)),
        "output_norm.weight": Want((n,)),
    }
    for name in ("token_embd.weight", "output.weight"):
        if name in file.tensors:
            wants[name] = Want((file.tensors[name].shape[0], n))
    return wants | c.layer_tensors(file)


def check_pair(c: DFlashConfig, file: GGUFFile, target: ModelSpec) -> None:
    """Refuse a drafter that was made for another target, with the numbers that differ."""
    own = "token_embd.weight" in file.tensors and "output.weight" in file.tensors
    if not own and c.n_embd != target.n_embd:
        raise PairError(
            f"the drafter has hidden size {c.n_embd}, the target {target.n_embd}: it can not share its embedding"
        )
    if not c.taps or len(c.taps) > target.n_layer or any(not 0 <= t < target.n_layer for t in c.taps):
        raise PairError(
            f"the drafter taps layers {list(c.taps[:8])}; the target has layers 0..{target.n_layer - 1}"
        )
    fc = file.tensors.get(c.alias.get("fc.weight", "fc.weight"))
    if fc is not None and fc.shape[-1] != len(c.taps) * target.n_embd:
        raise PairError(
            f"the drafter reads {fc.shape[-1]} features; {len(c.taps)} taps of the target give "
            f"{len(c.taps) * target.n_embd}"
        )
    if not 0 <= c.mask_id < target.n_vocab:
        raise PairError(
            f"the drafter's mask token is {c.mask_id}; the target has {target.n_vocab} tokens"
        )
    check_own(file, target.n_vocab)
