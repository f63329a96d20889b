"""Sizes of the available models: real ones by name, and tiny ones of every architecture.

Only dimensions are here; `layout` derives tensors and metadata from them.
"""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import TypedDict

from pyspec.errors import ConfigError
from pyspec.synth import decoders, gemma4
from pyspec.synth.shapes import (
    Deepseek4Dims,
    Dims,
    GptOss,
    Llama,
    NemotronH,
    NemotronHMoe,
    Qwen3,
    Qwen3Moe,
    Qwen3Next,
    Qwen35,
    Qwen35Moe,
    VocabKind,
)


def _qwen35(
    name: str, n_layer: int, n_embd: int, n_ff: int, heads: tuple[int, int], n_v_head: int, tied: bool
) -> Qwen35:
    return Qwen35(
        name=name,
        n_layer=n_layer,
        n_embd=n_embd,
        n_ff=n_ff,
        n_head=heads[0],
        n_head_kv=heads[1],
        head_dim=256,
        n_vocab=248_320,
        vocab="qwen35",
        n_ctx=262_144,
        rope_base=1e7,
        tied=tied,
        n_k_head=16,
        n_v_head=n_v_head,
    )


def _qwen35moe(name: str, n_layer: int, n_embd: int, n_ff: int, n_head: int, n_v_head: int) -> Qwen35Moe:
    dense = _qwen35(name, n_layer, n_embd, n_ff, (n_head, 2), n_v_head, tied=False)
    return Qwen35Moe(**vars(dense), n_expert=256, n_used=8, n_ff_shared=n_ff)


def _qwen3(name: str, n_embd: int, n_ff: int, rope_base: float, n_ctx: int, tied: bool) -> Qwen3:
    return Qwen3(
        name=name,
        n_layer=36,
        n_embd=n_embd,
        n_ff=n_ff,
        n_head=32,
        n_head_kv=8,
        head_dim=128,
        n_vocab=151_936,
        vocab="qwen2",
        n_ctx=n_ctx,
        rope_base=rope_base,
        tied=tied,
    )


def _nemotron(
    name: str,
    pattern: str,
    n_embd: int,
    n_ff: int,
    mamba_heads: int,
    experts: tuple[int, int],
    scale: float,
    latent: int,
) -> NemotronHMoe:
    return NemotronHMoe(
        name=name,
        pattern=pattern,
        n_layer=len(pattern),
        n_embd=n_embd,
        n_ff=n_ff,
        n_head=32,
        n_head_kv=2,
        head_dim=128,
        n_vocab=131_072,
        vocab="pixtral",
        n_ctx=1 << 20,
        rope_base=1e4,
        eps=1e-5,
        mtp=bool(latent),
        mamba_heads=mamba_heads,
        n_expert=experts[0],
        n_used=experts[1],
        n_ff_shared=2 * n_ff,
        routed_scale=scale,
        latent=latent,
    )


def _deepseek4(
    name: str,
    n_embd: int,
    n_ff: int,
    heads: tuple[int, int, int],
    ratios: tuple[int, ...],
    top_k: int,
    n_expert: int,
    scale: float,
) -> Deepseek4Dims:
    """heads: of queries, groups of outputs, rank of queries."""
    return Deepseek4Dims(
        name=name,
        n_layer=len(ratios),
        n_embd=n_embd,
        n_ff=n_ff,
        n_head=heads[0],
        n_head_kv=1,
        head_dim=512,
        n_vocab=129_280,
        vocab="joyai-llm",
        n_ctx=1 << 20,
        rope_base=1e4,
        ratios=ratios,
        q_rank=heads[2],
        groups=heads[1],
        indexer=(64, 128, top_k),
        n_expert=n_expert,
        n_used=6,
        routed_scale=scale,
    )


def _gpt_oss(name: str, n_layer: int, n_expert: int) -> GptOss:
    return GptOss(
        name=name,
        n_layer=n_layer,
        n_expert=n_expert,
        n_used=4,
        n_embd=2880,
        n_ff=2880,
        n_head=64,
        n_head_kv=8,
        head_dim=64,
        n_vocab=201_088,
        vocab="gpt-4o",
        n_ctx=131_072,
        rope_base=150_000.0,
        eps=1e-5,
    )


def _qwen3moe(name: str) -> Qwen3Moe:
    dense = vars(_qwen3(name, 2048, 768, 1e7, 262_144, tied=False)) | {"n_layer": 48, "n_head_kv": 4}
    return Qwen3Moe(**dense, n_expert=128, n_used=8)


def _qwen3next(name: str) -> Qwen3Next:
    like = vars(_qwen35moe(name, 48, 2048, 512, 16, 32)) | {"mtp": False}
    return Qwen3Next(**(like | {"n_vocab": 151_936, "vocab": "qwen2", "n_expert": 512, "n_used": 10}))


