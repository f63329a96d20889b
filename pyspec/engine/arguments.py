"""Arguments of Engine's methods other than requests: checks, and the files and settings that a load's mean. No torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pyspec.catalog import paired_kind, resolve
from pyspec.config import EngineSettings, settings_from
from pyspec.errors import ConfigError, PyspecError, RequestError
from pyspec.ranges import Real, shown
from pyspec.registry import is_spec_type, split_spec_type

NAME_CHARS = 4096  # longest path on Linux
LIMIT = Real(0, threading.TIMEOUT_MAX)


def path_of(name: str, path: object, error: type[PyspecError]) -> str:
    """A path as text. Raises `error` for anything else."""
    if not isinstance(path, str | os.PathLike) or not isinstance(text := os.fspath(path), str):
        raise error(f"{name} is {shown(path)}; want the path of a file, as text or a Path")
    if not text or "\0" in text or len(text) > NAME_CHARS:
        raise error(
            f"{name} is {shown(text)}; want the path of a file: 1 to {NAME_CHARS} characters, none of them NUL"
        )
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise error(f"{name} is {shown(text)}, which the system has no name for") from None
    return text


def slot_path(path: object) -> str:
    """The absolute path of a slot's file. Raises RequestError."""
    return str(Path(path_of("path", path, RequestError)).absolute())


def callable_of(name: str, given: object) -> Callable[..., Any]:
    """A callable. Raises RequestError."""
    if not callable(given):
        raise RequestError(f"{name} is {shown(given)}; want a function")
    return given


def id_of(request_id: object) -> str:
    """The id of a request, as `submit` returned it. Raises RequestError."""
    if not isinstance(request_id, str):
        raise RequestError(f"request_id is {shown(request_id)}; want an id that `submit` returned")
    return request_id


def prompts_of(prompts: object) -> list[Any]:
    """A list of prompts. Raises RequestError for one text, because each letter would be a prompt."""
    if isinstance(prompts, str | bytes | bytearray | Mapping) or not isinstance(prompts, Iterable):
        raise RequestError(f"prompts is {shown(prompts)}; want a list of prompts (`generate` takes one)")
    return list(prompts)


def limit_of(limit_s: object) -> float:
    """Most seconds to wait. Raises ConfigError."""
    if flaw := LIMIT.flaw(limit_s):
        raise ConfigError(f"limit_s {flaw}")
    return float(limit_s)  # type: ignore[arg-type]  # it is a number


def settings_given(settings: object) -> EngineSettings:
    """Settings of an engine. Raises ConfigError."""
    if not isinstance(settings, EngineSettings):
        raise ConfigError(f"settings is {shown(settings)}; want a pyspec.config.EngineSettings")
    return settings


def _drafter(values: Mapping[str, object]) -> object:
    """The drafter in `spec_type`, which is not checked yet."""
    wanted = values.get("spec_type", "auto")
    return split_spec_type(wanted)[0] if isinstance(wanted, str) else wanted


def pair_of(target: str, draft: str | None, values: Mapping[str, object]) -> tuple[Path, EngineSettings]:
    """The target's file, and settings with the drafter's file, from the arguments of `Engine.load`."""
    path, paired = resolve(target)
    values = dict(values)
    if draft is None or (draft != "auto" and is_spec_type(draft)):
        wanted, kind = values.get("spec_type", "auto"), draft or "none"
        if wanted not in ("auto", kind):
            meant = " (no speculation)" if draft is None else ""
            raise ConfigError(
                f"draft is {shown(draft)}{meant}, but --spec-type is {shown(wanted)}: give one of them"
            )
        values["spec_type"] = kind
    elif draft != "auto":
        values["draft_path"] = Path(draft)
    if paired is not None and _drafter(values) in ("auto", paired_kind(target)):
        values.setdefault("draft_path", paired)
    return path, settings_from(values)
