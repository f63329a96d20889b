"""`qwen3`: GQA decoder with per-head norms on q and k and half-split rope."""

from __future__ import annotations

from pyspec.gguf import GGUFFile
from pyspec.models.model import ModelSpec
from pyspec.models.read import read_gqa


def read(file: GGUFFile) -> ModelSpec:
    return read_gqa(file, neox=True, qk_norm=True)
