"""Cubins that came with the package: one archive for each architecture, asked before a compiler is.

An archive is a zip in `cubins/`. The name of an entry is a hash of the cubin's inputs: the source with its includes, the target, the
macros and the options. So a cubin of another source is never found. The zip's comment names the compiler, which is part of a verdict's
key (verdicts.py).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import threading
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cuda.core import ObjectCode

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "cubins"
OPTIONS = ("c++17", "lineinfo")  # the other options that jit.py compiles with


def name_of(stem: str, arch: str, macros: tuple[tuple[str, str], ...], source: str) -> str:
    """The entry's name of a cubin of this source."""
    made_of = json.dumps([stem, arch, macros, OPTIONS, source])
    return hashlib.sha256(made_of.encode()).hexdigest()[:40]


def find(stem: str, arch: str, macros: tuple[tuple[str, str], ...], source: str) -> ObjectCode | None:
    """The cubin, if one came with the package and this machine's driver takes it."""
    archive = _archive(FOLDER / f"{arch}.zip")
    if archive is None or not _is_for(archive.nvrtc, _driver_major()):
        return None
    code = archive.read(name_of(stem, arch, macros, source))
    if code is None:
        return None
    from cuda.core import ObjectCode

    return ObjectCode.from_cubin(code, name=f"{stem}.cu")


def identity(arch: str) -> str:
    """Digest of the archive for an architecture, as a part of a verdict's key; "" if there is none or the driver does not take it."""
    archive = _archive(FOLDER / f"{arch}.zip")
    return archive.digest if archive is not None and _is_for(archive.nvrtc, _driver_major()) else ""


def write(arch: str, nvrtc: str, cubins: Mapping[str, bytes], folder: Path = FOLDER) -> Path:
    """File cubins, by their names, as the archive for an architecture; whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.NamedTemporaryFile(dir=folder, suffix=".tmp", delete=False) as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as made,
    ):
        for name, code in sorted(cubins.items()):
            made.writestr(zipfile.ZipInfo(name), code, zipfile.ZIP_DEFLATED, 9)
        made.comment = json.dumps({"nvrtc": nvrtc, "arch": arch}).encode()
    os.chmod(file.name, 0o644)
    path = folder / f"{arch}.zip"
    os.replace(file.name, path)
    return path


def forget() -> None:
    """Forget the open archives, because they were written anew."""
    _archive.cache_clear()


class Archive:
    """An archive that can be read. nvrtc: the compiler's version; digest: a hash of its contents."""

    def __init__(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path)
        self._reading = threading.Lock()
        about = json.loads(self._zip.comment)
        self.nvrtc = str(about["nvrtc"])
        self._names = frozenset(self._zip.namelist())
        held = [(i.filename, i.CRC) for i in self._zip.infolist()]
        self.digest = hashlib.sha256(json.dumps([about, held]).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._names)

    def read(self, name: str) -> bytes | None:
        """A cubin; None if it is not here, or not whole."""
        if name not in self._names:
            return None
        try:
            with self._reading:
                return self._zip.read(name)
        except (OSError, zipfile.BadZipFile, ValueError) as e:
            log.warning("a cubin that came with pyspec can not be read, and is compiled anew: %s", e)
            return None


@cache
def _archive(path: Path) -> Archive | None:
    if not path.is_file():
        return None
    try:
        return Archive(path)
    except (OSError, zipfile.BadZipFile, ValueError, KeyError, TypeError) as e:
        log.warning("%s is left aside, kernels are compiled: %s", path.name, e)
        return None


def _is_for(nvrtc: str, driver: int) -> bool:
    """Drivers take cubins of compilers of their own major version, and of earlier ones."""
    major = nvrtc.partition(".")[0]
    return major.isdigit() and int(major) <= driver


@cache
def _driver_major() -> int:
    """Major version of the driver's CUDA; 0 without a driver."""
    try:
        from cuda.bindings import driver

        _, number = driver.cuDriverGetVersion()
    except Exception:  # noqa: BLE001 - no bindings, or no driver, which has errors of its own
        return 0
    return int(number or 0) // 1000
