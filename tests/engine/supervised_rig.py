"""Supervised engines without a model (fake_engine_main.py): their planned failures, and listeners that check every event."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import waiting
from engine_rig import FIXTURES
from fake_engine_main import token_at

from pyspec.engine.api import Engine
from pyspec.request import Delta, Done, Event, Failed, Progress, Request, SamplingParams, Started

PATH = FIXTURES / "qwen35.gguf"
CHILD = Path(__file__).with_name("fake_engine_main.py")
PARAMS = SamplingParams(seed=5)


class Plants:
    """Planned failures of the next engines (see fake_engine_main.py)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def plant(self, **what: str) -> None:
        for name, text in what.items():
            new = self.folder / f"{name}.new"
            new.write_text(text)
            new.rename(self.folder / name)

    def heal(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)


class Ear:
    """One request's listener. It checks each event against the expected text."""

    def __init__(
        self, engine: Engine, prompt: Sequence[int] = (1, 2), n: int = 200, **values: object
    ) -> None:
        self.request = Request(**{"prompt": tuple(prompt), "params": PARAMS, "max_tokens": n} | values)  # type: ignore[arg-type]
        self.events: list[Event] = []
        self.over = threading.Event()
        self.engine = engine
        self.name = engine.submit(self.request, self.hear)

    def hear(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Done | Failed):
            self.over.set()

    @property
    def tokens(self) -> list[int]:
        return [t for e in self.events if isinstance(e, Delta) for t in e.tokens]

    @property
    def text(self) -> str:
        return "".join(e.text for e in self.events if isinstance(e, Delta))

    def wait(self) -> Event:
        assert self.over.wait(60), "the request never ended"
        return self.events[-1]

    def check(self) -> Done:
        """It ended well, and every token was delivered once."""
        done = self.wait()
        assert isinstance(done, Done), done
        n = self.request.max_tokens
        assert self.tokens == [token_at(self.request.prompt, i, PARAMS.seed) for i in range(n)]
        assert self.text == self.engine.tokenizer.decode(self.tokens)
        assert (done.finish, done.n_prompt, done.n_predicted) == ("length", len(self.request.prompt), n)
        assert done.timings.predicted_n == n
        assert sum(isinstance(e, Started) for e in self.events) == 1, (
            "it is seated once, as far as clients know"
        )
        assert sum(isinstance(e, Progress) for e in self.events) == 1
        return done


wait_for = partial(waiting.wait_for, seconds=30.0)
