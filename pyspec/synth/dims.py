"""Sizes of the available models: real ones by name, and tiny ones of every architecture.

Only dimensions are here, in `models.toml`; `layout` derives tensors and metadata from them.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyspec.errors import ConfigError
from pyspec.synth import decoders, shapes
from pyspec.synth.gemma4 import Gemma4Dims
from pyspec.synth.shapes import Deepseek4Dims, Dims, NemotronH

PARTS = ("all", "tiny", "wide")  # of an architecture's table; its other lines are models
OF_THEIR_OWN = (
    *(shapes.Llama, shapes.Qwen3, shapes.Qwen3Moe, shapes.GptOss),
    *(shapes.Qwen35, shapes.Qwen35Moe, shapes.Qwen3Next),
    *(NemotronH, shapes.NemotronHMoe, Deepseek4Dims, Gemma4Dims),
)
KINDS: dict[str, type[Dims]] = {kind.arch: kind for kind in OF_THEIR_OWN} | decoders.KINDS
_TABLES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("models.toml").read_text())
_COMMON = _TABLES.pop("common")


def _values(table: Mapping[str, Any]) -> dict[str, Any]:
    """Lists as tuples, and tables as pairs."""
    plain = {
        name: tuple(value.items()) if isinstance(value, dict) else value for name, value in table.items()
    }
    return {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}


def _real(arch: str, name: str) -> Dims:
    table = _TABLES[arch]
    return KINDS[arch](name=name, **_values(table.get("all", {}) | table[name]))


def _tiny(arch: str) -> Dims:
    name = f"tiny-{arch.replace('_', '-')}"
    return KINDS[arch](name=name, **_values(_COMMON["tiny"] | _TABLES[arch]["tiny"]))


_REAL = [_real(arch, name) for arch, table in _TABLES.items() for name in table if name not in PARTS]
# Equal shapes, other weights
_ALIKE = {"Qwen3.5-27B": "Qwen3.6-27B", "Qwen3.5-35B-A3B": "Qwen3.6-35B-A3B"}
MODELS: dict[str, Dims] = {d.name.lower(): d for d in _REAL}
MODELS |= {name.lower(): replace(MODELS[like.lower()], name=name) for name, like in _ALIKE.items()}
NONE_NEEDED = {"demo": "its file is in the package, and small: `pyspec run demo`"}
"""Catalogue names without a synthetic model, and the reason."""
TINY: dict[str, Dims] = {arch: _tiny(arch) for arch in _TABLES}
TINY["llama-spm"] = replace(TINY["llama"], name="tiny-llama-spm", vocab="spm")
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
    wide = _COMMON["wide"] | _TABLES[dims.arch].get("wide", {})
    return replace(dims, name=f"{dims.name}-wide", **_values(wide))
