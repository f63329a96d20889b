"""Encoders by the type of their projector."""

from pyspec.vision.parts import Tower
from pyspec.vision.towers import gemma, pixtral, qwen

TOWERS: dict[str, Tower] = {
    "qwen3vl_merger": qwen.QWEN3VL,
    "qwen2vl_merger": qwen.QWEN2VL,
    "qwen2.5vl_merger": qwen.QWEN25VL,
    "gemma3": gemma.GEMMA3,
    "gemma4v": gemma.GEMMA4V,
    "gemma4uv": gemma.GEMMA4UV,
    "pixtral": pixtral.PIXTRAL,
}
