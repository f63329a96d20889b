"""The clock of clockwork.py in an engine process of its own: `python clockwork_engine.py SLOTS HOST_MS DEVICE_MS DEFERS FD`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import ModuleType, SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent))
from clockwork import Clockwork

from pyspec.engine.process import engine_main
from pyspec.request import Event, Metrics, Request


class ClockworkCore(Clockwork):
    """The parts of a core that pyspec.engine.process.engine_main needs; a round's events are sent together, as by a real one.

    Its metrics are medians of the turn so far: host_ms of work, sample_ms of sending.
    """

    def __init__(self, hand_over: Callable) -> None:
        n_slot, host_ms, device_ms, defers = map(float, sys.argv[1:5])
        self.step_began, self.pace = 0.0, SimpleNamespace(expected=0.0)
        self._tell, self._due, self._names = hand_over, [], {}
        super().__init__(int(n_slot), host_ms=host_ms, device_ms=device_ms, is_deferring=bool(defers))

    @classmethod
    def load(
        cls,
        path: Path,
        settings: object,
        *,
        hand_over: Callable,
        on_death: Callable,
        on_blocks: Callable | None = None,
        file: object = None,
    ) -> ClockworkCore:
        return cls(hand_over)

    def submit(self, request: Request, sink: object, *, name: str, seed: int) -> str:  # type: ignore[override]
        if not self.streams:
            self.host.clear()
            self.handing.clear()

        def gather(event: Event) -> None:
            self._due.append((None, replace(event, request=name)))

        self._names[name] = super().submit(request, gather)
        return name

    def cancel(self, name: str) -> None:
        super().cancel(self._names.get(name, ""))

    def tell_all(self) -> None:
        if self._due:
            due, self._due = self._due, []
            self._tell(due)

    def metrics(self) -> Metrics:
        host, handing = list(self.host) or [0.0], list(self.handing) or [0.0]
        return Metrics(rounds=self.rounds, host_ms=1e3 * median(host), sample_ms=1e3 * median(handing))


if __name__ == "__main__":
    module = ModuleType("pyspec.engine.process.core")
    module.EngineCore = ClockworkCore  # type: ignore[attr-defined]
    sys.modules["pyspec.engine.process.core"] = module
    engine_main.main(int(sys.argv[5]))
