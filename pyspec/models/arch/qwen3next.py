"""`qwen3next` (Qwen3-Next, Qwen3-Coder-Next): as `qwen35moe`, with plain rope, and value heads that stand by their key head."""

from __future__ import annotations

from dataclasses import replace

from pyspec.gguf import GGUFFile
from pyspec.models.arch.qwen35 import read_hybrid, read_state
from pyspec.models.arch.qwen35moe import read_experts
from pyspec.models.blocks.gdn import DeltaNet
from pyspec.models.model import ModelSpec


def read(file: GGUFFile) -> ModelSpec:
    experts = read_experts(file)
    mixer = DeltaNet(replace(read_state(file), grouped=True))
    return read_hybrid(file, experts, experts.n_inner, mixer, has_axes=False)
