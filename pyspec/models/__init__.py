"""Architectures. To add one: a module with `read(file) -> ModelConfig`, and a line in `pyspec.registry.ARCHITECTURES`."""

from __future__ import annotations

from importlib import import_module

from pyspec.errors import UnknownArchitecture
from pyspec.gguf import GGUFFile
from pyspec.models.target import ModelConfig
from pyspec.registry import ARCHITECTURES, not_run


def read_config(file: GGUFFile) -> ModelConfig:
    """The model's configuration; UnknownArchitecture if there is no module for it."""
    arch = file.architecture
    if arch not in ARCHITECTURES:
        raise UnknownArchitecture(not_run(file.path.name, arch))
    return import_module(ARCHITECTURES[arch]).read(file)
