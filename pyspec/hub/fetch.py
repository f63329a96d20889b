"""Files of a Hugging Face repository in the library's own cache: resumable downloads, checked against the hub's hash."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from pyspec import progress
from pyspec.errors import DownloadError
from pyspec.hub.heads import check_unchanged, current, in_one_folder, read_head
from pyspec.hub.names import choose, is_plain
from pyspec.hub.questions import answer_of, headers_for, unreachable

log = logging.getLogger(__name__)

REPORT_S = 0.5  # between progress reports
SHA256 = re.compile("[0-9a-f]{64}")  # the entity tag of a large file; small files have git's hash
HASHED_BYTES = 16 << 20  # per read
WITHOUT = "give a file (-m FILE), --offline for downloaded models, or try `pyspec server demo`, which needs no network"

# Repositories already reported as taken from the cache: a start asks several times
_said: set[str] = set()


class Repository:
    """A repository's files: on the hub, or in the local cache if the hub cannot be reached."""

    def __init__(self, name: str, names: Sequence[str], folder: Path | None = None) -> None:
        self.name, self.names, self.folder = name, names, folder

    @classmethod
    def open(cls, name: str) -> Repository:
        """Read the list of files. With HF_HUB_OFFLINE=1 only the cache is used. Raises DownloadError."""
        from huggingface_hub import HfApi, constants

        if constants.HF_HUB_OFFLINE:
            found = cls._cached(name)
            if found is None:
                raise DownloadError(
                    f"{name} is not in the local cache, and HF_HUB_OFFLINE forbids downloading it; "
                    "`pyspec list` shows the cached models"
                )
            return found
        if why := unreachable(constants.ENDPOINT):
            found = cls._cached(name)
            if found is None:
                raise DownloadError(f"no network ({why}): {WITHOUT}")
            log.log(
                logging.DEBUG if name in _said else logging.WARNING,
                "no network (%s); using the cached copy of %s",
                why,
                name,
            )
            _said.add(name)
            return found
        try:
            files = answer_of(name, lambda: list(HfApi().list_repo_files(name)))
            return cls(name, [file for file in files if is_plain(file)])
        except DownloadError as e:
            found = cls._cached(name)
            if found is None:
                raise
            log.warning("%s; using the cached copy", e)
            return found

    @classmethod
    def _cached(cls, name: str) -> Repository | None:
        """The newest snapshot in the cache, or None if there is none."""
        from huggingface_hub import snapshot_download

        try:
            folder = Path(answer_of(name, lambda: snapshot_download(name, local_files_only=True)))
        except DownloadError:
            return None
        return cls(name, [p.relative_to(folder).as_posix() for p in folder.rglob("*.gguf")], folder)

    def choose(self, quant: str = "", file: str = "", *, drafter: bool = False) -> list[str]:
        """The chosen file and its other shards. Raises ConfigError."""
        title = self.name if self.folder is None else f"the cached copy of {self.name}"
        return choose(self.names, quant, file, repo=title, drafter=drafter)

    def fetch(self, names: Sequence[str]) -> list[Path]:
        """Paths of files, downloaded if necessary. Raises DownloadError."""
        if self.folder is not None:
            return [self.folder / name for name in names]
        if current() is None:
            log.info("fetching %s from %s", ", ".join(names), self.name)
        return in_one_folder(self.name, names, [fetch_file(self.name, name) for name in names])

    def sizes(self) -> dict[str, int]:
        """Sizes of all files in bytes, by name. Raises DownloadError."""
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        if self.folder is not None:
            return {name: (self.folder / name).stat().st_size for name in self.names}
        tree = answer_of(self.name, lambda: list(HfApi().list_repo_tree(self.name, recursive=True)))
        return {entry.path: entry.size for entry in tree if isinstance(entry, RepoFile)}


def from_hub(repo: str, quant: str = "", file: str = "", *, drafter: bool = False) -> Path:
    """Path of a repository's GGUF in the Hugging Face cache, downloaded if necessary; all shards of a split file.

    Raises DownloadError, ConfigError.
    """
    there = Repository.open(repo)
    return there.fetch(there.choose(quant, file, drafter=drafter))[0]