_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_SUPER = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
_REAL: tuple[Dims, ...] = (
    _qwen35("Qwen3.6-27B", 64, 5120, 17_408, (24, 4), 48, tied=False),
    _qwen35("Qwen3.5-9B", 32, 4096, 12_288, (16, 4), 32, tied=False),
    _qwen35("Qwen3.5-4B", 32, 2560, 9216, (16, 4), 32, tied=True),
    _qwen35("Qwen3.5-2B", 24, 2048, 6144, (8, 2), 16, tied=True),
    _qwen35("Qwen3.5-0.8B", 24, 1024, 3584, (8, 2), 16, tied=True),
    _qwen35moe("Qwen3.5-122B-A10B", 48, 3072, 1024, 32, 64),
    _qwen35moe("Qwen3.6-35B-A3B", 40, 2048, 512, 16, 32),
    _nemotron("Nemotron-3-Super", _SUPER, 4096, 2688, 128, (512, 22), 5.0, 1024),
    _nemotron("Nemotron-3-Nano", _NANO, 2688, 1856, 64, (128, 6), 2.5, 0),
    _deepseek4("DeepSeek-V4-Flash", 4096, 2048, (64, 8, 1024), (0, 0, *(4, 128) * 20, 4), 512, 256, 1.5),
    _deepseek4(
        "DeepSeek-V4-Pro", 7168, 3072, (128, 16, 1536), (128, 128, *(4, 128) * 29, 4), 1024, 384, 2.5
    ),
    _gpt_oss("gpt-oss-20b", 24, 32),
    _gpt_oss("gpt-oss-120b", 36, 128),
    _qwen3moe("Qwen3-30B-A3B"),
    _qwen3next("Qwen3-Next-80B-A3B"),
    _qwen3("Qwen3-4B", 2560, 9728, 5e6, 262_144, tied=True),
    _qwen3("Qwen3-8B", 4096, 12_288, 1e6, 40_960, tied=False),
    Llama(
        name="Llama-3-8B",
        n_layer=32,
        n_embd=4096,
        n_ff=14_336,
        n_head=32,
        n_head_kv=8,
        head_dim=128,
        n_vocab=128_256,
        vocab="llama-bpe",
        n_ctx=8192,
        rope_base=5e5,
        eps=1e-5,
    ),
)
_REAL += gemma4.REAL + decoders.REAL
# Equal shapes, other weights
_ALIKE = {"Qwen3.5-27B": "Qwen3.6-27B", "Qwen3.5-35B-A3B": "Qwen3.6-35B-A3B"}
MODELS: dict[str, Dims] = {d.name.lower(): d for d in _REAL}
MODELS |= {name.lower(): replace(MODELS[like.lower()], name=name) for name, like in _ALIKE.items()}
NONE_NEEDED = {"demo": "its file is in the package, and small: `pyspec run demo`"}
"""Catalogue names without a synthetic model, and the reason."""


class _Sizes(TypedDict):
    """Common sizes of all tiny models."""

    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    n_ctx: int
    rope_base: float


class _HybridSizes(TypedDict):
    n_k_head: int
    n_v_head: int
    state: int
    n_rot: int
    sections: tuple[int, int, int, int]


class _MambaSizes(TypedDict):
    vocab: VocabKind
    mamba_heads: int
    mamba_dim: int
    groups: int
    state: int


