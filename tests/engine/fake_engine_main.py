"""An engine process without a model: pyspec.engine.process.engine_main over a core with a known text. Starts in a moment.

`python fake_engine_main.py FOLDER DESCRIPTOR`. Files in FOLDER plan its failures:
load      at every load: "exit N", "refuse TEXT", "none TEXT", "sleep S"; "bug", "memory", "gone" (the device), each with its TEXT;
          "wait": make the file "waits", and load once that is removed
park, wake  at every park or wake: "sleep S", "refuse TEXT"
room      tokens a request may hold if no number is given
round     in the next round, once: "abort", "endless", "fatal TEXT", "host TEXT", "kernel MODULE"
hold      "N": no request goes on behind so many tokens while the file is there, however long what is tested takes
poison    "TOKEN N": abort when a request with that token in its prompt has generated N tokens
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

from pyspec.config import EngineSettings
from pyspec.cuda.checker import EXAMINATION
from pyspec.engine.process import engine_main
from pyspec.errors import DeviceError, HostLost, NoDevice, PyspecError
from pyspec.gguf import open_gguf
from pyspec.request import (
    Delta,
    Done,
    EngineInfo,
    Event,
    Finish,
    Metrics,
    Progress,
    Request,
    SlotInfo,
    Started,
    Timings,
)
from pyspec.text.stream import TextStream
from pyspec.text.tokenizer import Tokenizer

FOLDER = Path(sys.argv[1]) if len(sys.argv) > 2 else Path()
ROUND_S = 0.002
N_CTX, N_VOCAB = 4096, 300


def token_at(prompt: tuple[int, ...], position: int, seed: int) -> int:
    """The token at a position, for any tokens before: letters, mostly."""
    return 33 + (sum(prompt) * 7 + ((position + 1) * 2654435761 >> 9) + seed) % 60


@dataclass
class Job:
    name: str
    request: Request
    seed: int
    stream: TextStream
    tokens: list[int] = field(default_factory=list)
    is_seated: bool = False
    cancelled: bool = False
    n_before: int = 0


class FakeCore:
    def __init__(
        self,
        path: Path,
        settings: EngineSettings,
        hand_over: Callable,
        on_death: Callable[[PyspecError], None],
    ) -> None:
        self.tokenizer = Tokenizer.from_metadata(open_gguf(path).metadata)
        self.np, self.hand_over, self.on_death = settings.np, hand_over, on_death
        self.info = EngineInfo(
            model_name="fake", model_path=str(path), arch="fake", n_vocab=N_VOCAB, n_ctx=settings.ctx or int(told("room") or N_CTX), n_ctx_train=N_CTX,
            n_slot=settings.np, n_embd=1, n_params=1, n_bytes=1, file_type="", device="cpu", drafter="none", n_row=1 << 20,
            draft_note=",".join(settings.demoted) + ("examined" if EXAMINATION.is_on else ""),
        )  # fmt: skip
        self.step_began, self.pace = 0.0, SimpleNamespace(expected=0.001)
        self.jobs: list[Job] = []
        self.n_done = 0
        self.news = threading.Condition()
        threading.Thread(target=self.run, daemon=True).start()

    @classmethod
    def load(
        cls,
        path: Path,
        settings: EngineSettings,
        *,
        hand_over: Callable,
        on_death: Callable,
        on_blocks: Callable | None = None,
        file: object = None,
    ) -> FakeCore:
        what, _, how = told("load").partition(" ")
        if what == "exit":
            os._exit(int(how))
        if what == "refuse":
            raise DeviceError(how)
        if what == "bug":
            raise ZeroDivisionError(how)
        if what == "memory":
            raise MemoryError(how)
        if what == "gone":
            raise RuntimeError(f"Triton Error [CUDA]: {how}")
        if what == "none":
            raise NoDevice(how)
        if what == "wait":
            (FOLDER / "waits").touch()
            while (FOLDER / "waits").exists():
                time.sleep(0.01)
        if what == "sleep":
            time.sleep(float(how))
        return cls(path, settings, hand_over, on_death)

    def submit(self, request: Request, sink: object, *, name: str, seed: int) -> None:
        job = Job(name, request, seed, TextStream(self.tokenizer, request.stop), list(request.resumed))
        job.n_before = len(job.tokens)
        job.stream.push(job.tokens)
        with self.news:
            self.jobs.append(job)
            self.news.notify()

    def park(self) -> None:
        assert not self.jobs
        self.move("park")

    def wake(self) -> None:
        self.move("wake")

    def move(self, to: str) -> None:
        what, _, how = told(to).partition(" ")
        if what == "sleep":
            time.sleep(float(how))
        if what == "refuse":
            raise DeviceError(how)

    def cancel(self, name: str) -> None:
        for job in self.jobs:
            job.cancelled = job.cancelled or job.name == name

    def run(self) -> None:
        while True:
            with self.news:
                while not self.jobs:
                    self.news.wait()
            self.step_began = time.monotonic()
            for job in [j for j in self.jobs if not j.is_seated][
                : self.np - sum(j.is_seated for j in self.jobs)
            ]:
                job.is_seated = True
                n = len(job.request.prompt)
                self.tell(Started(job.name, 0, n, 0), Progress(job.name, n, 0, n, 1.0))
            self.suffer()
            time.sleep(ROUND_S)
            events: list[Event] = []
            for job in list(self.jobs):
                events += self.round(job) if job.is_seated or job.cancelled else []
            self.step_began = 0.0
            self.tell(*events)

    def round(self, job: Job) -> list[Event]:
        request, finish = job.request, None
        most = min(request.max_tokens, int(told("hold") or request.max_tokens)) - len(job.tokens)
        new = [token_at(request.prompt, len(job.tokens) + i, job.seed) for i in range(min(2, most))]
        released = job.stream.push(new)
        new, finish = new[: released.n_tokens_used], "stop" if released.stopped else None
        job.tokens += new
        text, end = released.text, finish
        if len(job.tokens) >= request.max_tokens and not end:
            end = "length"
            text += job.stream.flush()
        if job.cancelled:
            end = "cancelled"
        events: list[Event] = [Delta(job.name, tuple(new), text, (), 1, len(new) - 1)] if new else []
        if end is not None:
            self.jobs.remove(job)
            self.n_done += 1
            timings = Timings(
                predicted_n=len(job.tokens) - job.n_before, n_rounds=1, n_draft_used=(0, 1)
            )
            finished: Finish = end  # type: ignore[assignment]
            n_prompt = len(request.prompt)
            events.append(Done(job.name, finished, n_prompt, len(job.tokens), timings, released.stopped))
        return events

    def suffer(self) -> None:
        token, _, n = told("poison").partition(" ")
        if token and any(
            int(token) in j.request.prompt and len(j.tokens) >= int(n) for j in self.jobs if j.is_seated
        ):
            os.abort()
        what, _, how = told("round").partition(" ")
        if what:
            (FOLDER / "round").unlink()
        if what == "abort":
            os.abort()
        while what == "endless":
            time.sleep(0.01)
        if what == "host":
            self.on_death(HostLost(how))
        if what in ("fatal", "kernel"):
            EXAMINATION.under_way = (how,) if what == "kernel" else ()
            self.on_death(DeviceError(f"the device is gone: {how}"))

    def tell(self, *events: Event) -> None:
        if events:
            self.hand_over([(None, event) for event in events])

    def slots(self) -> list[SlotInfo]:
        return [
            SlotInfo(slot=i, n_ctx=self.info.n_ctx, is_processing=i < len(self.jobs))
            for i in range(self.np)
        ]

    def metrics(self) -> Metrics:
        return Metrics(requests_done=self.n_done, requests_processing=len(self.jobs))


def told(what: str) -> str:
    try:
        return (FOLDER / what).read_text()
    except FileNotFoundError:
        return ""


if __name__ == "__main__":
    module = ModuleType("pyspec.engine.process.core")
    module.EngineCore = FakeCore  # type: ignore[attr-defined]
    sys.modules["pyspec.engine.process.core"] = module
    engine_main.cpu_library = lambda: None  # torch's library, which only a model needs
    engine_main.main(int(sys.argv[2]))
