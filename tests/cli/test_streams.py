"""Streams that are closed or take no more."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = f"{sys.executable} -m pyspec models"


def outcome(redirections: str) -> tuple[int, str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        f"{COMMAND} {redirections}", shell=True, env=env, stderr=subprocess.PIPE, text=True
    )
    return done.returncode, done.stderr


def test_a_closed_stdout_loses_the_text_and_nothing_else() -> None:
    assert outcome(">&-") == (0, "")


def test_streams_that_are_all_closed_end_no_command() -> None:
    assert outcome("<&- >&- 2>&-")[0] == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_stdout_is_one_line_and_an_exit_code() -> None:
    code, said = outcome(">/dev/full")
    assert code == 1 and said == "Error: cannot write to stdout: no space left on device\n"


@pytest.mark.sampled(most=1)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", ["models", "inspect /nowhere.gguf", "server /nowhere.gguf"])
def test_a_full_stderr_changes_no_exit_status(command: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    codes = {
        subprocess.run(
            f"{sys.executable} -m pyspec {command} >/dev/null {where}", shell=True, env=env
        ).returncode
        for where in ("2>/dev/null", "2>/dev/full", "2>&-")
    }
    assert codes == {0 if command == "models" else 2}


@pytest.mark.parametrize("closed", ["2", "1, 2", "0, 1, 2"])
def test_what_takes_the_place_of_a_closed_stream_is_there_for_children_too(closed: str) -> None:
    """A child with closed streams would get its next file or socket in their place, and log into it."""
    code = f"""
        import os, subprocess, sys
        for fd in ({closed},):
            os.close(fd)
        sys.stderr = None
        if 1 in ({closed},): sys.stdout = None
        if 0 in ({closed},): sys.stdin = None
        from pyspec.streams import fill_in
        fill_in()
        look = "import os, sys; os.fstat(1); os.fstat(2); os.write(2, b'x'); sys.exit(7)"
        os._exit(subprocess.run([sys.executable, "-c", look]).returncode)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 7


def test_stderr_that_fills_up_later_loses_what_it_does_not_take(tmp_path: Path) -> None:
    code = """
        import resource, signal, sys
        from pyspec.streams import fill_in
        fill_in()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        for i in range(1000):
            print("line", i, file=sys.stderr)
        print("went on", flush=True)
    """
    with open(tmp_path / "log", "w") as log:
        argv = [sys.executable, "-c", textwrap.dedent(code)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(argv, env=env, stderr=log, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0 and done.stdout == "went on\n"
    assert (tmp_path / "log").read_text().startswith("line 0\nline 1\n")


def test_a_reader_that_has_read_enough_hears_no_complaint() -> None:
    assert outcome("| head -n 1 >/dev/null") == (0, "")


def test_a_line_may_be_written_in_the_middle_of_another(tmp_path: Path) -> None:
    """A signal comes whenever it likes; an error there would be one of its handler, whose work then is left undone."""
    code = """
        import os, signal, sys, threading, time
        from pyspec.streams import fill_in
        fill_in()
        n = 0

        def hear(*_):
            global n
            n += 1
            sys.stderr.write(f"inside {n}\\n")

        signal.signal(signal.SIGUSR1, hear)
        def send():
            for _ in range(400):
                os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(0.0005)
        sender = threading.Thread(target=send)
        sender.start()
        while sender.is_alive():
            sys.stderr.write("outside " + "x" * 300 + "\\n")
        sys.exit(0 if n else 3)
    """
    said = tmp_path / "said"
    with open(said, "w") as file:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=file,
        )
    assert done.returncode == 0, said.read_text()[-600:]
    assert "inside 1\n" in said.read_text() and "Error" not in said.read_text()
