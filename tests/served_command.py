"""`pyspec server` as a process of its own, as tests of commands and long runs drive it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path


class Served:
    """A server's process, its URL and its output. wait_s: for the line of its log that tells the URL"""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, wait_s: float = 60.0
    ) -> None:
        self.process = subprocess.Popen(
            command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self.log: list[str] = []
        self.url, self.is_up = "", threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        if not self.is_up.wait(wait_s) or not self.url:
            self.end()
            raise AssertionError("the server did not start:\n" + "".join(self.log[-40:]))

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if line.startswith("url "):
                self.url = line.split()[1]
            elif '"event": "ready"' in line:  # of --log-format json
                self.url = json.loads(line)["url"]
            if self.url:
                self.is_up.set()
        self.is_up.set()

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

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

    def end(self) -> int:
        """Its exit status."""
        self.process.terminate()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(10)


class ServedCommand(Served):
    """The command in this Python. before: code that runs ahead of it"""

    def __init__(self, before: str, words: Sequence[str]) -> None:
        code = f"{before}\nfrom pyspec.cli import main\nmain({['server', *words]!r})"
        super().__init__([sys.executable, "-c", code])
