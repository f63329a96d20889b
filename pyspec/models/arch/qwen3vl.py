"""`qwen3vl` (Qwen3-VL, dense): as `qwen3`, with a rope of three axes, and parts of pictures' rows that are added behind the first blocks."""

from __future__ import annotations

from dataclasses import replace

from pyspec.errors import ModelError
from pyspec.gguf import GGUFFile
from pyspec.models.model import ModelSpec
from pyspec.models.read import read_attention, read_axes, read_gqa, read_rope

DEEP = "n_deepstack_layers"


def read(file: GGUFFile) -> ModelSpec:
    h, rope = file.hparams, read_rope(file, read_attention(file), neox=True)
    model = read_gqa(file, neox=True, qk_norm=True, rope=read_axes(file, rope))
    if (n_deep := h.integer(DEEP, 0)) > model.n_layer:
        raise ModelError(f"{h.key(DEEP)} is {n_deep}; the model has {model.n_layer} blocks")
    return replace(model, n_deep=n_deep)
