"""`qwen2moe` (Qwen1.5 and 2 with experts): as `qwen2`, experts whose weights are not divided by their sum, and a gated shared one."""

from __future__ import annotations

from pyspec.gguf import GGUFFile
from pyspec.models.experts import read_experts, shared_width
from pyspec.models.model import ModelSpec
from pyspec.models.read import read_gqa


def read(file: GGUFFile) -> ModelSpec:
    experts = read_experts(file, renorm=False, n_ff_shared=shared_width(file), shared_gate=True)
    return read_gqa(file, neox=True, feed=experts, n_ff=experts.n_inner)
