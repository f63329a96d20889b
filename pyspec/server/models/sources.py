"""Where a router's models come from: the cache of downloads, a folder, a preset. A later source wins by name."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from pyspec.errors import ConfigError, ModelError
from pyspec.hub import choose, models_of, quant_of, sidecars, split_name
from pyspec.hub.cache import cached_repositories
from pyspec.hub.names import SHARD, choose_projector
from pyspec.server.models.preset import SHARED, Preset, Setting, read_preset
from pyspec.vision.projector import read_projector

log = logging.getLogger(__name__)

REPOSITORY = ("hf-repo", "hf", "hfr", "LLAMA_ARG_HF_REPO", "PYSPEC_HF_REPO")
FILE = ("hf-file", "hff", "LLAMA_ARG_HF_FILE")
DRAFTER = ("spec-draft-hf", "hf-repo-draft", "hfd", "hfrd", "LLAMA_ARG_SPEC_DRAFT_HF_REPO")
NAMES_MODEL = ("model", "m", "LLAMA_ARG_MODEL", "PYSPEC_MODEL", *REPOSITORY)
"""Keys of a section that say which file it is."""
CACHE, FOLDER, PRESET = "cache", "models_dir", "preset"


@dataclass(frozen=True)
class ListedModel:
    """A model as a source names it.

    source  "cache", "models_dir" or "preset"
    words   flags that name its files; path: of the model's, if it is here
    flags   those of a preset's `[*]`, then those of its section
    own     keys for the router, of a preset
    repo    it is in the cache of downloads: repository and file
    hidden  it is not listed, because a preset has it under another name
    sees    a projector is beside it in the cache
    """

    name: str
    source: str
    words: tuple[str, ...] = ()
    path: str = ""
    flags: tuple[Setting, ...] = ()
    own: dict[str, Setting] = field(default_factory=dict)
    preset: Preset | None = None
    repo: tuple[str, str] = ("", "")
    hidden: bool = False
    sees: bool = False


def of_folder(folder: Path) -> Iterator[ListedModel]:
    """A model for each GGUF of the folder, and for each folder in it with some: there several parts and drafters are one model."""
    try:
        entries = sorted(folder.iterdir())
    except OSError as e:
        raise ConfigError(f"--models-dir {folder} can not be read: {e.strerror}") from e
    for name in models_of([path.name for path in entries if path.is_file()]):
        shard = SHARD.match(name)
        if shard is None or int(shard[2]) == 1:
            stem = shard[1] if shard else Path(name).stem
            yield ListedModel(stem, FOLDER, ("-m", str(folder / name)))
    for inner in (path for path in entries if path.is_dir()):
        names = [path.relative_to(inner).as_posix() for path in inner.rglob("*.gguf")]
        if models_of(names):
            try:
                target = choose(names, repo=str(inner))[0]
            except ConfigError as e:  # parts are missing, or still to come
                log.warning("%s is left out: %s", inner.name, e)
                continue
            drafter = next((("-md", str(inner / one.file)) for one in sidecars(names, target)), ())
            projector = _projector(inner, choose_projector(target, names))
            words = "-m", str(inner / target), *drafter, *projector
            yield ListedModel(inner.name, FOLDER, words)


def _projector(folder: Path, name: str) -> tuple[str, ...]:
    """The flag of a projector that was found beside a model; one that pyspec does not run is left out with a line."""
    if not name:
        return ()
    try:
        read_projector(folder / name)
    except ModelError as e:
        log.warning("%s: images are not read: %s", folder.name, e)
        return ()
    return ("--mmproj", str(folder / name))


def of_cache() -> Iterator[ListedModel]:
    """A model for each GGUF in the cache of downloads, under its repository and quantisation."""
    seen: set[str] = set()
    for repository in cached_repositories():
        for name in models_of([file.file for file in repository.files]):
            quant = quant_of(name).upper()
            named = f"{repository.name}:{quant}" if quant else repository.name
            words: tuple[str, ...] = ("-hf", named)
            if named in seen:
                named = f"{repository.name}:{PurePosixPath(name).stem}"
                words = ("-hf", repository.name, "-hff", name)
            seen.add(named)
            path = next(str(file.path) for file in repository.files if file.file == name)
            sees = bool(choose_projector(name, [file.file for file in repository.files]))
            yield ListedModel(named, CACHE, words, path, repo=(repository.name, name), sees=sees)


def all_models(folder: Path | None, preset_path: Path | None) -> list[ListedModel]:
    """The models of all sources. Raises ConfigError for a folder or a preset that can not be read."""
    found = {one.name: one for one in of_cache()}
    if folder is not None:
        found |= {one.name: one for one in of_folder(folder)}
    if preset_path is None:
        return list(found.values())
    preset = read_preset(preset_path)
    shared = tuple(preset.flags(SHARED))
    for name, one in found.items():
        found[name] = replace(one, flags=shared, own=preset.own(name), preset=preset)
    hiding: set[tuple[str, str]] = set()
    for name in preset.sections:
        if name == SHARED:
            continue
        flags = preset.flags(name)
        before = found.get(name, ListedModel(name, PRESET))
        words = before.words
        if any(setting.key in NAMES_MODEL for setting in flags):
            words = ()
        elif not words:
            words = ("-hf" if "/" in name else "-m", name)
        path = before.path if words == before.words else ""
        own, flags = preset.own(name), [*shared, *flags]
        if "dedup-cache-models" in own and preset.switch(own["dedup-cache-models"]):
            hiding |= {*_cached_files(flags, [*found.values()])}
        found[name] = ListedModel(
            name, PRESET, words, path, tuple(flags), own, preset, before.repo, sees=before.sees
        )
    return [replace(one, hidden=one.source == CACHE and one.repo in hiding) for one in found.values()]


def _cached_files(flags: Sequence[Setting], listed: Iterable[ListedModel]) -> Iterator[tuple[str, str]]:
    """Repository and file of a section's model and drafter, where they are in the cache."""
    said = {
        keys: setting.value
        for setting in flags
        for keys in (REPOSITORY, FILE, DRAFTER)
        if setting.key in keys
    }
    for keys, file in ((REPOSITORY, said.get(FILE, "")), (DRAFTER, "")):
        with suppress(ConfigError):  # its load says so
            repo, quant = split_name(said.get(keys, ""))
            here = {
                _whole(one.repo[1]): one.repo for one in listed if one.repo[0].lower() == repo.lower()
            }
            yield here[choose([*here], quant, _whole(file))[0]]


def _whole(file: str) -> str:
    """A file's name without its part's number."""
    return SHARD.sub(r"\1.gguf", file)
