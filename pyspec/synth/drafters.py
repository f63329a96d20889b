"""Dimensions of drafters for a target, as their training codes choose them."""

from __future__ import annotations

from dataclasses import replace

from pyspec.errors import ConfigError
from pyspec.synth.dims import Dims

KINDS = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark", "eagle3": "EAGLE3"}
"""Kinds of drafters, with the end of their names."""
HYBRID = ("qwen35", "qwen35moe", "qwen3next", "qwen4exp")
ALIKE = ("llama", "qwen3", "qwen3moe", "gpt-oss", *HYBRID)  # EAGLE-3 has their heads


def made_for(target: Dims, kind: str, *, fork: bool) -> Dims:
    """A drafter of one of KINDS. fork: with the naming of older forks, which have DFlash only. Errors: ConfigError."""
    if kind not in KINDS or (fork and kind != "dflash"):
        raise ConfigError(f"no drafter {kind!r}{' of forks' * fork}; known are {', '.join(KINDS)}")
    if kind == "dspark" and target.n_stream:
        return stages_of(target)
    return eagle_of(target) if kind == "eagle3" else drafter_of(target, fork=fork, kind=kind)


def _like(target: Dims, kind: str, **own: int) -> Dims:
    """A drafter with the target's stream and vocabulary."""
    given = {f: getattr(target, f) for f in ("n_embd", "n_vocab", "vocab", "n_ctx", "rope_base", "eps")}
    given |= {"name": f"{target.name}-{KINDS[kind]}", "kind": kind, "n_target_embd": target.n_embd}
    return Dims(arch="eagle3" if kind == "eagle3" else "dflash", **given | own)


def eagle_of(target: Dims) -> Dims:
    """An EAGLE-3 drafter with the heads and the feed-forward of a dense target: the published shapes for Llama 3 8B, Qwen3 8B, and gpt-oss,
    and for Qwen3.6 27B the one that its training code gives to Qwen3.5 4B. Of targets with experts the width is three times the
    stream's, of gpt-oss six times."""
    n, real = target.n_layer, target.n_vocab > 1000
    alike = target.arch in ALIKE or not real
    experts = target.arch in ALIKE and target.n_expert > 0
    wide = 6 if target.arch == "gpt-oss" else 3
    drafter = _like(
        target,
        "eagle3",
        n_layer=1,
        n_ff=target.n_ff if alike and not experts else wide * target.n_embd,
        n_head=target.n_head if alike else 32,
        n_head_kv=target.n_head_kv if alike else 8,
        head_dim=target.head_dim if alike else 128,
        n_drafts=32_000 if real else target.n_vocab // 2,
    )
    return replace(drafter, taps=tuple(max(1, min(layer, n - 1)) for layer in (2, n // 2, n - 3)))


def stages_of(target: Dims) -> Dims:
    """DSpark of DeepSeek-V4 Flash as published: three stages of layers without compressed rows, blocks of five, and taps of the last three
    layers."""
    real = target.n_vocab > 1000
    n_layer = 3 if real else 2
    dropped = ("rope.scaling.", "attention.compress_rope_")
    return replace(
        target,
        arch="dflash",
        name=f"{target.name}-{KINDS['dspark']}",
        kind="dspark",
        n_layer=n_layer,
        mtp=0,
        keys=tuple((name, value) for name, value in target.keys if not name.startswith(dropped)),
        ratios=(0,) * n_layer,
        indexer=(0, 0, 0),
        n_hash=0,
        n_target_embd=target.n_embd,
        taps=tuple(range(target.n_layer))[-3:],
        mask_id=mask_id(target),
        block=5,
        markov=256 if real else 32,
    )


def drafter_of(target: Dims, *, fork: bool = False, kind: str = "dflash") -> Dims:
    """A block drafter for the target: the published shapes of DFlash for Qwen3.6-27B and Qwen3-8B and of DFlash2 for
    Qwen3.8-27B, the usual shape for others."""
    real, is_hybrid = target.n_vocab > 1000, target.arch in HYBRID
    n_layer = 5 if real else 2
    drafter = _like(
        target,
        kind,
        n_layer=n_layer,
        n_ff=target.n_ff,
        n_head=32 if real else target.n_head,
        n_head_kv=8 if real else target.n_head_kv,
        head_dim=128 if real else target.head_dim,
        mask_id=mask_id(target),
        block={"dflash": 16, "dflash2": 8, "dspark": 7}[kind] if real else 8,
        window=(2048 if real else 64) if is_hybrid else 0,
        markov=(256 if real else 32) if kind == "dspark" else 0,
    )
    drafter = replace(
        drafter,
        taps=_taps(target.n_layer, 5 if real else 2, 5 if kind == "dflash2" else 1),
        sliding=(True,) * (n_layer - 1) + (False,) if is_hybrid else (),
        mrope=is_hybrid,
        fork=fork,
    )
    if kind != "dflash2":
        return drafter
    conv, selector = ((2, 16), (256, 16)) if real else ((2, 8), (32, 4))
    return replace(drafter, convolution=conv, selector=selector)


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
