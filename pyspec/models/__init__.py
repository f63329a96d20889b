"""Architectures. To add one: a module with `read(file) -> ModelSpec`, and a line in `pyspec.registry.ARCHITECTURES`.

Another package adds one with an entry point (`pyspec.registry`).
"""

from __future__ import annotations

from importlib import import_module

from pyspec.errors import ModelError, UnknownArchitecture
from pyspec.gguf import GGUFFile
from pyspec.models.model import ModelSpec
from pyspec.registry import ARCHITECTURES, architecture_module, not_run


def read_config(file: GGUFFile) -> ModelSpec:
    """The model's configuration; UnknownArchitecture if there is no module for it, or another package's module is broken."""
    arch = file.architecture
    name = architecture_module(arch)
    if name is None:
        raise UnknownArchitecture(not_run(file.path.name, arch))
    try:
        module = import_module(name)
    except Exception as e:
        if arch in ARCHITECTURES:
            raise
        raise UnknownArchitecture(
            f"architecture {arch!r}: importing {name} gave {type(e).__name__}: {e}"
        ) from e
    if not file.hparams.flag("attention.causal", True):
        raise ModelError(
            f"{file.path.name} attends to later tokens, too ({arch}.attention.causal is false): it embeds texts, and answers none"
        )
    config: ModelSpec = module.read(file)
    return config.of_file(file)
