"""Log lines: text for people, one JSON object each for programs, only ours below warnings."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from pathlib import Path

import pytest

from pyspec.cli.logs import FileLog, set_up


def test_json_lines_are_objects_even_with_quotes_and_tracebacks(capsys: pytest.CaptureFixture):
    set_up(3, "json")
    logging.getLogger("pyspec.engine.api").info("said %s", 'a "quoted"\nword')
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("pyspec.engine.loop.loop").exception("stops")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first["message"] == 'said a "quoted"\nword' and first["level"] == "info"
    assert first["logger"] == "pyspec.engine.api" and "traceback" not in first
    assert "ValueError: broken" in second["traceback"]


@pytest.mark.parametrize(("level", "seen"), [(0, ""), (2, "WE"), (3, "IWE"), (4, "DIWE")])
def test_levels_are_llama_servers_and_other_libraries_only_warn(
    level: int, seen: str, capsys: pytest.CaptureFixture
):
    set_up(level)
    for name in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger("pyspec.x"), name)("ours")
    logging.getLogger("other").info("theirs")
    lines = capsys.readouterr().err.splitlines()
    assert "".join(line.split()[1] for line in lines) == seen
    assert all(line.endswith("x: ours") for line in lines)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_log_file_that_is_full_loses_its_lines_without_a_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    handler = FileLog("/dev/full")
    handler.emit(logging.LogRecord("pyspec.x", logging.INFO, "", 0, "a line", (), None))
    assert capsys.readouterr().err == ""
    handler.emit(logging.LogRecord("pyspec.x", logging.INFO, "", 0, "%d", ("no number",), None))
    assert "Traceback" in capsys.readouterr().err, "a fault of ours is still said"
    with suppress(OSError):
        handler.close()
