"""Dimensions of drafters for a target, as their training codes choose them."""

from __future__ import annotations

from pyspec.errors import ConfigError
from pyspec.synth.shapes import (
    Deepseek4Dims,
    DFlashDims,
    Dims,
    EagleDims,
    GptOss,
    Llama,
    Qwen3,
    Qwen3Moe,
    Qwen35,
    Qwen35Moe,
    StagesDims,
)

EXPERTS = Qwen3Moe | Qwen35Moe | GptOss
KINDS = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark", "eagle3": "EAGLE3"}
"""Kinds of drafters, with the end of their names."""


def made_for(target: Dims, kind: str, *, fork: bool) -> Dims:
    """A drafter of one of KINDS. fork: with the naming of older forks, which have DFlash only. Errors: ConfigError."""
    if kind not in KINDS or (fork and kind != "dflash"):
        raise ConfigError(f"no drafter {kind!r}{' of forks' * fork}; known are {', '.join(KINDS)}")
    if kind == "dspark" and isinstance(target, Deepseek4Dims):
        return stages_of(target)
    return eagle_of(target) if kind == "eagle3" else drafter_of(target, fork=fork, kind=kind)


def eagle_of(target: Dims) -> EagleDims:
    """An EAGLE-3 drafter with the heads and the feed-forward of a dense target: the published shapes for Llama 3 8B, Qwen3 8B, and gpt-oss,
    and for Qwen3.6 27B the one that its training code gives to Qwen3.5 4B. Of targets with experts the width is three times the
    stream's, of gpt-oss six times."""
    n, real, is_dense = target.n_layer, target.n_vocab > 1000, not isinstance(target, EXPERTS)
    alike = isinstance(target, Llama | Qwen3 | Qwen35 | Qwen3Moe | GptOss) or not real
    wide = 6 if isinstance(target, GptOss) else 3
    return EagleDims(
        name=f"{target.name}-{KINDS['eagle3']}",
        n_layer=1,
        n_embd=target.n_embd,
        n_ff=target.n_ff if alike and is_dense else wide * target.n_embd,
        n_head=target.n_head if alike else 32,
        n_head_kv=target.n_head_kv if alike else 8,
        head_dim=target.head_dim if alike else 128,
        n_vocab=target.n_vocab,
        vocab=target.vocab,
        n_ctx=target.n_ctx,
        rope_base=target.rope_base,
        eps=target.eps,
        n_target_embd=target.n_embd,
        inputs=tuple(max(1, min(layer, n - 1)) for layer in (2, n // 2, n - 3)),
        n_drafts=32_000 if real else target.n_vocab // 2,
    )


def stages_of(target: Deepseek4Dims) -> StagesDims:
    """DSpark of DeepSeek-V4 Flash as published: three stages, blocks of five, and taps of the last three layers."""
    real = target.n_vocab > 1000
    n_layer = 3 if real else 2
    given = vars(target) | {"name": f"{target.name}-{KINDS['dspark']}", "n_layer": n_layer, "mtp": False}
    return StagesDims(
        **given | {"ratios": (0,) * n_layer, "n_hash": 0},
        taps=tuple(range(target.n_layer))[-3:],
        mask_id=mask_id(target),
        block=5,
        markov=256 if real else 32,
    )


def drafter_of(target: Dims, *, fork: bool = False, kind: str = "dflash") -> DFlashDims:
    """A block drafter for the target: the published shapes of DFlash for Qwen3.6-27B and Qwen3-8B and of DFlash2 for
    Qwen3.8-27B, the usual shape for others."""
    real = target.n_vocab > 1000
    n_layer = 5 if real else 2
    sliding = (True,) * (n_layer - 1) + (False,) if isinstance(target, Qwen35) else ()
    return DFlashDims(
        name=f"{target.name}-{KINDS[kind]}",
        n_layer=n_layer,
        n_embd=target.n_embd,
        n_ff=target.n_ff,
        n_head=32 if real else target.n_head,
        n_head_kv=8 if real else target.n_head_kv,
        head_dim=128 if real else target.head_dim,
        n_vocab=target.n_vocab,
        vocab=target.vocab,
        n_ctx=target.n_ctx,
        rope_base=target.rope_base,
        eps=target.eps,
        n_target_embd=target.n_embd,
        taps=_taps(target.n_layer, 5 if real else 2, 5 if kind == "dflash2" else 1),
        mask_id=mask_id(target),
        block={"dflash": 16, "dflash2": 8, "dspark": 7}[kind] if real else 8,
        window=(2048 if real else 64) if sliding else 0,
        sliding=sliding,
        mrope=isinstance(target, Qwen35),
        fork=fork,
        kind=kind,
        conv=((2, 16) if real else (2, 8)) if kind == "dflash2" else (0, 0),
        selector=((256, 16) if real else (32, 4)) if kind == "dflash2" else (0, 0),
        markov=(256 if real else 32) if kind == "dspark" else 0,
    )


def _taps(n_layer: int, n: int, first: int) -> tuple[int, ...]:
    """The default of DFlash's training code: spread from layer 1 (DFlash2: 5) to the third from the end. Never the last, because
    llama.cpp reads a layer's output as the next layer's input."""
    if n_layer < 5:
        return tuple(range(n_layer - 1))[-n:]
    first = max(1, min(first, n_layer - 3 - n))
    return tuple(round(first + i * (n_layer - 3 - first) / (n - 1)) for i in range(n))


def mask_id(target: Dims) -> int:
    """The token in positions that drafters fill: a reserved id of the vocabulary."""
    by_kind = {"joyai-llm": 128_815, "qwen35": 248_070, "qwen2": 151_669}
    by_kind |= {"llama-bpe": 128_002, "pixtral": 14, "gpt-4o": 200_015}
    last = target.n_vocab - 1
    return by_kind.get(target.vocab, last) if target.n_vocab > 1000 else last
