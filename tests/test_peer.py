"""The runner of llama.cpp's server tests, over a source with one test: works from any folder, and a mistake is one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "peer"))

import run as peer  # noqa: E402  (tests/peer is no package)

UTILS = """
import types
requests = types.SimpleNamespace()
class ServerPreset: pass
class ServerProcess:
    def make_request(self): pass
"""
ITEM = """
import os, sys
from pathlib import Path
def test_it_runs_where_the_tests_are():
    assert Path("utils.py").exists() and os.access(os.environ["LLAMA_SERVER_BIN_PATH"], os.X_OK)
    assert sys.executable.endswith("/bin/python")
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tests = tmp_path / "llama.cpp" / "tools" / "server" / "tests"
    (tests / "unit").mkdir(parents=True)
    (tests / "utils.py").write_text(UTILS)
    (tests / "unit" / "test_here.py").write_text(ITEM)
    return tmp_path / "llama.cpp"


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: Path) -> Path:
    """A folder with a Python in it by a relative path, and no process that servers are forked from."""
    here = tmp_path / "clone"
    (here / "bin").mkdir(parents=True)
    script = here / "bin" / "python"  # workers are another plugin's
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m pytest -q "$@"\n')
    script.chmod(0o755)
    monkeypatch.chdir(here)
    monkeypatch.setattr(peer.Suite, "zygote", lambda self: subprocess.Popen(["sleep", "60"]))
    return here


@pytest.mark.slow
def test_a_relative_python_is_found_from_where_the_tests_run(
    called: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (called / "bin" / "python").unlink()
    (called / "bin" / "python").symlink_to(sys.executable)
    commands: list[tuple[list[str], Path]] = []
    run = subprocess.run

    def watched(command: list[str], **more: object) -> object:
        commands.append((command, more["cwd"]))  # type: ignore[arg-type]
        plain = [*command[:3], "-q", *[w for w in command if w.startswith(("--junitxml", "unit/"))]]
        return run(plain, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(peer.subprocess, "run", watched)
    monkeypatch.setattr(sys, "argv", ["run.py", os.path.relpath(source), "--python", "bin/python"])
    assert peer.main() == 0 and "1 passed" in capsys.readouterr().out
    (command, where), *_ = commands
    assert Path(command[0]) == called / "bin" / "python" and where != called


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nowhere"], "nowhere is no source of llama.cpp: it has no tools/server/tests/utils.py"),
        (["SOURCE", "--python", "bin/other"], "--python bin/other is no program"),
    ],
)
def test_a_mistake_is_one_line(
    called: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    said: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", *[str(source) if a == "SOURCE" else a for a in args]])
    with pytest.raises(SystemExit) as end:
        peer.main()
    assert end.value.code == 2 and capsys.readouterr().err.splitlines()[-1].endswith(said)


def test_tests_that_do_not_run_are_told(
    called: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (called / "bin" / "python").write_text("#!/bin/sh\nexit 3\n")
    monkeypatch.setattr(sys, "argv", ["run.py", str(source), "--python", "bin/python"])
    with pytest.raises(SystemExit, match=r"their tests did not run: .* ended with status 3"):
        peer.main()


@pytest.mark.parametrize("target", ["peer", "sanitize", "check-gpu"])
def test_a_target_that_wants_something_says_so_at_once(target: str, tmp_path: Path) -> None:
    """In a folder without installed packages: nothing happens before all requirements are there."""
    (tmp_path / "Makefile").write_bytes((ROOT / "Makefile").read_bytes())
    env = {"PATH": os.defpath, "HOME": str(tmp_path)}
    done = subprocess.run(
        ["make", target], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    lines = [line for line in (done.stdout + done.stderr).splitlines() if f"make {target} wants" in line]
    assert done.returncode == 2 and len(lines) == 1, done.stdout + done.stderr
    assert not (tmp_path / ".venv").exists()
