"""Heads of remote files: metadata and list of tensors, read by ranges, without their weights; and whether a file has changed since."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request

from pyspec.errors import DownloadError
from pyspec.hub.questions import answer_of, headers_for, opened

HEAD_BYTES = 64 << 20  # most bytes of the metadata and the list of tensors
FIRST_BYTES = 16 << 20  # of the first request: vocabularies of 250,000 tokens take 12 MB
MOST_BREAKS = 4  # connections that may break off in one head
PATIENCE_S = 60.0
MAGIC = b"GGUF"

Seen = Mapping[tuple[str, str], str]
"""Entity tags of files whose heads were read, by repository and name."""


@dataclass
class Heads:
    """The folder of files whose head alone was downloaded, and their entity tags.

    is_whole  True if a truncated file contains the whole head
    """

    folder: Path
    is_whole: Callable[[Path], bool] | None
    seen: dict[tuple[str, str], str] = field(default_factory=dict)


_heads: ContextVar[Heads | None] = ContextVar("heads", default=None)
_expected: ContextVar[Seen | None] = ContextVar("expected", default=None)


@contextmanager
def heads_only(folder: Path, is_whole: Callable[[Path], bool] | None = None) -> Iterator[Heads]:
    """In this block, download only the heads of missing files: `folder` gets sparse files with their first bytes and full size.

    is_whole  True if the first bytes, in a file of full length, suffice; otherwise more are downloaded
    """
    heads = Heads(folder, is_whole)
    token = _heads.set(heads)
    try:
        yield heads
    finally:
        _heads.reset(token)


def current() -> Heads | None:
    """The heads of the block around the caller."""
    return _heads.get()


@contextmanager
def expecting(seen: Seen) -> Iterator[None]:
    """In this block, refuse files that are no longer those whose heads were read."""
    token = _expected.set(seen)
    try:
        yield
    finally:
        _expected.reset(token)


def check_unchanged(repo: str, name: str, about: Any) -> None:
    """Raise DownloadError for a file that has changed since its head was read. about: the hub's metadata of it"""
    seen = (_expected.get() or {}).get((repo, name))
    if seen is not None and seen != str(about.etag):
        raise DownloadError(
            f"{name} of {repo} has changed on the server since its head was read; run it again"
        )


def read_head(repo: str, name: str, heads: Heads) -> Path:
    """A file of full size whose tensors are holes. Raises DownloadError."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(repo, name)
    about = answer_of(repo, lambda: get_hf_file_metadata(url))
    if about.size is None:
        raise DownloadError(f"{name}: the server does not report its size")
    heads.seen[repo, name] = str(about.etag)
    ask = partial(_part, about.location, headers_for(url, about.location), about.size)
    path = heads.folder / repo / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    n_break = 0
    goal = min(FIRST_BYTES, HEAD_BYTES, about.size)
    while not _suffices(path, goal, about.size, heads):
        have = path.stat().st_size
        goal = goal if have < goal else min(HEAD_BYTES, about.size)
        with path.open("ab") as file:
            file.write(answer_of(repo, partial(ask, have, goal)))
        got = path.stat().st_size - have
        n_break += have + got < goal
        if not got or n_break > MOST_BREAKS:
            raise DownloadError(
                f"{name}: the connection breaks off in its first {goal} bytes; run it again"
            )
    os.truncate(path, about.size)
    return path


def in_one_folder(repo: str, names: Sequence[str], paths: Sequence[Path]) -> list[Path]:
    """Paths of a split file of which only some parts are downloaded: all beside their heads, where a reader looks for them."""
    heads = _heads.get()
    if heads is None or len({path.parent for path in paths}) < 2:
        return list(paths)
    beside = [heads.folder / repo / name for name in names]
    for own, path in zip(beside, paths, strict=True):
        if own != path and not own.exists():
            own.parent.mkdir(parents=True, exist_ok=True)
            own.symlink_to(path.resolve())
    return beside


def _suffices(path: Path, goal: int, size: int, heads: Heads) -> bool:
    """Whether no more of a file has to be read. Raises DownloadError where its head does not end."""
    have = path.stat().st_size
    if have < goal:
        return False
    with path.open("rb") as file:
        is_gguf = file.read(len(MAGIC)) == MAGIC
    if have >= size or not is_gguf or (heads.is_whole is None or heads.is_whole(path)):
        return True
    if have >= HEAD_BYTES:
        raise DownloadError(
            f"{path.name} has no whole head in its first {have} bytes: it is damaged, or larger than any known; "
            "--no-look downloads it all the same"
        )
    return False


def _part(location: str, headers: dict[str, str], size: int, start: int, end: int) -> bytes:
    """Bytes of a file; fewer if the connection breaks off."""
    request = Request(location, headers=headers | {"Range": f"bytes={start}-{end - 1}"})
    with opened(request, PATIENCE_S) as answer:
        if answer.status != 206:  # the server may not support ranges and start from the beginning
            answer.read(start)
        elif not _is_part(answer.headers.get("Content-Range", ""), start, size):
            raise DownloadError(
                "the file has changed on the server while its head was read; run it again"
            )
        found: bytes = answer.read(end - start)
    return found


def _is_part(content_range: str, start: int, size: int) -> bool:
    """Whether an answer is of the file and place that were asked for, as far as it says so."""
    span, _, whole = content_range.strip().removeprefix("bytes").strip().partition("/")
    begin = span.partition("-")[0]
    return begin in ("", "*", str(start)) and whole in ("", "*", str(size))
