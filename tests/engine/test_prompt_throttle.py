"""A long prompt takes as much time from decoding slots as one of them has, by a clock that advances by the cost of rounds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from engine_rig import Heard, Rig, fake_rig

from pyspec.engine.policy import plan
from pyspec.engine.policy.plan import PromptRules

PLAIN_MS, ROW_MS = 10.0, 0.066  # of a round, and of each row of a prompt in it
LONG, FREE, UB = 1024, 256, 128


@pytest.fixture(autouse=True)
def shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "LONG", LONG)


class Machine:
    """A loop whose clock advances in forwards only. Each round: when it landed, its prompt rows, and its decoding slots."""

    def __init__(self, n_slot: int, weight: float, cost: float = ROW_MS) -> None:
        self.rig: Rig = fake_rig(n_slot, ctx=8192, ubatch=UB)
        self.now, self.rounds = 0.0, list[tuple[float, int, int]]()
        loop = self.rig.loop
        loop.controller.rules = PromptRules(UB, UB, weight=weight, n_free=FREE)
        loop.clock = lambda: self.now
        launch = loop.worker.launch

        def timed(round_: object) -> object:
            widths = [seq.width for seq in round_.seqs]  # type: ignore[attr-defined]
            decoding = sum(not (seq.n_out == 0 or seq.width > 1) for seq in round_.seqs)  # type: ignore[attr-defined]
            n_prompt = sum(widths) - decoding
            self.now += 1e-3 * (PLAIN_MS + cost * n_prompt)
            self.rounds.append((self.now, n_prompt, decoding))
            return launch(round_)

        loop.worker.launch = timed  # type: ignore[method-assign,assignment]

    def decode(self, n: int) -> list[Heard]:
        """`n` streams without an end, past their prompts."""
        found = [self.rig.submit([5 + i, 6, 7], 6000) for i in range(n)]
        self.rig.steps(10)
        assert all(h.job.is_decoding for h in found)
        self.rounds.clear()
        return found

    def read(self, n: int, *, until: int = 100_000) -> tuple[float, Heard]:
        """Seconds until a prompt of n tokens has been read, and the request."""
        began, heard = self.now, self.rig.submit(prompt(n), 1)
        for _ in range(until):
            if heard.over:
                return self.now - began, heard
            self.rig.loop.step()
        raise AssertionError("it is never read")


def prompt(n: int) -> Sequence[int]:
    return [20 + i % 200 for i in range(n)]


def slowdown(rounds: Sequence[tuple[float, int, int]]) -> float:
    """Slowdown of the decoding slots while the long part of a prompt is read: one minus their rate over their rate alone."""
    read = 0
    behind = []
    for at, n_prompt, _ in rounds:
        read += n_prompt
        if read > FREE:
            behind.append(at)
    return 1 - (len(behind) - 1) * 1e-3 * PLAIN_MS / (behind[-1] - behind[0])


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("cost", [ROW_MS, 0.2])
def test_eight_streams_lose_a_ninth_to_a_long_prompt_whatever_a_row_costs(cost: float) -> None:
    machine = Machine(9, weight=1.0, cost=cost)
    machine.decode(8)
    machine.read(3000)
    assert 0.09 < slowdown(machine.rounds) < 0.13
    largest = max(n for _, n, _ in machine.rounds)
    assert largest <= UB and all(decoding == 8 for _, _, decoding in machine.rounds), (
        "all go on in every round"
    )


def test_one_stream_and_a_long_prompt_have_half_each() -> None:
    machine = Machine(2, weight=1.0)
    machine.decode(1)
    machine.read(6000)
    assert 0.42 < slowdown(machine.rounds) < 0.55


def test_a_weight_of_none_reads_as_fast_as_it_can() -> None:
    machine, limited = Machine(9, weight=0.0), Machine(9, weight=1.0)
    machine.decode(8)
    limited.decode(8)
    fast, slow = machine.read(2500)[0], limited.read(2500)[0]
    assert slowdown(machine.rounds) > 0.4 and slow > 3 * fast
    assert sum(n > 0 for _, n, _ in machine.rounds) == len(machine.rounds), "no round without some of it"


def test_more_weight_reads_faster() -> None:
    took = []
    for weight in (0.5, 1.0, 3.0):
        machine = Machine(9, weight=weight)
        machine.decode(8)
        took.append(machine.read(2000)[0])
    assert took[0] > 1.5 * took[1] and took[1] > 1.5 * took[2]


def test_short_prompts_and_the_beginning_of_long_ones_do_not_rest() -> None:
    machine = Machine(9, weight=1.0)
    machine.decode(8)
    machine.read(LONG)
    assert all(n for _, n, _ in machine.rounds[:-1])
    machine.rounds.clear()
    machine.read(5000)
    read = n_free = 0
    for _, n, _ in machine.rounds:
        if not n:
            break
        read, n_free = read + n, n_free + 1
    assert read >= FREE, "its first rows come one piece behind the other"


def test_a_short_one_is_read_while_a_long_one_rests() -> None:
    machine = Machine(10, weight=1.0)
    machine.decode(8)
    long = machine.rig.submit(prompt(6000), 1)
    for _ in range(200):
        if machine.rig.loop.controller.n_paused:
            break
        machine.rig.loop.step()
    began = machine.now
    short = machine.rig.submit(list(range(30, 90)), 1)
    for _ in range(20):
        if short.over:
            break
        machine.rig.loop.step()
    assert short.over and machine.now - began < 0.05 and not long.over


def test_nobody_rests_where_nobody_decodes() -> None:
    machine = Machine(4, weight=1.0)
    machine.read(6000)
    assert all(n for _, n, _ in machine.rounds[:-1])
    streams = machine.decode(3)
    heard = machine.rig.submit(prompt(6001)[1:], 1)
    for _ in range(200):
        if machine.rig.loop.controller.n_paused:
            break
        machine.rig.loop.step()
    assert machine.rig.loop.controller.n_paused == 1
    for stream in streams:
        stream.job.cancelled = True
    machine.rounds.clear()
    for _ in range(200):
        if heard.over:
            break
        machine.rig.loop.step()
    assert heard.over and all(n for _, n, _ in machine.rounds[2:-1]), "who is alone has everything"


def test_texts_do_not_depend_on_rests() -> None:
    texts = []
    for weight in (0.0, 1.0):
        machine = Machine(5, weight=weight)
        streams = machine.decode(4)
        _, heard = machine.read(5000)
        machine.rig.steps(60)
        texts.append(([h.tokens[:300] for h in streams], heard.tokens))
    n = min(len(t) for own, _ in texts for t in own)
    assert [t[:n] for t in texts[0][0]] == [t[:n] for t in texts[1][0]] and texts[0][1] == texts[1][1]


def test_rounds_run_ahead_while_a_long_prompt_rests() -> None:
    machine = Machine(4, weight=1.0)
    machine.decode(3)
    loop = machine.rig.loop
    machine.rig.submit(prompt(6000), 1)
    while not loop.controller.n_paused:
        loop.step()
    machine.rig.run_ahead()
    n_ahead = 0
    for _ in range(20):
        loop.step()
        loop.controller.owed = 1000.0
        assert loop.controller.n_paused == 1
        n_ahead += loop.lookahead.under_way is not None
    assert n_ahead == 20
    loop.controller.owed = 0.0
    machine.rounds.clear()
    for _ in range(2):
        loop.step()
    assert machine.rounds[-1][1] > 0, "it goes on"
