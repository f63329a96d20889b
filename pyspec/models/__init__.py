"""Architectures. To add one: a module with `read(file) -> ModelConfig`, and a line in `pyspec.registry.ARCHITECTURES`."""

from __future__ import annotations

from importlib import import_module

from pyspec.errors import UnknownArchitecture
from pyspec.gguf import GGUFFile
from pyspec.models.target import ModelConfig
from pyspec.registry import ARCHITECTURES


def read_config(file: GGUFFile) -> ModelConfig:
    """The model's configuration; UnknownArchitecture if there is no module for it."""
    arch = file.architecture
    if arch not in ARCHITECTURES:
        raise UnknownArchitecture(f"architecture '{arch}' is not supported; supported: {', '.join(ARCHITECTURES)}")
    return import_module(ARCHITECTURES[arch]).read(file)
