"""Logging of the commands: the only place that installs log handlers."""

from __future__ import annotations

import json
import logging
import sys
import time

from pyspec.errors import ConfigError
from pyspec.ranges import printable
from pyspec.repeats import RateLimit

LEVELS = {
    0: logging.CRITICAL,
    1: logging.ERROR,
    2: logging.WARNING,
    3: logging.INFO,
    4: logging.DEBUG,
    5: logging.DEBUG,
}
"""-lv as in llama-server: 0 is silent, 3 is the default, 4 and 5 log everything."""


class JsonLines(logging.Formatter):
    """One JSON object per line: time (Unix seconds), level, logger, message, the record's `fields`, a traceback if there is one.

    `event` marks the lines that programs look for: listening, loading, ready, request.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _safe(record.getMessage(), "\n"),
            **{name: printable(x) if isinstance(x, str) else x for name, x in fields.items()},
        }
        if record.exc_info:
            line["traceback"] = _safe(self.formatException(record.exc_info), "\n")
        return json.dumps(line, ensure_ascii=False)


class TextLines(logging.Formatter):
    """`12:34:56 I engine: message`."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        name = record.name.removeprefix("pyspec.")
        text = record.getMessage()
        if record.exc_info:
            text += f"\n{self.formatException(record.exc_info)}"
        return f"{clock} {record.levelname[0]} {name}: {_safe(text)}"


def _safe(text: str, between: str = "\n    ") -> str:
    """Text that may come from outside, safe for a terminal. between: lines; indented, none of them looks like another message"""
    return between.join(map(printable, text.splitlines()))


class FileLog(logging.FileHandler):
    """A log file. If its disk is full, lines are lost without further messages."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


def set_up(level: int = 3, form: str = "text", file: str = "") -> None:
    """Log to stderr, and to a file if one is named: pyspec's messages at `level` (0..5), other libraries' from warnings on.

    Raises ConfigError if the file can not be written.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if file:
        try:
            handlers.append(FileLog(file, encoding="utf-8"))
        except OSError as e:
            raise ConfigError(f"--log-file {file} can not be written: {e.strerror or e}") from e
    limit = RateLimit()
    for handler in handlers:
        handler.addFilter(limit)
        handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=max(logging.WARNING, LEVELS[level]), handlers=handlers, force=True)
    logging.getLogger("pyspec").setLevel(LEVELS[level])
    logging.getLogger("huggingface_hub").propagate = False  # it has a handler of its own
