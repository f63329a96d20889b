"""Sizes of the available models, from `models.toml`: real ones by name, and tiny ones of every architecture."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyspec.errors import ConfigError
from pyspec.gguf.write import Value

PARTS = ("both", "all", "tiny", "wide")  # of an architecture's table; its other lines are models


@dataclass(frozen=True, kw_only=True)
class Dims:
    """Dimensions of a decoder or a drafter; those that an architecture does not have are 0.

    n_layer      blocks of the trunk, without MTP blocks
    n_ff         inner width of a feed-forward, and of an expert where `n_ff_expert` is 0
    keys, has    metadata that no other field gives, or in its place; optional tensors of each block that the file has
    tied, mtp    the embedding is the head, too; the number of multi-token-prediction blocks
    louder       factor on the usual size of the head
    n_rot        dimensions of a head that turn; 0: all
    kda          dimensions of a head of Kimi Delta Attention; each `interval`-th block, the last and MTP blocks have none
    pattern      of Nemotron, a letter for each block: M Mamba-2, * attention, - feed-forward, E experts
    convolved    blocks whose mixer is a short convolution over `n_conv` rows
    n_near_head  heads in blocks that `sliding` names, where they have others
    near_dim     of Gemma 4: dimensions of heads in blocks with a window, which have `n_near_kv` key heads; each `interval`-th has none
    n_sharing    last blocks of Gemma 4 that read keys of earlier ones
    n_input      numbers of each block for each token, besides the stream
    ratios       tokens of a compressed row in each trunk layer, 0 for none
    indexer      its heads, dimensions and number of chosen rows, or of tokens of chosen blocks
    ratio        tokens of a block that its indexer chooses; blocks with attention alone have it
    n_gated, low  streams that gates read and write, and the rank of these
    ngrams       the block before which rows of n-grams are added, their longest, heads of each length, taps, and a head's rows
    n_hash       layers whose experts are chosen by a table of tokens
    limit        clamp of the experts' activations
    kind         of a drafter (`drafters.KINDS`); "": it is none. fork: with the naming of older forks
    taps         layers of the target that a drafter reads, in the numbering of its training code
    sliding      which blocks have the window
    convolution  of DFlash2: taps, and columns of a group
    selector     of DFlash2: rank, candidates
    markov       rank of DSpark's heads
    n_drafts     tokens of EAGLE-3's head
    """

    arch: str
    name: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    vocab: str
    n_ctx: int
    rope_base: float
    eps: float = 1e-6
    keys: tuple[tuple[str, Value], ...] = ()
    has: tuple[str, ...] = ()
    tied: bool = False
    mtp: int = 0
    louder: float = 1.0
    n_rot: int = 0
    sections: tuple[int, ...] = ()
    window: int = 0
    interval: int = 0
    n_expert: int = 0
    n_used: int = 0
    n_ff_expert: int = 0
    n_ff_shared: int = 0
    n_shared: int = 0
    n_dense: int = 0
    expert_groups: tuple[int, int] = (1, 1)
    routed_scale: float = 0.0
    latent: int = 0
    state: int = 0
    n_conv: int = 0
    n_k_head: int = 0
    n_v_head: int = 0
    kda: int = 0
    pattern: str = ""
    mamba_heads: int = 0
    mamba_dim: int = 0
    n_group: int = 0
    convolved: tuple[int, ...] = ()
    rank: int = 0
    q_rank: int = 0
    n_value: int = 0
    n_near_kv: int = 0
    near_dim: int = 0
    n_near_head: int = 0
    n_sharing: int = 0
    n_input: int = 0
    ratios: tuple[int, ...] = ()
    ratio: int = 0
    n_gated: int = 0
    low: int = 0
    ngrams: tuple[int, ...] = ()
    n_stream: int = 0
    out_rank: int = 0
    indexer: tuple[int, int, int] = (0, 0, 0)
    n_hash: int = 0
    limit: float = 0.0
    kind: str = ""
    fork: bool = False
    n_target_embd: int = 0
    taps: tuple[int, ...] = ()
    mask_id: int = 0
    block: int = 0
    sliding: tuple[bool, ...] = ()
    mrope: bool = False
    convolution: tuple[int, int] = (0, 0)
    selector: tuple[int, int] = (0, 0)
    markov: int = 0
    n_drafts: int = 0

    @property
    def mtp_alone(self) -> bool:
        """Whether the MTP block has a file of its own: mixers of its head have the same names as the trunk's."""
        return self.n_stream > 0


