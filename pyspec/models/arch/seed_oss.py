"""`seed_oss` (Seed-OSS): half-split rope, biases of q, k and v where the file has them; `post_attention_norm` is the norm before the feed-forward."""

from __future__ import annotations

from pyspec.gguf import GGUFFile
from pyspec.models.model import ModelSpec
from pyspec.models.read import read_gqa


def read(file: GGUFFile) -> ModelSpec:
    return read_gqa(file, neox=True, feed_norm="post_attention_norm")
