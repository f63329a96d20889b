"""Cubins that came with the package: found by everything they are made of, and left aside wherever they may not fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pyspec.cuda import jit, shipped, verdicts
from pyspec.cuda.jit import GpuKind, Program
from pyspec.cuda.verdicts import Candidate
from pyspec.errors import DeviceError

ANGLES = GpuKind((9, 0)).program("angles")
NAMES = ("stem", "arch", "macros")


def name_of(program: Program) -> str:
    return shipped.name_of(*program, jit.source(program.stem))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty package and cache, with a driver of CUDA 13."""
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "cubins")
    monkeypatch.setattr(shipped, "_driver_major", lambda: 13)
    monkeypatch.setattr(jit, "_kept", {})
    shipped.forget()
    yield tmp_path / "cubins"
    shipped.forget()


def nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    import cuda.core

    def refuse(*args: object) -> None:
        raise RuntimeError("error: the compiler was asked")

    monkeypatch.setattr(cuda.core, "Program", refuse)


def test_what_was_shipped_is_not_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = bytes(jit.compiled(ANGLES).code.code)
    shipped.write("sm_90a", "13.0.88", {name_of(ANGLES): code}, folder)
    shipped.forget()
    nothing_compiles(monkeypatch)
    monkeypatch.setattr(jit, "_kept", {})
    monkeypatch.setenv("PYSPEC_CACHE", str(folder / "empty"))
    assert bytes(jit.compiled(ANGLES).code.code) == code
    with pytest.raises(DeviceError, match="the compiler was asked"):
        jit.compiled(GpuKind((8, 0)).program("angles"))


def test_other_sources_macros_and_targets_have_other_names() -> None:
    same = shipped.name_of("norms", "sm_90a", (("COLUMNS", "64"),), "code")
    assert same == shipped.name_of("norms", "sm_90a", (("COLUMNS", "64"),), "code")
    others = [
        ("norms", "sm_90a", (("COLUMNS", "64"),), "code "),
        ("norms", "sm_90a", (("COLUMNS", "65"),), "code"),
        ("norms", "sm_90a", (("COLUMNS", "64"), ("LAYER", "1")), "code"),
        ("norms", "sm_80", (("COLUMNS", "64"),), "code"),
        ("norm", "sm_90a", (("COLUMNS", "64"),), "code"),
    ]
    assert len({same, *(shipped.name_of(*other) for other in others)}) == 6


def test_a_source_that_changed_is_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped.write("sm_90a", "13.0.88", {name_of(ANGLES): b"of before"}, folder)
    shipped.forget()
    assert shipped.find(*ANGLES, jit.source("angles")) is not None
    assert shipped.find(*ANGLES, jit.source("angles") + "// and more\n") is None
    nothing_compiles(monkeypatch)
    monkeypatch.setattr(jit, "source", lambda stem: "__global__ void angles() {}")
    with pytest.raises(DeviceError, match="the compiler was asked"):
        jit.compiled(ANGLES)


@pytest.mark.parametrize(
    ("nvrtc", "driver", "taken"),
    [
        ("13.0.88", 13, True),
        ("13.5", 13, True),
        ("12.9", 13, True),
        ("14.0", 13, False),
        ("13.0", 0, False),
        ("", 13, False),
    ],
)
def test_a_driver_takes_cubins_of_its_major_version_and_earlier(
    folder: Path, monkeypatch: pytest.MonkeyPatch, nvrtc: str, driver: int, taken: bool
) -> None:
    monkeypatch.setattr(shipped, "_driver_major", lambda: driver)
    shipped.write("sm_90a", nvrtc, {name_of(ANGLES): b"code"}, folder)
    shipped.forget()
    assert (shipped.find(*ANGLES, jit.source("angles")) is not None) == taken
    assert bool(shipped.identity("sm_90a")) == taken


def test_an_archive_that_is_damaged_is_left_aside(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert shipped.identity("sm_90a") == "" and not caplog.records
    path = shipped.write("sm_90a", "13.0.88", {name_of(ANGLES): bytes(range(256)) * 40}, folder)
    whole = path.read_bytes()
    for bad in (b"", b"no zip", whole[:100], whole[:-1]):
        path.write_bytes(bad)
        shipped.forget()
        caplog.clear()
        assert shipped.find(*ANGLES, jit.source("angles")) is None
        assert [r.message for r in caplog.records][:1] and "sm_90a.zip is left aside" in caplog.text
    turned = bytearray(whole)
    turned[60 + len(name_of(ANGLES))] ^= 0xFF
    path.write_bytes(bytes(turned))
    shipped.forget()
    caplog.clear()
    assert shipped.find(*ANGLES, jit.source("angles")) is None
    assert len(caplog.records) == 1, "its sum is another one, or nothing can be unpacked"


def test_verdicts_hold_for_the_cubins_they_were_made_with(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspec.cuda.machine import Machine
    from pyspec.cuda.ops.angles.ref import AnglesSpec

    monkeypatch.setattr(
        verdicts, "machine", lambda device: Machine("a GPU", "9.0", "580", "13.0", "1.0")
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    home = "pyspec.cuda.ops.angles.op:angles"
    candidate = Candidate(
        "angles", home, "cuda", "pyspec.cuda.ops.angles.cuda", AnglesSpec(torch.device("cuda"))
    )
    without = verdicts.key_of(candidate)
    assert "cubins" not in without, "as it was before there were any"
    keys = [without]
    for code in (b"one", b"two"):
        shipped.write("sm_90a", "13.0.88", {name_of(ANGLES): code}, folder)
        shipped.forget()
        keys.append(verdicts.key_of(candidate))
    assert len({verdicts.name_of(key) for key in keys}) == 3
