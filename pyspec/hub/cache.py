"""The Hugging Face cache of this machine: GGUF files by repository, and unfinished downloads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pyspec.hub.names import SHARD


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A GGUF of a repository's newest snapshot; for a split file its first shard, with the bytes of all."""

    repo: str
    file: str
    path: Path
    bytes: int


@dataclass(frozen=True, slots=True)
class CachedRepository:
    """A repository in the cache. unfinished: bytes of interrupted downloads."""

    name: str
    files: tuple[CachedFile, ...]
    unfinished: int


def cached_repositories() -> Iterator[CachedRepository]:
    """Repositories with a GGUF or an unfinished download, by name."""
    from huggingface_hub import constants

    root = Path(constants.HF_HUB_CACHE)
    for folder in sorted(root.glob("models--*")):
        name = folder.name.removeprefix("models--").replace("--", "/", 1)
        files = tuple(_files(name, folder))
        unfinished = sum(_n_bytes(part) for part in folder.glob("blobs/*.incomplete"))
        if files or unfinished:
            yield CachedRepository(name, files, unfinished)


def _files(repo: str, folder: Path) -> Iterator[CachedFile]:
    snapshot = _snapshot(folder)
    if snapshot is None:
        return
    paths = sorted(snapshot.rglob("*.gguf"))
    sizes = {p.relative_to(snapshot).as_posix(): _n_bytes(p) for p in paths}
    for name in sizes:
        shard = SHARD.match(name)
        if shard is None:
            yield CachedFile(repo, name, snapshot / name, sizes[name])
        elif shard[2] == "00001":
            shards = [other for other in sizes if (m := SHARD.match(other)) and m[1] == shard[1]]
            n_bytes = sum(sizes[other] for other in shards)
            yield CachedFile(repo, name, snapshot / name, n_bytes)


def _snapshot(folder: Path) -> Path | None:
    """The snapshot of the branch `main`, else the newest."""
    ref = folder / "refs" / "main"
    if ref.is_file() and (named := folder / "snapshots" / ref.read_text().strip()).is_dir():
        return named
    every = [p for p in folder.glob("snapshots/*") if p.is_dir()]
    return max(every, key=lambda p: p.stat().st_mtime, default=None)


def _n_bytes(path: Path) -> int:
    """Size of a file that may be a broken link."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def drop_unfinished(repo: str) -> None:
    """Delete what interrupted downloads of a repository have left."""
    from huggingface_hub import constants

    for part in Path(constants.HF_HUB_CACHE).glob(
        f"models--{repo.replace('/', '--')}/blobs/*.incomplete"
    ):
        part.unlink(missing_ok=True)
