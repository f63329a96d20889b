"""Architectures of other packages: found by their entry point, and they read the keys of their own files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from engine_rig import FIXTURES, plain_rig
from rewrite import rewrite

from pyspec import registry
from pyspec.errors import BadGGUF, UnknownArchitecture

OWN = """
from pyspec.models.read import read_gqa
from pyspec.ranges import Whole

def read(file):
    file.hparams.integer("halves", legal=Whole(1, 2))
    return read_gqa(file, neox=False)
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """The files that `pip install` leaves for importlib.metadata, and the module."""
    info = folder / "own_model-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own_model\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{registry.ARCHITECTURE_GROUP}]\nown_model = own_model\n")
    (folder / "own_model.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "own_model", raising=False)


def own_file(folder: Path, halves: int) -> Path:
    change = {"own_model.halves": halves}
    return rewrite(FIXTURES / "llama.gguf", folder / "own.gguf", arch="own_model", change=change)


def test_a_model_of_another_packages_architecture_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, OWN)
    prompt = [1, 2, 3, 4]
    want = plain_rig(FIXTURES / "llama.gguf").generate(prompt, 8).tokens
    r = plain_rig(own_file(tmp_path, 2))
    assert r.info.arch == "own_model" and r.generate(prompt, 8).tokens == want


def test_its_own_key_outside_its_range_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, OWN)
    with pytest.raises(BadGGUF, match=r"own_model\.halves is 3; want a whole number from 1 to 2"):
        plain_rig(own_file(tmp_path, 3))


def test_a_broken_module_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "1 / 0")
    with pytest.raises(
        UnknownArchitecture, match="'own_model': importing own_model gave ZeroDivisionError"
    ):
        plain_rig(own_file(tmp_path, 2))


def test_without_the_package_the_file_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnknownArchitecture, match="'own_model', which pyspec does not run"):
        plain_rig(own_file(tmp_path, 2))