_TABLES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("models.toml").read_text())
_COMMON = _TABLES.pop("common")


def _values(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """The tables as one: lists as tuples, `keys` merged, as pairs, and `has` joined."""
    values: dict[str, Any] = {}
    for table in tables:
        own = {
            k: tuple(v.items() if isinstance(v, dict) else v) if isinstance(v, dict | list) else v
            for k, v in table.items()
        }
        values |= own | {k: values.get(k, ()) + own[k] for k in ("keys", "has") if k in own}
    return values | ({"keys": tuple(dict(values["keys"]).items())} if "keys" in values else {})


def _real(arch: str, name: str) -> Dims:
    table = _TABLES[arch]
    return Dims(
        arch=arch, name=name, **_values(table.get("both", {}), table.get("all", {}), table[name])
    )


def _tiny(arch: str) -> Dims:
    table, name = _TABLES[arch], f"tiny-{arch.replace('_', '-')}"
    return Dims(arch=arch, name=name, **_values(_COMMON["tiny"], table.get("both", {}), table["tiny"]))


_REAL = [_real(arch, name) for arch, table in _TABLES.items() for name in table if name not in PARTS]
# Equal shapes, other weights
_ALIKE = {"Qwen3.5-27B": "Qwen3.6-27B", "Qwen3.5-35B-A3B": "Qwen3.6-35B-A3B"}
MODELS: dict[str, Dims] = {d.name.lower(): d for d in _REAL}
MODELS |= {name.lower(): replace(MODELS[like.lower()], name=name) for name, like in _ALIKE.items()}
NONE_NEEDED = {"demo": "its file is in the package, and small: `pyspec run demo`"}
"""Catalogue names without a synthetic model, and the reason."""
TINY: dict[str, Dims] = {arch: _tiny(arch) for arch in _TABLES}
TINY["llama-spm"] = replace(TINY["llama"], name="tiny-llama-spm", vocab="spm")
TINY["k2-horizon-mova"] = replace(
    TINY["k2-horizon"],
    name="tiny-k2-horizon-mova",
    n_expert=6,
    n_used=2,
    n_ff_expert=64,
    n_shared=1,
    has=(
        *TINY["k2-horizon"].has,
        "attn_v_exps.weight",
        "attn_v_gate.bias",
        "ffn_gate_inp.weight",
        "exp_probs_b.bias",
    ),
    keys=(
        *TINY["k2-horizon"].keys,
        *{"expert_gating_func": 2, "expert_weights_norm": True}.items(),
        *{"attention.value_expert_count": 5, "attention.value_expert_used_count": 2}.items(),
    ),
)
"""By architecture; `llama-spm` is llama with a SentencePiece vocabulary, `k2-horizon-mova` has experts, also of values."""


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
    name, ratios, pattern = f"{dims.name}, {n_layer} layers", dims.ratios, dims.pattern
    return replace(dims, n_layer=n_layer, name=name, ratios=ratios[:n_layer], pattern=pattern[:n_layer])


def widened(dims: Dims) -> Dims:
    """Tiny dimensions whose rows are multiples of 256, for the K types."""
    wide = _COMMON["wide"] | _TABLES[dims.arch].get("wide", {})
    values = _values({"keys": dict(dims.keys)}, wide)
    return replace(dims, name=f"{dims.name}-wide", **values)
