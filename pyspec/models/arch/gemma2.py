"""`gemma2`: as `gemma3` without norms of heads, with capped scores, and a window in every second block, the first one too."""

from __future__ import annotations

from dataclasses import replace

from pyspec.gguf import GGUFFile
from pyspec.models.arch.gemma3 import read_gemma, read_scaled
from pyspec.models.blocks.attention import Attention
from pyspec.models.model import ModelSpec
from pyspec.models.read import block_count, read_rope, read_windows
from pyspec.ranges import Real

BLOCKS_27B = 46
PATTERN, WINDOW, CAP, FINAL_CAP = 2, 4096, 50.0, 30.0  # where a file does not say


def read(file: GGUFFile) -> ModelSpec:
    h, shape = file.hparams, read_scaled(file, BLOCKS_27B)
    cap = h.number("attn_logit_softcapping", CAP, legal=Real(0, 1e6))
    far = Attention(shape, read_rope(file, shape, neox=True), cap=cap)
    near = replace(far, rope=replace(far.rope, base=h.number("rope.freq_base_swa", far.rope.base)))
    windows = read_windows(file, block_count(file), PATTERN, WINDOW)
    mixers = [replace(near if n else far, window=n) for n in windows]
    return read_gemma(file, mixers, h.number("final_logit_softcapping", FINAL_CAP))
