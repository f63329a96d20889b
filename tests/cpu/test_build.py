"""Compiling the C++ kernels: by one process at a time, with words, and nothing is left of one that is ended. The compiler is a script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from waiting import lives, wait_for

from pyspec.cpu import build

BUILD = "from pyspec.cpu import build; print(build.build('plain'))"
FIT = (
    "from pyspec.cpu import build; build.BUILT = build.cache_root(); from pyspec.cli import main; main()"
)
QUICK = 'echo x >> "$LOG"; while [ $# -gt 1 ]; do [ "$1" = -o ] && echo made > "$2"; shift; done'
SLOW = 'echo $$ >> "$LOG"; exec sleep 60'


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts Python with an empty cache and this text as the compiler."""
    cxx = tmp_path / "cxx"

    def begin(compiler: str, code: str, *args: str) -> subprocess.Popen[str]:
        cxx.write_text(f"#!/bin/sh\n{compiler}\n")
        cxx.chmod(0o755)
        around = {
            **os.environ,
            "CXX": str(cxx),
            "LOG": str(tmp_path / "log"),
            "PYSPEC_CACHE": str(tmp_path / "cache"),
        }
        return subprocess.Popen(
            [sys.executable, "-c", code, *args],
            env=around,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # a shell that starts tests in the background has them ignore it
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )

    return begin


def files(tmp_path: Path) -> set[str]:
    folder = tmp_path / "cache" / "cpu"
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_build_that_is_ended_leaves_neither_files_nor_compilers(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]], sig: signal.Signals
) -> None:
    log = tmp_path / "log"
    process = start(SLOW, BUILD)
    wait_for(lambda: log.exists() and log.read_text(), 20)
    assert len(files(tmp_path)) == 2
    process.send_signal(sig)
    process.communicate(timeout=20)
    wait_for(lambda: files(tmp_path) == {"lock"}, 20)
    wait_for(lambda: not any(map(lives, map(int, log.read_text().split()))), 20)


def test_two_processes_compile_once_and_say_so(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    both = [start(f"sleep 0.05; {QUICK}", BUILD) for _ in range(2)]
    said = [process.communicate(timeout=60) for process in both]
    assert files(tmp_path) == {"lock", build.file_name("plain")}
    n_source = len(list(build.SOURCES.glob("*.cpp")))
    assert (tmp_path / "log").read_text().count("x") == n_source + 1, "each source once, and the library"
    assert said[0][0] == said[1][0] != ""
    text = "".join(err for _, err in said)
    assert (
        text.count("compiling the CPU kernels (plain), once") == text.count("are compiled, after") == 1
    )
    assert text.count("another process compiles") == 1


def test_fit_compiles_nothing_and_plans_with_the_kernels_to_come(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    model = Path(__file__).parents[1] / "fixtures" / "qwen3moe.gguf"
    for extra in ((), ("--cpu-activations", "q8")):
        process = start(QUICK, FIT, "fit", str(model), "-dev", "cpu", *extra)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0 and "fits" in out and "compil" not in err, err
        assert not (tmp_path / "log").exists() and not files(tmp_path)
