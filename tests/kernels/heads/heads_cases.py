"""Sizes of heads' matrices, for the tests of every tier."""

import torch

from pyspec.cuda.ops.heads.ref import HeadsSpec
from pyspec.gguf import GGMLType

CPU = torch.device("cpu")
SIZES = {
    "DeepSeek-V3's keys": (GGMLType.Q8_0, 2, 512, 128),
    "DeepSeek-V3's values": (GGMLType.Q4_K, 2, 128, 512),
    "GLM-4.7-Flash's keys": (GGMLType.Q5_0, 3, 512, 192),
    "tiny keys": (GGMLType.F32, 5, 16, 8),
    "tiny values": (GGMLType.F32, 5, 12, 16),
    "outputs of no whole tile": (GGMLType.F16, 3, 40, 36),
    "one head": (GGMLType.BF16, 1, 33, 64),
    "Q6_K": (GGMLType.Q6_K, 3, 24, 256),
    "Q5_K": (GGMLType.Q5_K, 1, 19, 256),
    "Q4_0": (GGMLType.Q4_0, 2, 40, 96),
    "Q4_1": (GGMLType.Q4_1, 2, 20, 96),
    "Q5_1": (GGMLType.Q5_1, 2, 18, 32),
    "IQ4_NL": (GGMLType.IQ4_NL, 3, 56, 64),
    "wide rows of f32": (GGMLType.F32, 1, 16, 768),
}


def spec_of(name: str) -> HeadsSpec:
    return HeadsSpec(CPU, *SIZES[name])
