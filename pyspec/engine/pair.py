"""Finds the files of a name, or of a path and a drafter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pyspec.catalog import paired_kind, resolve
from pyspec.config import EngineSettings, settings_from
from pyspec.registry import is_spec_type


def pair_of(target: str, draft: str | None, values: Mapping[str, object]) -> tuple[Path, EngineSettings]:
    """The target's file, and settings with the drafter's file, from the arguments of `Engine.load`."""
    path, paired = resolve(target)
    values = dict(values)
    if draft is None or is_spec_type(draft):
        values |= {} if draft == "auto" else {"spec_type": draft or "none"}
    else:
        values["draft_path"] = Path(draft)
    if paired is not None and values.get("spec_type", "auto") in ("auto", paired_kind(target)):
        values.setdefault("draft_path", paired)
    return path, settings_from(values)
