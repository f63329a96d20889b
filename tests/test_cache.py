"""The cache folder: what is asked for, or a private one where that can not be written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from pyspec import cache


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An own TMPDIR; nothing is remembered of other tests."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    for found in (cache._usable, cache._tell):
        found.cache_clear()
    return tmp_path / "tmp" / f"pyspec-{os.geteuid()}"


def wrong(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HOME is a file, PYSPEC_CACHE is below one, or the folder is on a file system that is read-only."""
    (folder / "file").write_text("")
    if kind == "home":
        monkeypatch.delenv("PYSPEC_CACHE", raising=False)
        monkeypatch.setenv("HOME", str(folder / "file"))
        return
    (folder / "ro").mkdir()
    monkeypatch.setenv("PYSPEC_CACHE", str(folder / ("file" if kind == "file" else "ro") / "cache"))
    if kind == "read-only":
        access = os.access
        monkeypatch.setattr(
            os, "access", lambda path, mode: Path(path) != folder / "ro" and access(path, mode)
        )


@pytest.mark.parametrize("kind", ["home", "file", "read-only"])
def test_a_folder_that_can_not_be_written_gives_way_to_a_private_one(
    kind: str,
    tmp_path: Path,
    fresh: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong(kind, tmp_path, monkeypatch)
    assert cache.cache_root(tells=False) == fresh and not caplog.text
    assert cache.cache_root() == cache.cache_root() == fresh
    assert fresh.stat().st_mode & 0o777 == 0o700
    assert caplog.text.count("PYSPEC_CACHE names another folder") == 1 and str(fresh) in caplog.text


def test_a_private_folder_of_somebody_else_is_not_used(
    tmp_path: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong("file", tmp_path, monkeypatch)
    target = tmp_path / "elsewhere"
    target.mkdir(mode=0o700)
    for make in (lambda: fresh.symlink_to(target), lambda: fresh.mkdir(mode=0o755)):
        make()
        cache._usable.cache_clear()
        assert cache.cache_root() == cache.wanted_root()
        fresh.unlink() if fresh.is_symlink() else fresh.rmdir()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    cache._usable.cache_clear()
    (tmp_path / "tmp" / "pyspec-12345").mkdir(mode=0o700)
    assert cache.cache_root() == cache.wanted_root(), "its owner is another user"


def test_looking_makes_no_folder_where_one_can_be_made(
    tmp_path: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path / "a" / "b"))
    assert cache.cache_root() == tmp_path / "a" / "b"
    assert not (tmp_path / "a").exists() and not fresh.exists()
