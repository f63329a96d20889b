"""`qwen2` (Qwen2, Qwen2.5): GQA decoder with biases on q, k and v, and half-split rope."""

from __future__ import annotations

from pyspec.errors import ModelError
from pyspec.gguf import GGUFFile
from pyspec.models.model import ModelSpec
from pyspec.models.read import read_gqa


def read(file: GGUFFile) -> ModelSpec:
    if "output.bias" in file.tensors:
        raise ModelError("qwen2 files with a bias on the head (output.bias) are not supported")
    return read_gqa(file, neox=True, biased=True)
