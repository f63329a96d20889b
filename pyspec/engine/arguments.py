"""Arguments of Engine's methods other than requests: checks, and the files and settings that a load's mean. No torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pyspec.catalog import paired_kind, resolve
from pyspec.config import EngineSettings, settings_from
from pyspec.engine.named import Named, find_sidecar
from pyspec.engine.result import Deadline
from pyspec.errors import ConfigError, PyspecError, RequestError
from pyspec.hub import from_hub, split_name
from pyspec.ranges import Real, shown
from pyspec.registry import RESERVED, SUFFIX, drafters, is_spec_type, split_spec_type

NAME_CHARS = 4096  # longest path on Linux
LIMIT = Real(0, threading.TIMEOUT_MAX)
TIMEOUT = Real(0, threading.TIMEOUT_MAX, above=True)


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


def seconds_of(name: str, value: object, legal: Real = LIMIT) -> float:
    """Most seconds to wait. Raises ConfigError."""
    if flaw := legal.flaw(value):
        raise ConfigError(f"{name} {flaw}")
    return float(value)  # type: ignore[arg-type]  # it is a number


def deadline_of(timeout: object) -> Deadline:
    """The end of a call that begins now. Raises ConfigError."""
    return Deadline(None if timeout is None else seconds_of("timeout", timeout, TIMEOUT))


def settings_given(settings: object) -> EngineSettings:
    """Settings of an engine. Raises ConfigError."""
    if not isinstance(settings, EngineSettings):
        raise ConfigError(f"settings is {shown(settings)}; want a pyspec.config.EngineSettings")
    return settings


def named_of(target: object, hf: object) -> Named:
    """The model that a load names: a path or a name of the catalogue, or a repository. Raises ConfigError."""
    if not isinstance(hf, str) or (target is None) is not bool(hf):
        what = (
            f"hf is {shown(hf)}"
            if not isinstance(hf, str)
            else "target and hf exclude each other"
            if hf
            else "no model is named"
        )
        raise ConfigError(f"{what}; want a file or a name of the catalogue, or hf='user/repo:quant'")
    if not hf:
        return Named(path_of("target", target, ConfigError))
    split_name(hf)
    return Named(repo=hf)


def _draft_file(draft: str) -> Path:
    """A drafter's file, or the model of the catalogue with that name. Raises ConfigError, which lists the drafters if it is neither."""
    try:
        return resolve(draft)[0]
    except ConfigError as e:
        if "/" in draft or draft.endswith(".gguf"):
            raise
        names = ", ".join((*RESERVED, *drafters(), SUFFIX))
        raise ConfigError(
            f"draft: {e}. Drafters are {names}, and each with ',{SUFFIX}' behind it"
        ) from None


def _drafter(values: Mapping[str, object]) -> object:
    """The drafter in `spec_type`, which is not checked yet."""
    wanted = values.get("spec_type", "auto")
    return split_spec_type(wanted)[0] if isinstance(wanted, str) else wanted


def pair_of(
    target: Named, draft: str | None, values: Mapping[str, object]
) -> tuple[Path, EngineSettings]:
    """The target's file, and settings with the drafter's file, from the arguments of `Engine.load`. Raises ConfigError, DownloadError."""
    values, paired = dict(values), None
    if target.repo:
        path = from_hub(*split_name(target.repo))
        if draft == "auto":
            draft = find_sidecar(target.repo, "", str(path), str(_drafter(values)))
    else:
        path, paired = resolve(target.model)
    if draft is None or (draft != "auto" and is_spec_type(draft)):
        wanted, kind = values.get("spec_type", "auto"), draft or "none"
        if wanted not in ("auto", kind):
            meant = " (no speculation)" if draft is None else ""
            raise ConfigError(
                f"draft is {shown(draft)}{meant}, but --spec-type is {shown(wanted)}: give one of them"
            )
        values["spec_type"] = kind
    elif draft != "auto":
        values["draft_path"] = _draft_file(draft)
    if paired is not None and _drafter(values) in ("auto", paired_kind(target.model)):
        values.setdefault("draft_path", paired)
    return path, settings_from(values)
