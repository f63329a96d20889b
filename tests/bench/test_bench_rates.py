"""Every combination of streams, prompts and answers gives a rate, or one line that says why there is none."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace

import pytest

from pyspec.bench.session import Plan, bench
from pyspec.request import Delta, Done, EngineInfo, Event, Finish, Metrics, Request, Timings
from pyspec.server.engine import Sink

N_VOCAB = 977


class Staggered:
    """An engine that reads prompts in turn, `joins` of them a round, and gives every stream that has begun `width` tokens a round.

    n_side  streams that have room side by side; ends: tokens after which a stream ends by itself, 0: it does not
    """

    def __init__(
        self, *, joins: float, width: int, n_ctx: int, n_side: int = 1 << 20, ends: int = 0
    ) -> None:
        self.joins, self.width, self.n_side, self.ends = joins, width, n_side, ends
        self.info = EngineInfo(
            model_name="staggered", model_path="", arch="fake", n_vocab=N_VOCAB, n_ctx=n_ctx, n_ctx_train=n_ctx, n_slot=64,
            n_embd=1, n_params=1, n_bytes=1, file_type="F32", device="cpu", drafter="fake", n_overhang=7,
            n_row=min(n_side, 64) * (n_ctx + 7),
        )  # fmt: skip
        self.asked: list[tuple[Request, Sink]] = []
        self.rounds, self.n_want = 0, 0
        self.lengths: list[int] = []  # tokens that turns asked for

    def turn(self, n: int) -> None:
        self.n_want = n

    def submit(self, request: Request, sink: Sink) -> str:
        self.asked.append((request, sink))
        if len(self.asked) == self.n_want:
            asked, self.asked = self.asked, []
            self.lengths.append(request.max_tokens)
            threading.Thread(target=self.play, args=(asked,)).start()
        return f"r{len(self.asked)}"

    def cancel(self, name: str) -> None:
        pass

    def metrics(self) -> Metrics:
        return Metrics(rounds=self.rounds)

    def play(self, asked: list[tuple[Request, Sink]]) -> None:
        waiting, running, begun = list(asked), list[list[object]](), 0.0
        while waiting or running:
            self.rounds, begun = self.rounds + 1, begun + self.joins
            while waiting and len(running) < self.n_side and begun >= 1:
                running.append([*waiting.pop(0), 0])
                begun -= 1
            for stream in list(running):
                request, sink, n = stream
                most = min(request.max_tokens, self.info.n_ctx - len(request.prompt))
                new = min(self.width, min(most, self.ends or most) - n)
                stream[2] = n + new
                self.tell(sink, Delta("r", (3,) * new, "x"))
                if stream[2] >= min(most, self.ends or most):
                    running.remove(stream)
                    finish: Finish = "eos" if self.ends and self.ends < most else "length"
                    self.tell(
                        sink, Done("r", finish, len(request.prompt), stream[2], Timings(n_rounds=1))
                    )

    @staticmethod
    def tell(sink: Sink, event: Event) -> None:
        sink(event)


def rates(engine: Staggered, n: int, n_predict: int, n_prompt: int) -> list[str]:
    """The lines about two turns, plain and drafted."""
    engine.turn(n)
    lines: list[str] = []
    plan = Plan(
        streams=(n,), turns=2, n_prompt=n_prompt, n_predict=n_predict, random_prompts=True, warm_up=False
    )
    runs = bench(engine, plan, lines.append).runs  # type: ignore[arg-type]
    assert len(runs) == len(lines) == 4 and all("\n" not in line for line in lines)
    return lines


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("n", "n_predict", "n_prompt", "width"),
    [
        (32, 200, 300, 6),
        (33, 4, 17, 16),
        (1, 4, 16, 65),
        (7, 5, 51, 1),
        (64, 128, 301, 3),
        (13, 9, 99, 4),
    ],
)
@pytest.mark.parametrize("joins", [1 / 3, 1.0, 2.5, 64.0])
def test_a_rate_comes_of_answers_as_long_as_it_takes(
    n: int, n_predict: int, n_prompt: int, width: int, joins: float
) -> None:
    engine = Staggered(joins=joins, width=width, n_ctx=20011)
    for line in rates(engine, n, n_predict, n_prompt):
        assert "tokens/s" in line and "no rate" not in line, line
        if "answers of" in line:
            assert f"of {n_predict}," in line
            assert f"of {n} streams had begun when the first one ended" in line
    assert max(engine.lengths) <= 4 * (n_predict + n / joins * width + 4 * width), (
        "longer answers than it takes"
    )
    if joins == 64.0 and n_predict > 4 * width:
        assert set(engine.lengths) == {n_predict}


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("n_predict", [4, 200, 5000])
def test_where_there_is_no_room_for_longer_answers_it_says_so(n_predict: int) -> None:
    full = Staggered(joins=1 / 40, width=5, n_ctx=331)
    for line in rates(full, 32, n_predict, 300):
        assert "no rate (" in line
        assert "of 32 streams had begun when the first one ended" in line
        assert "a larger -c or --kv-pool" in line
    waits = Staggered(joins=3.0, width=5, n_ctx=4001, n_side=19)
    for line in rates(waits, 32, n_predict, 16):
        assert "19 of 32 streams had begun" in line or "tokens/s" not in line, line
    assert max(waits.lengths) <= max(n_predict, 4001), (
        "longer answers do not help those that wait for room"
    )


def test_a_text_that_ended_is_not_asked_for_longer_ones() -> None:
    engine = Staggered(joins=1.0, width=3, n_ctx=4001, ends=11)
    lines = rates(engine, 32, 200, 16)
    assert set(engine.lengths) == {200}
    assert all(
        "no rate (" in line and "after 11 tokens; --ignore-eos continues" in line for line in lines
    )


def test_all_of_few_combinations_say_something() -> None:
    for n, n_predict, n_prompt, joins, width in itertools.product(
        (1, 5, 31), (4, 33), (16, 77), (0.4, 9.0), (1, 7)
    ):
        engine = Staggered(joins=joins, width=width, n_ctx=709)
        for line in rates(engine, n, n_predict, n_prompt):
            assert ("tokens/s" in line) != ("no rate (" in line)
    assert replace(engine.info).n_ctx == 709
