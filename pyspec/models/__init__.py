"""Architectures by their GGUF name. To add one: a module with `read(file) -> DecoderConfig`-like, and a line here."""

from __future__ import annotations

from importlib import import_module

from pyspec.errors import UnknownArchitecture
from pyspec.gguf import GGUFFile
from pyspec.models.decoder import DecoderConfig

ARCHITECTURES = {
    "llama": "pyspec.models.llama",
    "qwen3": "pyspec.models.qwen3",
    "qwen35": "pyspec.models.qwen35",
    "nemotron_h": "pyspec.models.nemotron",
    "nemotron_h_moe": "pyspec.models.nemotron",
    "qwen35moe": "pyspec.models.qwen35moe",
}


def read_config(file: GGUFFile) -> DecoderConfig:
    """The model's configuration; UnknownArchitecture if there is no module for it."""
    arch = file.architecture
    if arch not in ARCHITECTURES:
        raise UnknownArchitecture(f"architecture '{arch}' is not supported; supported: {', '.join(ARCHITECTURES)}")
    return import_module(ARCHITECTURES[arch]).read(file)
