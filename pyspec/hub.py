"""Files from Hugging Face: which GGUF of a repository is meant, and its path in the local cache."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import TypeVar

from pyspec.errors import ConfigError, DownloadError
from pyspec.registry import DRAFTERS

log = logging.getLogger(__name__)

DEFAULT_QUANT = "Q4_K_M"
DRAFTS = tuple(f"{drafter}-" for drafter in DRAFTERS)
SIDECARS = (
    "mmproj",
    "imatrix",
    "dspark-",
    "eagle3-",
    *DRAFTS,
)  # names begin with these
SHARD = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)

T = TypeVar("T")


def split_name(name: str) -> tuple[str, str]:
    """ "user/repo:quant" to (repo, quant); the quant may be missing. Raises ConfigError."""
    repo, _, quant = name.partition(":")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise ConfigError(f"-hf wants user/repo[:quant], got '{name}'")
    return repo, quant


def choose(
    names: Sequence[str], quant: str = "", file: str = "", *, repo: str = "", drafter: bool = False
) -> list[str]:
    """The file to load among a repository's files, first shard first, and its other shards.

    names  paths in the repository, "/" between folders
    quant  e.g. "Q8_0", in any case; "" takes Q4_K_M if it is there, else the first model file
    file   exact name instead; sidecars (projectors, drafters) can be had this way
    drafter  of files whose names say that they are drafters, if there are any
    Raises ConfigError, with the choice there is.
    """
    ggufs = sorted(n for n in names if n.lower().endswith(".gguf"))
    if file:
        if file not in ggufs:
            near = get_close_matches(file, ggufs, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{repo} has no file {file}{hint}")
        return _shards(file, ggufs)
    models = [n for n in ggufs if _begins_with(n, DRAFTS)] if drafter else []
    models = models or [n for n in ggufs if not _begins_with(n, SIDECARS)]
    if not models:
        raise ConfigError(f"{repo} has no GGUF model among its {len(names)} files")
    wanted = quant or DEFAULT_QUANT
    fits = re.compile(rf"(?:^|[-._/]){re.escape(wanted)}(?=[-./]|$)", re.IGNORECASE)
    found = [n for n in models if fits.search(n)]
    if not found and quant:
        raise ConfigError(f"{repo} has no {quant} file; it has {', '.join(models[:12])}{' ...' if models[12:] else ''}")
    return _shards((found or models)[0], models)


def _begins_with(name: str, heads: tuple[str, ...]) -> bool:
    return PurePosixPath(name).name.lower().startswith(heads)


def _shards(name: str, names: Sequence[str]) -> list[str]:
    match = SHARD.match(name)
    if match is None:
        return [name]
    stem, count = match[1], int(match[3])
    every = [f"{stem}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
    missing = [n for n in every if n not in names]
    if missing:
        raise ConfigError(f"{name} has {count} parts and {len(missing)} are missing: {', '.join(missing[:4])}")
    return every


def from_hub(repo: str, quant: str = "", file: str = "", *, drafter: bool = False) -> Path:
    """Path of a repository's GGUF in the Hugging Face cache, downloaded if it is not there; all shards of a split file.

    With HF_HUB_OFFLINE=1 only the cache is looked at; without a network it is looked at last. Raises DownloadError,
    ConfigError.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        found = _cached(repo, quant, file, drafter)
        if found is None:
            raise DownloadError(f"{repo} is not in the local cache, and HF_HUB_OFFLINE forbids to download it")
        return found
    try:
        names = _asked(repo, lambda: list(HfApi().list_repo_files(repo)))
    except DownloadError as e:
        found = _cached(repo, quant, file, drafter)
        if found is None:
            raise
        log.warning("%s; taking the copy in the cache", e)
        return found
    wanted = choose(names, quant, file, repo=repo, drafter=drafter)
    log.info("fetching %s from %s", ", ".join(wanted), repo)
    paths = [Path(_asked(repo, lambda name=name: hf_hub_download(repo, name))) for name in wanted]
    return paths[0]


def _cached(repo: str, quant: str, file: str, drafter: bool) -> Path | None:
    """The file in the newest cached snapshot, or None if the cache has nothing of the repository."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(_asked(repo, lambda: snapshot_download(repo, local_files_only=True)))
    except DownloadError:
        return None
    names = [p.relative_to(folder).as_posix() for p in folder.rglob("*.gguf")]
    return folder / choose(names, quant, file, repo=f"the cached copy of {repo}", drafter=drafter)[0]


def _asked(repo: str, ask: Callable[[], T]) -> T:
    """The answer, or a DownloadError of one line whatever the client library raises."""
    from huggingface_hub.errors import HfHubHTTPError

    # its HTTP errors derive from those of whichever HTTP library the installed version uses; the rest are OSErrors
    try:
        return ask()
    except (OSError, ValueError, *HfHubHTTPError.__bases__) as e:
        lines = str(e).strip().splitlines()
        raise DownloadError(f"{repo} can not be had: {lines[0] if lines else type(e).__name__}") from e