_TINY: _Sizes = {
    "n_embd": 64,
    "n_ff": 128,
    "n_head": 4,
    "n_head_kv": 2,
    "head_dim": 16,
    "n_vocab": 320,
    "n_ctx": 1024,
    "rope_base": 1e5,
}
_TINY_HYBRID = _HybridSizes(n_k_head=2, n_v_head=4, state=16, n_rot=8, sections=(2, 1, 1, 0))
_TINY_MAMBA = _MambaSizes(vocab="pixtral", mamba_heads=4, mamba_dim=16, groups=2, state=16)
TINY: dict[str, Dims] = {
    "llama": Llama(name="tiny-llama", n_layer=2, vocab="llama-bpe", **_TINY),
    "llama-spm": Llama(name="tiny-llama-spm", n_layer=2, vocab="spm", **_TINY),
    "qwen3": Qwen3(name="tiny-qwen3", n_layer=3, vocab="qwen2", **_TINY),
    "qwen3moe": Qwen3Moe(
        name="tiny-qwen3moe", n_layer=3, vocab="qwen2", n_expert=6, n_used=2, **(_TINY | {"n_ff": 64})
    ),
    "gemma4": gemma4.TINY,
    "gpt-oss": GptOss(
        name="tiny-gpt-oss",
        n_layer=4,
        vocab="gpt-4o",
        n_expert=6,
        n_used=2,
        window=16,
        yarn=(4.0, 256),
        **(_TINY | {"n_ff": 64}),
    ),
    "qwen35": Qwen35(name="tiny-qwen35", n_layer=4, vocab="qwen35", **_TINY_HYBRID, **_TINY),
    "qwen35moe": Qwen35Moe(
        name="tiny-qwen35moe",
        n_layer=3,
        vocab="qwen35",
        interval=2,
        n_expert=6,
        n_used=2,
        n_ff_shared=64,
        **_TINY_HYBRID,
        **(_TINY | {"n_ff": 64}),
    ),
    "qwen3next": Qwen3Next(
        name="tiny-qwen3next",
        n_layer=3,
        vocab="qwen2",
        interval=2,
        n_expert=6,
        n_used=2,
        n_ff_shared=64,
        **_TINY_HYBRID,
        **(_TINY | {"n_ff": 64}),
    ),
    "nemotron_h": NemotronH(name="tiny-nemotron-h", n_layer=6, pattern="M-*MM-", **_TINY_MAMBA, **_TINY),
    "nemotron_h_moe": NemotronHMoe(
        name="tiny-nemotron-h-moe",
        n_layer=5,
        pattern="ME*EM",
        mtp=True,
        n_expert=6,
        n_used=2,
        n_ff_shared=128,
        routed_scale=2.5,
        latent=32,
        **_TINY_MAMBA,
        **(_TINY | {"n_ff": 64}),
    ),
    "deepseek4": Deepseek4Dims(
        name="tiny-deepseek4",
        n_layer=4,
        vocab="joyai-llm",
        ratios=(0, 4, 128, 4),
        q_rank=32,
        groups=2,
        out_rank=32,
        window=12,
        indexer=(32, 32, 6),
        n_expert=6,
        n_used=2,
        n_hash=1,
        routed_scale=1.5,
        limit=1.0,
        n_rot=16,
        **(_TINY | {"n_ff": 32, "n_head_kv": 1, "head_dim": 32}),
    ),
} | decoders.tiny(64, 4, 2, 16)
"""By architecture; `llama-spm` is llama with a SentencePiece vocabulary."""


def find(name: str, *, tiny: bool = False) -> Dims:
    """Dimensions by model name, or the tiny ones of a model's or architecture's kind. Errors: ConfigError."""
    key = name.lower()
    if tiny and key in TINY:
        return TINY[key]
    if key in NONE_NEEDED:
        raise ConfigError(f"there is no synthetic {name!r}: {NONE_NEEDED[key]}")
    if key not in MODELS:
        known = [*MODELS, *(TINY if tiny else ())]
        close = difflib.get_close_matches(key, known, 1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
        raise ConfigError(f"no dimensions are known for {name!r}; {hint}")
    return TINY[MODELS[key].arch] if tiny else MODELS[key]


def shortened(dims: Dims, n_layer: int) -> Dims:
    """The first layers of a model, for its kernels in a file that is quick to write and load. Errors: ConfigError."""
    if not 0 < n_layer <= dims.n_layer:
        n = dims.n_layer
        raise ConfigError(f"{dims.name} has {n} layers; want 1 to {n} of them, got {n_layer}")
    short = replace(dims, n_layer=n_layer, name=f"{dims.name}, {n_layer} layers")
    if isinstance(short, Deepseek4Dims):
        return replace(short, ratios=short.ratios[:n_layer])
    if isinstance(short, NemotronH):
        return replace(short, pattern=short.pattern[:n_layer])
    return short


def widened(dims: Dims) -> Dims:
    """Tiny dimensions whose rows are multiples of 256, for the K types."""
    wide = replace(dims, n_embd=256, n_ff=256, head_dim=64, name=f"{dims.name}-wide")
    if isinstance(wide, gemma4.Gemma4Dims):
        return replace(wide, near_dim=64)
    if isinstance(wide, decoders.DecoderDims):
        return replace(decoders.tiny(256, 4, 2, 64)[wide.arch], name=wide.name)
    # 4 heads in 2 groups would give a group of 128 columns, which is too few
    if isinstance(wide, Deepseek4Dims):
        return replace(wide, head_dim=128, q_rank=256, out_rank=128)
    if isinstance(wide, Qwen35Moe | NemotronHMoe):
        wide = replace(wide, n_ff_shared=256, n_expert=4, n_used=2)
    wide = replace(wide, latent=256) if isinstance(wide, NemotronHMoe) else wide
    wide = replace(wide, mamba_dim=64) if isinstance(wide, NemotronH) else wide
    if isinstance(wide, Qwen35):
        return replace(wide, state=64, n_rot=16, sections=(3, 3, 2, 0))
    return wide
