"""A process that was started early is the one that is used; an unused one is ended."""

import sys

import pytest

from pyspec.cli import main
from pyspec.engine.process import ahead as early
from pyspec.engine.process.process import EngineProcess

COMMAND = (sys.executable, "-c", "import sys; sys.stdin.read(); import time; time.sleep(60)")


@pytest.fixture(autouse=True)
def command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "COMMAND", COMMAND)


def new(command: tuple[str, ...] = COMMAND) -> EngineProcess:
    return EngineProcess(command, lambda message: None, lambda: None)


def test_the_next_engine_is_the_one_that_was_started_ahead() -> None:
    early.start_ahead()
    ahead = early._ahead[0][1][0]
    first, second = new(), new()
    assert first.process is ahead and second.process is not ahead
    assert first.end() == second.end() == "it was killed"


def test_one_of_another_command_or_that_is_gone_is_not_taken() -> None:
    early.start_ahead()
    ahead = early._ahead[0][1][0]
    other = new((*COMMAND, "other"))
    assert other.process is not ahead
    ahead.kill()
    ahead.wait(10)
    mine = new()
    assert mine.process is not ahead and not early._ahead
    for one in (other, mine):
        one.end()


def test_nobody_asked() -> None:
    early.start_ahead()
    ahead = early._ahead[0][1][0]
    early.end_ahead()
    assert ahead.poll() is not None and not early._ahead


def test_the_server_command_begins_with_it_unless_it_can_need_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the command's own modules are imported, a tenth of a second."""
    begun: list[bool] = []
    monkeypatch.setattr(early, "start_ahead", lambda: begun.append(True))
    for words, n in ((["server", "--help"], 0), (["config", "flags"], 0), (["server", "--no-such"], 1)):
        begun.clear()
        with pytest.raises(SystemExit):
            main(words)
        assert len(begun) == n, words
