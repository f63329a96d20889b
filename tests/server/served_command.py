"""`pyspec server` as a process of its own, as tests of commands drive it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path


class ServedCommand:
    """The command's process, its URL and its output. before: Python that runs ahead of the command"""

    def __init__(self, before: str, words: Sequence[str]) -> None:
        code = f"{before}\nfrom pyspec.cli import main\nmain({['server', *words]!r})"
        self.process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self.url, self.is_up = "", threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        assert self.is_up.wait(60) and self.url, "".join(self.log)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if line.startswith("url "):
                self.url = line.split()[1]
                self.is_up.set()
        self.is_up.set()

    def children(self, word: str) -> list[int]:
        """Processes of its own whose command has the word."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                    is_ours = word.encode() in (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if parent == self.process.pid and is_ours:
                    found.append(int(entry.name))
        return found
