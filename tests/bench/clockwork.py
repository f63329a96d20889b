"""An engine that is a clock: rounds of fixed work and fixed waiting, so that only the cost of serving varies."""

from __future__ import annotations

import threading
import time
import zlib
from dataclasses import dataclass

from pyspec.request import (
    Delta,
    Done,
    EngineInfo,
    Finish,
    Metrics,
    ReplicaInfo,
    Request,
    SlotInfo,
    Started,
    Timings,
)
from pyspec.server.engine import Sink

N_VOCAB = 1000
WIDTH = 6  # tokens of a Delta
LAUNCH = bytes(8192)  # long enough that its checksum lets go of the GIL


class Ids:
    """A tokenizer for ids alone."""

    n_vocab = N_VOCAB

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        return [1] * len(text)

    def decode(self, ids: object, *, special: bool = False) -> str:
        return "x"

    def token_bytes(self, token: int) -> bytes:
        return b"x"


@dataclass
class Stream:
    id: str
    request: Request
    sink: Sink
    n: int = 0
    is_cancelled: bool = False


class Clockwork:
    """A round works `host_ms` on the GIL, letting go of it every 50 us as torch's calls do, and waits `device_ms` without
    it; then every stream gets a Delta, at once or, with `is_deferring`, when the next round's waiting begins. Rounds run
    while there are streams."""

    def __init__(
        self,
        n_slot: int = 8,
        *,
        host_ms: float = 0.0,
        device_ms: float = 10.0,
        is_deferring: bool = False,
    ) -> None:
        self.info = EngineInfo(
            model_name="clockwork",
            model_path="",
            arch="clockwork",
            n_vocab=N_VOCAB,
            n_ctx=1 << 20,
            n_ctx_train=1 << 20,
            n_slot=n_slot,
            n_embd=1,
            n_params=1,
            n_bytes=1,
            file_type="F32",
            device="cpu",
            drafter="none",
            n_draft_max=0,
            bos_token="",
            eos_token="",
            eog_ids=(),
        )
        self.tokenizer, self.template = Ids(), None
        self.host_ms, self.device_ms, self.is_deferring = host_ms, device_ms, is_deferring
        self.host: list[float] = []  # seconds that each round's work took
        self.handing: list[float] = []  # seconds that handing tokens over took
        self.streams: list[Stream] = []
        self.rounds = 0
        self.n_seen = 0
        self.n_step = self._calibrate()
        self._wake = threading.Condition()
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _calibrate(self) -> int:
        """Steps of work in `host_ms`: counted, so that a round's work does not shrink when it is interrupted."""
        best = 1.0
        for _ in range(20):
            began = time.perf_counter()
            for _ in range(20):
                self._work()
            best = min(best, (time.perf_counter() - began) / 20)
        return round(self.host_ms / 1e3 / best)

    @staticmethod
    def _work() -> int:
        """About 50 us: Python, and a call without the GIL."""
        total = sum(i & 3 for i in range(700))
        return total + zlib.crc32(LAUNCH)

    def submit(self, request: Request, sink: Sink) -> str:
        with self._wake:
            self.n_seen += 1
            self.streams.append(Stream(f"r{self.n_seen}", request, sink))
            self._wake.notify()
            return self.streams[-1].id

    def cancel(self, request_id: str) -> None:
        """The next hand-over ends it."""
        with self._wake:
            for s in self.streams:
                s.is_cancelled = s.is_cancelled or s.id == request_id

    def slots(self) -> list[SlotInfo]:
        return []

    def metrics(self) -> Metrics:
        return Metrics(rounds=self.rounds)

    def replicas(self, *, counts: bool = True) -> list[ReplicaInfo]:
        return []

    def state(self) -> str:
        return "ok"

    def alive(self) -> bool:
        return True

    def close(self) -> None:
        with self._wake:
            self._stop = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        due: list[Stream] = []
        while True:
            with self._wake:
                while not self.streams and not self._stop:
                    self._wake.wait()
                if self._stop:
                    return
                streams = list(self.streams)
            began = time.perf_counter()
            for _ in range(self.n_step):
                self._work()
            self.host.append(time.perf_counter() - began)
            self._hand_out(due)
            time.sleep(self.device_ms / 1e3)
            self.rounds += 1
            due = streams
            if not self.is_deferring:
                self._hand_out(due)
                due = []

    def tell_all(self) -> None:
        """Called when all of a round has been said."""

    def _hand_out(self, streams: list[Stream]) -> None:
        began = time.perf_counter()
        for s in streams:
            if s not in self.streams:
                continue
            if not s.n:
                s.sink(Started(s.id, 0, len(s.request.prompt), 0))
            s.n += WIDTH
            s.sink(Delta(s.id, tuple(range(WIDTH)), " a few words of text"))
            if s.is_cancelled or s.n >= s.request.max_tokens:
                with self._wake:
                    self.streams.remove(s)
                finish: Finish = "cancelled" if s.is_cancelled else "length"
                s.sink(Done(s.id, finish, len(s.request.prompt), s.n, Timings(predicted_n=s.n)))
        self.tell_all()
        if streams:
            self.handing.append(time.perf_counter() - began)
