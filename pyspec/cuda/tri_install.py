"""Triton as it is installed here: its version, its compiler and headers, and its cache folder. Triton itself is not imported."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sysconfig
from functools import cache
from pathlib import Path

LEAST_VERSION = (3, 6)  # it comes with the oldest torch that we support


def unusable() -> str | None:
    """Why the package can not be used."""
    if (found := version()) is None:
        return "triton is not installed (pip install triton)"
    numbers = tuple(map(int, re.findall(r"\d+", found)[:2]))
    if numbers < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        return f"Triton {found or 'of no known version'} is too old; {least} or later is needed (it comes with torch)"
    return None


def version() -> str | None:
    """Version of the package that would be imported; "" if it has none; None without a package. It is read from the source, because the
    distribution has another name with each build of torch."""
    found = importlib.util.find_spec("triton")
    if found is None:
        return None
    return _version_in(found.origin or "")


@cache
def _version_in(origin: str) -> str:
    try:
        said = re.search(r"""^__version__ = ['"]([^'"]+)""", Path(origin).read_text(), re.MULTILINE)
    except OSError:
        return ""
    return said.group(1) if said else ""


def cannot_build() -> str | None:
    """Triton compiles a launcher in C on this machine."""
    if not os.environ.get("CC") and not any(map(shutil.which, ("gcc", "clang"))):
        return "Triton needs a C compiler (gcc or clang, or CC in the environment)"
    headers = sysconfig.get_paths(_scheme())["include"]
    if not (Path(headers) / "Python.h").is_file():
        return f"Triton needs Python's headers, and {headers} has no Python.h (install python3-dev)"
    place = cache_folder()
    there = next(path for path in (place, *place.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return f"Triton can not keep what it compiles in {place} (TRITON_CACHE_DIR says where else)"
    return None


def cache_folder() -> Path:
    """Triton's cache folder."""
    home = os.environ.get("TRITON_HOME") or Path.home()
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path(home) / ".triton" / "cache").absolute()


def _scheme() -> str:
    """The sysconfig scheme of Python's headers. Debian's own scheme may name a folder without any."""
    own = sysconfig.get_default_scheme()
    return "posix_prefix" if own == "posix_local" else own
