"""Drafters: which there are, and which one a file is for.

To add one: a module as `drafter.DrafterModule` says, or `host` for a drafter without a model, and a line in `pyspec.registry`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING

from pyspec.errors import ConfigError
from pyspec.registry import ALSO, DRAFTERS, added_drafters, architecture_module, drafters

if TYPE_CHECKING:
    from pyspec.draft.drafter import DrafterModule, TargetFile
    from pyspec.gguf import GGUFFile

log = logging.getLogger(__name__)

PARTS = ("recognises", "plan", "load")
HOST_PART = "host_drafter"  # of a drafter without a model, in place of those


def find(kind: str) -> DrafterModule:
    """The module behind a drafter's name. ConfigError if it can not be had: another package's may be broken."""
    name = drafters()[kind]
    try:
        module = import_module(name)
    except Exception as e:  # it is not our code
        raise ConfigError(
            f"drafter '{kind}' can not be had: importing {name} gave {type(e).__name__}: {e}"
        ) from e
    if callable(getattr(module, HOST_PART, None)):
        from pyspec.draft.drafter import HostModule  # with torch, which names of drafters do not need

        return HostModule(kind, module)
    missing = [part for part in PARTS if not callable(getattr(module, part, None))]
    if missing:
        raise ConfigError(f"drafter '{kind}' can not be had: {name} has no {', '.join(missing)}")
    return module


def recognised(file: GGUFFile) -> str | None:
    """Name of the drafter that recognises this file; ours are asked first. None: no drafter does."""
    return _first(DRAFTERS, file) or _first(added_drafters(), file)


def meant(kind: str, file: GGUFFile | None) -> str:
    """The drafter that a name means for a file that was given: llama.cpp's draft-dflash is DFlash2, too, where the file is."""
    found = None if file is None else _first(ALSO.get(kind, ()), file)
    return found or kind


def given(file: GGUFFile, target: TargetFile) -> str | None:
    """Name of the drafter for a file that was given beside a target. A whole model is a draft model, with an MTP block or not, unless its
    trunk is the target's: then it was given for that block. None: no drafter is for the file."""
    kind = recognised(file)
    if kind not in (None, "mtp") or not is_model(file):
        return kind
    h, c = file.hparams, target.config
    n_layer = h.integer("block_count") - h.integer("nextn_predict_layers", 0)
    has_trunk = (file.architecture, n_layer, h.integer("embedding_length")) == (
        c.arch,
        c.n_layer,
        c.n_embd,
    )
    return kind if kind and has_trunk else "draft"


def is_model(file: GGUFFile) -> bool:
    """The file has a trunk that pyspec runs."""
    return architecture_module(file.architecture) is not None and any(
        n.startswith("blk.0.") for n in file.tensors
    )


def _first(kinds: Iterable[str], file: GGUFFile) -> str | None:
    for kind in kinds:
        try:
            if find(kind).recognises(file):
                return kind
        except ConfigError as e:  # the user did not ask for this one
            log.warning("%s", e)
    return None
