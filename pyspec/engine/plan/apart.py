"""Plans of several loads, made in one process beside a router: it stays without torch, and each plan without torch's import."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from pyspec.config import EngineSettings
from pyspec.engine.children import child_environment
from pyspec.errors import DeviceError, PyspecError

COMMAND = (sys.executable, "-P", "-c", f"from {__name__} import main; main()")


@dataclass(frozen=True)
class LoadNeed:
    """Bytes of a load by place ("host", "cuda:0" ...), the tokens of a request, and both in words. rest: bytes while it is parked; None: it can not be"""

    bytes: Mapping[str, int]
    n_ctx: int
    text: str = ""
    rest: Mapping[str, int] | None = None


class Planner:
    """A process that plans. It starts with the first question, and again if it has ended. Any thread may ask."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def need(self, path: Path, settings: EngineSettings, budget: Mapping[str, int]) -> LoadNeed:
        """See `need.need_of`. Raises its errors, and DeviceError if the process ends."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child_environment(),
                    start_new_session=True,
                )  # fmt: skip
            assert self._process.stdin is not None and self._process.stdout is not None
            try:
                pickle.dump((path, settings, dict(budget)), self._process.stdin)
                self._process.stdin.flush()
                found = pickle.load(self._process.stdout)
            except (OSError, EOFError, pickle.UnpicklingError) as e:
                raise DeviceError(f"the plan of {path.name} could not be made: its process ended") from e
        if isinstance(found, PyspecError):
            raise found
        assert isinstance(found, LoadNeed)
        return found

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def main() -> None:
    """Answer questions from stdin on stdout, until stdin ends."""
    need_of = import_module("pyspec.engine.plan.need").need_of  # by name, because torch comes with it
    out = sys.stdout.buffer
    sys.stdout = sys.stderr  # other code may print
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            question = pickle.load(sys.stdin.buffer)
            try:
                found: LoadNeed | PyspecError = need_of(*question)
            except PyspecError as e:
                found = e
            except Exception as e:  # noqa: BLE001 - a damaged file; the next one may be sound
                found = DeviceError(f"{question[0].name} could not be planned: {type(e).__name__}: {e}")
            out.write(pickle.dumps(found))
            out.flush()
