"""`qwen3`: GQA decoder with per-head norms on q and k and half-split rope."""

from __future__ import annotations

from pyspec.gguf import GGUFFile
from pyspec.models.read import read_gqa
from pyspec.models.target import ModelConfig


def read(file: GGUFFile) -> ModelConfig:
    return read_gqa(file, neox=True, qk_norm=True)
