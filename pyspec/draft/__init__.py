"""Drafters: which there are, and which one a file is for. To add one: a module like `drafter.DrafterModule`, a line in `pyspec.registry`."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING

from pyspec.errors import ConfigError
from pyspec.registry import DRAFTERS, added_drafters, drafters

if TYPE_CHECKING:
    from pyspec.draft.drafter import DrafterModule
    from pyspec.gguf import GGUFFile

log = logging.getLogger(__name__)

PARTS = ("recognises", "plan", "load")


def find(kind: str) -> DrafterModule:
    """The module behind a drafter's name. ConfigError if it can not be had: another package's may be broken."""
    name = drafters()[kind]
    try:
        module = import_module(name)
    except Exception as e:  # it is not our code
        raise ConfigError(f"drafter '{kind}' can not be had: importing {name} gave {type(e).__name__}: {e}") from e
    missing = [part for part in PARTS if not callable(getattr(module, part, None))]
    if missing:
        raise ConfigError(f"drafter '{kind}' can not be had: {name} has no {', '.join(missing)}")
    return module


def recognised(file: GGUFFile) -> str | None:
    """Name of the drafter that recognises this file; ours are asked first. None: no drafter does."""
    return _first(DRAFTERS, file) or _first(added_drafters(), file)


def _first(kinds: Iterable[str], file: GGUFFile) -> str | None:
    for kind in kinds:
        try:
            if find(kind).recognises(file):
                return kind
        except ConfigError as e:  # the user did not ask for this one
            log.warning("%s", e)
    return None