def fetch_file(repo: str, name: str) -> Path:
    """One file's path in the cache. Downloads of large files are resumed and checked. Raises DownloadError."""
    from huggingface_hub import (
        constants,
        get_hf_file_metadata,
        hf_hub_download,
        hf_hub_url,
        try_to_load_from_cache,
    )
    from huggingface_hub.file_download import repo_folder_name

    if (heads := current()) is not None:
        there = try_to_load_from_cache(repo, name)
        return Path(there) if isinstance(there, str) else read_head(repo, name, heads)
    about = answer_of(repo, lambda: get_hf_file_metadata(hf_hub_url(repo, name)))
    check_unchanged(repo, name, about)
    home = repo_folder_name(repo_id=repo, repo_type="model")
    folder = Path(constants.HF_HUB_CACHE) / home / "blobs"
    blob = folder / str(about.etag)
    is_there, is_hash = blob.exists(), SHA256.fullmatch(str(about.etag)) is not None
    if not is_there and is_hash and about.size:
        folder.mkdir(parents=True, exist_ok=True)
        _download(repo, name, about, blob)
        is_there = True
    path = Path(answer_of(repo, lambda: hf_hub_download(repo, name)))
    if not is_there:
        check_hash(path)
    return path


def check_hash(path: Path) -> bool:
    """Compare a cached file with the hash that names it. False: it has none. Raises DownloadError and deletes a damaged file."""
    blob = path.resolve()
    if not SHA256.fullmatch(blob.name):
        return False
    _hold(path.name, blob, blob.name)
    return True


def sha256_of(path: Path) -> str:
    """A file's SHA-256 in hexadecimal digits."""
    whole, done = max(path.stat().st_size, 1), 0
    digest, piece = hashlib.sha256(), bytearray(HASHED_BYTES)
    with path.open("rb", buffering=0) as file:
        while n := file.readinto(piece):
            digest.update(memoryview(piece)[:n])
            done += n
            progress.report("hash", done / whole)
    return digest.hexdigest()


def _size(n: int) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"


def _hold(name: str, blob: Path, wanted: str) -> None:
    log.info("checking the hash of %s (%s)", name, _size(blob.stat().st_size))
    if (got := sha256_of(blob)) != wanted:
        blob.unlink()
        raise DownloadError(
            f"{name} is damaged: its SHA-256 is {got[:12]}..., want {wanted[:12]}...; it was deleted, download it again"
        )


def _download(repo: str, name: str, about: Any, blob: Path) -> None:
    """Download a blob into the cache. The library starts again after an interruption; this keeps the partial file under the name that older versions use."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.file_download import hf_hub_download, http_get

    part, url = blob.with_name(f"{blob.name}.incomplete"), hf_hub_url(repo, name)
    headers = headers_for(url, about.location)
    with part.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise DownloadError(f"another process is downloading {name} from {repo}") from e
        have = file.tell()
        if have > about.size:
            file.truncate(have := 0)
        if not have and about.size > getattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", about.size):
            part.unlink()
            with _reporting(name, part, about.size):
                whole = Path(answer_of(repo, lambda: hf_hub_download(repo, name)))
            check_hash(whole)
            return
        if have:
            log.info("%s: resuming after %s of %s", name, _size(have), _size(about.size))
        ask = lambda: http_get(  # noqa: E731
            about.location,
            cast("BinaryIO", Stoppable(file)),
            resume_size=have,
            headers=headers,
            expected_size=about.size,
        )
        _check_disk(name, part, about.size - have)
        try:
            with _reporting(name, part, about.size):
                answer_of(repo, ask)
        except DownloadError as e:
            file.flush()
            raise DownloadError(
                f"{e}; {_size(part.stat().st_size)} of {_size(about.size)} are kept: run it again to resume"
            ) from e
        file.flush()
        _hold(name, part, blob.name)
        part.rename(blob)


class Stoppable:
    """A file whose next write raises DownloadError once the download is to end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._is_stopped = file, progress.is_stopped.get()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: bytes) -> int:
        """Write, or raise DownloadError."""
        if self._is_stopped():
            raise DownloadError("it was cancelled")
        return self._file.write(data)


def _check_disk(name: str, part: Path, n_bytes: int) -> None:
    """Refuse a file that the disk has no room for."""
    free = shutil.disk_usage(part.parent).free
    if n_bytes > free:
        raise DownloadError(
            f"{name} needs {_size(n_bytes)} of disk in {part.parent}, and {_size(free)} are free; "
            "HF_HOME names another folder"
        )


@contextmanager
def _reporting(name: str, part: Path, size: int) -> Iterator[None]:
    """Report the progress of a download during the block; a listener that draws bars replaces the client library's."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    over, stage = threading.Event(), f"{progress.DOWNLOAD} {name}"

    def watch() -> None:
        while not over.wait(REPORT_S):
            with suppress(OSError):  # not created yet, or already renamed
                progress.report(stage, min(part.stat().st_size / size, 0.999))

    is_ours = progress.is_drawn() and not are_progress_bars_disabled()
    if is_ours:
        disable_progress_bars()
    progress.report(stage)
    thread = threading.Thread(target=watch, name="pyspec-download", daemon=True)
    thread.start()
    try:
        yield
        progress.report(stage, 1.0)
    finally:
        over.set()
        thread.join()
        if is_ours:
            enable_progress_bars()
