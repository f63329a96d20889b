"""`phi3` (Phi-3, 3.5, Phi-4, Phi-4-mini): q, k and v in one matrix, gates and ups in another; longrope, whose length is the file's."""

from __future__ import annotations

from dataclasses import replace

from pyspec.gguf import GGUFFile
from pyspec.models.model import ModelSpec
from pyspec.models.read import block_count, read_attention, read_gqa, read_rope, split_gates
from pyspec.models.rope import SHORT


def read(file: GGUFFile) -> ModelSpec:
    """`attention.sliding_window` is in files, and not used, as in llama.cpp. Divisors say that a rope is longrope's; no key needs to."""
    rope = read_rope(file, read_attention(file), neox=True)
    if SHORT in file.tensors:
        rope = replace(rope, scaling=replace(rope.scaling, kind="longrope"))
    split_gates(file, block_count(file), file.hparams.integer("feed_forward_length"))
    return read_gqa(file, neox=True, rope=rope)
