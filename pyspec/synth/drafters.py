"""Dimensions of block drafters for a target, as their training codes choose them."""

from __future__ import annotations

from pyspec.errors import ConfigError
from pyspec.synth.shapes import DFlashDims, Dims, Qwen35

KINDS = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}
"""Kinds of block drafters, with the end of their names."""


def drafter_of(target: Dims, *, fork: bool = False, kind: str = "dflash") -> DFlashDims:
    """A drafter of one of KINDS for the target: the published shapes of DFlash for Qwen3.6-27B and Qwen3-8B and of DFlash2 for
    Qwen3.8-27B, the usual shape for others."""
    if kind not in KINDS or (fork and kind != "dflash"):
        raise ConfigError(f"no drafter {kind!r}{' of forks' * fork}; known are {', '.join(KINDS)}")
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
    return by_kind[target.vocab] if target.n_vocab > 1000 else target.n_vocab - 1
