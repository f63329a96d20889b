"""`llama`: GQA decoder with adjacent-pair rope, optional rope_freqs (Llama 3) and biases."""

from __future__ import annotations

from pyspec.errors import ModelError
from pyspec.gguf import GGUFFile
from pyspec.models.model import ModelSpec
from pyspec.models.read import read_gqa


def read(file: GGUFFile) -> ModelSpec:
    if file.hparams.integer("expert_count", 0):
        raise ModelError("llama files with experts (Mixtral) are not supported")
    return read_gqa(file, neox=False)
