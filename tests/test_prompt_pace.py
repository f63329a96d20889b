"""Rows of prompts beside decoding slots, and drafts beside them, on simulated machines under requests that come and go."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
from sampling import slow

from pyspec.engine.policy.controller import Controller
from pyspec.engine.policy.costs import Timer
from pyspec.engine.policy.plan import (
    ANEW,
    LEAST,
    PAUSE_MS,
    Prompt,
    PromptRules,
    RoundPlan,
    RoundState,
    no_graph,
)

N_MAX, PROMPT, ANSWER, MOST = 3, 300, 192, 2048


@dataclass
class Part:
    """A request in a slot: tokens to read and to give."""

    to_read: int = PROMPT
    left: int = ANSWER
    started: float = 0.0

    @property
    def is_decoding(self) -> bool:
        return self.to_read <= 0


@dataclass
class Server:
    """So many clients ask again as soon as they are answered. A forward takes `floor` ms or `each` a row, whichever is more.

    mode    "plain", "fixed": drafts always, or "chosen": by the controller
    beside  the controller knows of prompts
    rows    of a forward with decoding slots; 0: by the pace
    host    ms that a forward with prompts takes at least beyond a graph's, because it is none
    launch  ms that the host needs to launch such a forward, beside what the device does
    graph   ms of the graph of one prompt; 0: there is none
    """

    n_slot: int
    chance: float = 0.75
    mode: str = "plain"
    floor: float = 9.0
    each: float = 0.133
    pass_ms: float = 0.4
    beside: bool = True
    rows: int = 0
    host: float = 0.0
    launch: float = 0.0
    graph: float = 0.0
    tpot: float = 0.0

    def __post_init__(self) -> None:
        self.rng = random.Random(3)
        least, graph_of = self.rows or 512, no_graph
        if self.graph:
            graph_of = lambda n: 320 if 96 <= n <= 320 else None  # noqa: E731
        rules = PromptRules(least, self.rows or MOST, self.tpot, graph_of=graph_of)
        self.controller = c = Controller(self.n_slot, N_MAX, chained=True, rules=rules)
        c.force = (0, 0)
        for busy in (1, self.n_slot // 2 or 1, self.n_slot):
            for n in range(N_MAX + 1):
                for _ in range(3):
                    rows = busy * (1 + n)
                    c.timed(rows, self.cost(rows), busy if n else 0, n, self.pass_ms * n)
        c.forget_acceptance()
        self.n_alone = 0
        self.parts = [Part(left=self.rng.randrange(8, ANSWER)) for _ in range(self.n_slot)]
        for i in range(self.n_slot):
            c.begin(i)
        self.ms = self.tokens = 0.0
        self.most_rows, self.gaps, self.firsts = 0, list[float](), list[float]()

    def cost(self, rows: int) -> float:
        return max(self.floor, self.each * rows) + 0.5

    def round(self) -> None:
        c = self.controller
        decoding = [i for i, p in enumerate(self.parts) if p.is_decoding]
        reading = [p for p in self.parts if not p.is_decoding]
        most = N_MAX if self.mode != "plain" else 0
        caps = [(i, min(most, self.parts[i].left - 1)) for i in decoding]
        graphs = [c.rules.graph_of(p.to_read) or 0 if p.to_read == PROMPT else 0 for p in reading]
        prompts = [Prompt(p.to_read, n, p.started) for p, n in zip(reading, graphs, strict=True)]
        state = RoundState(c, caps, prompts, now=self.ms / 1e3)
        made = c.plan(state)
        limit = made.rows if decoding and reading else MOST
        if made.alone is None and not self.beside:
            state = RoundState(c, caps)
            made = c.plan(state)
        c.take(state, made)
        if made.alone is not None:
            self.read_alone(reading[made.alone])
            return
        picked = [n for _, n in made.drafts]
        if self.mode == "fixed":
            picked = [cap for _, cap in caps]
        n_verify = len(decoding) + sum(picked)
        free, work = max(limit - n_verify, limit // 8), list[Part]()
        n_row = n_verify
        for p in reading:
            n = min(p.to_read, free)
            p.to_read, free, n_row = p.to_read - n, free - n, n_row + n
            work += [p] if n else []
        took = self.cost(n_row)
        if n_row > n_verify:
            took = max(took + self.host, self.launch)
        draft_ms = self.pass_ms * max(picked, default=0)
        self.ms += took + draft_ms
        for p in work:
            if p.is_decoding:
                self.firsts.append(self.ms - 1e3 * p.started)
        given = []
        for i, n in zip(decoding, picked, strict=True):
            part = self.parts[i]
            work.append(part)
            k = next((j for j in range(n) if self.rng.random() >= self.chance), n)
            c.record(i, n, k)
            given.append(1 + k)
            part.left -= 1 + k
            self.gaps.append((took + draft_ms) / (1 + k))
            if part.left <= 0:
                self.parts[i] = Part(started=self.ms / 1e3)
                c.begin(i)
        self.tokens += sum(given)
        self.most_rows = max(self.most_rows, n_row)
        c.landed(n_row, took, n_row - n_verify, len(decoding))
        c.gave(given)
        if len(decoding) == len(work):
            live = [n for n in picked if n]
            c.timed(n_row, took, len(live), max(live, default=0), draft_ms)
        else:
            c.timed_beside(took + draft_ms)

    def read_alone(self, part: Part) -> None:
        """A round of one prompt."""
        part.to_read = 0
        self.n_alone += 1
        self.ms += self.graph
        self.firsts.append(self.ms - 1e3 * part.started)
        self.controller.landed_alone(320, self.graph, others=len(self.parts) > 1)
        self.controller.timed_beside(self.graph)

    def rate(self, rounds: int = 1500) -> float:
        """Tokens a second, once the first requests are gone."""
        for _ in range(300):
            self.round()
        self.ms, self.tokens, self.gaps, self.firsts = 0.0, 0.0, [], []
        for part in self.parts:
            part.started = 0.0
        for _ in range(rounds):
            self.round()
        return 1e3 * self.tokens / self.ms


# -- what a row costs ------------------------------------------------------------------------------------------------


def prompts_of(*times: tuple[int, float]) -> Timer:
    """The times of forwards with so many rows of prompts."""
    timer = Timer(sparse=True)
    for n_row, ms in times:
        timer.add(n_row, ms)
    return timer


def test_forwards_of_a_size_take_their_least_whatever_a_few_slow_ones_say() -> None:
    slow = [(n, (20 + 0.1 * n) * (6 if i in (2, 5) else 1)) for n in (100, 400, 2048) for i in range(7)]
    timer = prompts_of(*slow)
    assert [timer(n) for n in (100, 400, 1000, 2048)] == pytest.approx([30, 60, 120, 224.8])
    assert timer.most(120.0) == pytest.approx(1000, abs=1)


def test_forwards_that_take_longer_from_now_on_are_believed_once_they_agree() -> None:
    """Those of one size are not all of the same rows; behind long texts they take longer."""
    timer = prompts_of(*[(n_row, 0.1 * n_row) for n_row in range(300, 2048, 50)])
    for n_row in (1100, 1400, 1150, 1300, 1200):
        timer.add(n_row, 0.3 * n_row)
    assert timer(1200) == pytest.approx(360, rel=0.1) and timer.most(300.0) < 1100


def test_sizes_that_were_not_measured_cost_half_of_the_smallest_and_all_of_the_largest() -> None:
    timer = prompts_of()
    assert not timer.has_trusted
    timer.add(400, 40.0)
    assert timer.has_trusted
    assert [timer(n) for n in (0, 200, 400, 800)] == pytest.approx([20, 30, 40, 80])
    assert [timer.most(ms) for ms in (10.0, 30.0, 80.0)] == [0, 200, 800]


def test_forwards_that_get_cheaper_by_rows_are_no_reason_for_fewer() -> None:
    assert prompts_of((200, 50.0), (400, 40.0), (800, 30.0)).most(50.0) >= 800


# -- rows of a forward -----------------------------------------------------------------------------------------------


def pace_of(each: float, least: int = 512, most: int = MOST, **targets: float) -> Controller:
    c = Controller(4, 0, rules=PromptRules(least, most, **targets))
    for n_row in (50, 100, 300, 600, 1200):
        c.costs.prompts.add(n_row, each * n_row)
    return c


def rows(c: Controller, started: float = 0.0, now: float = 0.0) -> int:
    """Rows of a forward of a slot that decodes and a long prompt."""
    return c.plan(RoundState(c, [(0, 0)], [Prompt(10**6, 0, started)], now=now)).rows


@pytest.mark.parametrize(("each", "n"), [(0.05, MOST), (0.3, int(PAUSE_MS / 0.3)), (3.0, 512)])
def test_a_forward_has_all_rows_that_a_pause_allows_but_at_least_those_of_before(
    each: float, n: int
) -> None:
    assert rows(pace_of(each)) == pytest.approx(n, abs=1)


def test_a_number_that_was_asked_for_stays_and_unknown_costs_limit_nothing() -> None:
    assert rows(pace_of(3.0, 700, 700)) == 700
    assert rows(Controller(1, 0, rules=PromptRules(512, MOST))) == MOST


def test_a_target_for_output_tokens_makes_forwards_smaller_and_credit_makes_them_larger() -> None:
    c = pace_of(0.1, tpot=20.0)
    assert rows(c) == pytest.approx(200, abs=1)
    for _ in range(50):
        c.landed(8, 10.0, 0, 1)
        c.gave([1])
    assert rows(c) > 600
    for _ in range(50):
        c.landed(8, 90.0, 0, 1)
    assert rows(c) == 1 + LEAST


def test_a_prompt_that_waited_for_half_of_its_time_takes_all_rows() -> None:
    c = pace_of(0.1, tpot=20.0, ttft=300.0)
    assert rows(c, 1.0, now=1.1) < 300
    assert rows(c, 1.0, now=1.2) == MOST


# -- a server --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_slot", [8, 32, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("each", "host"), [(0.133, 0.0), (0.1, 15.0)])
def test_by_default_no_fixed_number_of_rows_is_much_better(
    n_slot: int, each: float, host: float
) -> None:
    own = Server(n_slot, each=each, host=host).rate(800)
    fixed = {
        rows: Server(n_slot, each=each, host=host, rows=rows).rate(800) for rows in (512, 1024, 2048)
    }
    assert own > 0.95 * max(fixed.values()), (own, fixed)


@pytest.mark.parametrize("n_slot", [1, 8, pytest.param(64, marks=pytest.mark.slow)])
def test_bad_drafts_cost_nothing_beside_prompts(n_slot: int) -> None:
    plain = Server(n_slot).rate(800)
    assert Server(n_slot, 0.05, "chosen").rate(800) > 0.98 * plain


@pytest.mark.parametrize(
    ("n_slot", "chance"),
    [(8, 0.9), *(slow(*case) for case in ((8, 0.5), (8, 0.75), (32, 0.75), (64, 0.5), (64, 0.9)))],
)
def test_drafts_beside_prompts_are_as_many_as_pay(n_slot: int, chance: float) -> None:
    own = Server(n_slot, chance, "chosen").rate(800)
    assert own > 0.98 * Server(n_slot, chance, "chosen", beside=False).rate(800)
    assert own > 0.97 * max(Server(n_slot, chance, mode).rate(800) for mode in ("plain", "fixed"))


def test_a_target_for_output_tokens_holds_in_the_mean() -> None:
    slow, free = (Server(64, each=0.3, tpot=tpot) for tpot in (33.0, 0.0))
    for server in (slow, free):
        server.rate(600)
    mean, without = (sum(server.gaps) / len(server.gaps) for server in (slow, free))
    assert mean < 34 < without


FOUR_CARDS = {"floor": 4.5, "each": 0.046, "launch": 62.0}  # a 27B model, milliseconds
ONE_CARD = {"floor": 11.0, "each": 0.111, "launch": 43.0}


@pytest.mark.parametrize("mode", ["plain", "chosen"])
@pytest.mark.parametrize("n_slot", [8, 30, pytest.param(64, marks=pytest.mark.slow)])
def test_prompts_run_alone_where_the_host_launches_slowly(n_slot: int, mode: str) -> None:
    together = Server(n_slot, mode=mode, **FOUR_CARDS)  # type: ignore[arg-type]
    apart = Server(n_slot, mode=mode, graph=19.0, **FOUR_CARDS)  # type: ignore[arg-type]
    assert apart.rate() > 1.1 * together.rate() and apart.n_alone > 30


@pytest.mark.parametrize("mode", ["plain", "chosen"])
@pytest.mark.parametrize("n_slot", [8, 30, pytest.param(64, marks=pytest.mark.slow)])
def test_prompts_alone_cost_nothing_where_the_device_is_the_limit(n_slot: int, mode: str) -> None:
    together = Server(n_slot, mode=mode, **ONE_CARD)  # type: ignore[arg-type]
    apart = Server(n_slot, mode=mode, graph=39.0, **ONE_CARD)  # type: ignore[arg-type]
    assert apart.rate() > 0.98 * together.rate()


def lone(most: int = MOST, **targets: float) -> Controller:
    """Prompts of 96 to 320 tokens have a graph of 320 rows."""
    graph_of = lambda n: 320 if 96 <= n <= 320 else None  # noqa: E731
    return Controller(8, 0, rules=PromptRules(min(512, most), most, graph_of=graph_of, **targets))


def picked(
    c: Controller, whole: list[int], n_other: int, n_verify: int, ms: float, **now: float
) -> RoundPlan:
    """The plan of a round of prompts that wait as a whole and of others, beside slots that take `ms` by themselves."""
    c.costs.verify = Timer()
    for _ in range(2 if n_verify else 0):
        c.costs.verify.add(n_verify, ms)
    prompts = [Prompt(n, c.rules.graph_of(n) or 0) for n in whole]
    prompts += [Prompt(n_other)] if n_other else []
    return c.plan(RoundState(c, [(slot, 0) for slot in range(n_verify)], prompts, **now))


def test_a_prompt_alone_is_chosen_by_measured_times() -> None:
    c = lone()

    def pick(whole: list[int], n_other: int, n_verify: int, ms: float) -> int | None:
        return picked(c, whole, n_other, n_verify, ms).alone

    assert pick([300], 0, 8, 5.0) is None, "nothing is known of a forward for all"
    c.costs.prompts.add(308, 62.0)
    assert pick([50], 0, 8, 5.0) is None, "there is no graph"
    assert pick([300], 0, 0, 0.0) is None, "it is alone in any case"
    assert pick([50, 400, 300], 0, 8, 5.0) == 2, "one round tells"
    c.landed_alone(320, 20.0, others=True)
    assert pick([300], 0, 8, 5.0) == 0
    assert pick([300], 0, 8, 45.0) is None, "a round of the decoding slots behind is too much"
    assert pick([300], 200, 8, 5.0) is None, "a forward for the other prompts is needed anyway"
    assert pick([300] * 2, 0, 8, 5.0) == 0 and pick([300] * 3, 0, 8, 5.0) is None
    c.costs.prompts.add(2048, 95.0)
    assert pick([300] * 20, 0, 8, 5.0) is None and pick([100] * 3, 0, 8, 5.0) is None
    c.rules = replace(c.rules, most=512)
    assert pick([300] * 8, 0, 8, 5.0) is None, "the operator fixed the rows"
    c.rules = replace(c.rules, least=256)
    assert pick([300] * 8, 0, 8, 5.0) == 0, "forwards of 512 rows take several"
    c.rested = PAUSE_MS - 10
    assert pick([300], 0, 8, 5.0) is None, "others have waited enough"
    c.rested = PAUSE_MS - 30
    assert pick([300], 0, 8, 5.0) == 0
    assert picked(c, [300], 0, 8, 5.0, under_way=320).alone is None, "nor beside one that is under way"


def test_one_forward_for_all_is_measured_anew_at_times() -> None:
    c, found = lone(), []
    c.costs.prompts.add(308, 62.0)
    c.landed_alone(320, 20.0, others=False)
    for _ in range(2 * ANEW):
        state = RoundState(c, [(slot, 0) for slot in range(8)], [Prompt(300, 320)])
        made = c.plan(state)
        found.append(made.alone)
        c.take(state, made)
    assert found == [*[0] * (ANEW - 1), None] * 2


def test_prompts_alone_keep_the_operators_targets() -> None:
    c = lone(tpot=20.0)
    c.costs.prompts.add(308, 62.0)
    c.costs.alone.add(320, 15.0)
    assert picked(c, [300], 0, 8, 5.0).alone == 0
    c.landed_alone(320, 15.0, others=True)
    assert c.balance == -15.0 and c.rested == 15.0
    assert picked(c, [300], 0, 8, 5.0).alone is None, "5 ms are left"
    c.landed(8, 5.0, 0, 1)
    assert c.rested == 0.0 and c.balance == 0.0
    c.landed_alone(320, 15.0, others=False)
    assert c.balance == 0.0 and c.rested == 0.0, "only lone prompts"
    soon = lone(ttft=1000.0)
    soon.costs = c.costs
    assert picked(soon, [300], 0, 8, 5.0, now=0.4).alone == 0
    assert picked(soon, [300], 0, 8, 5.0, now=0.6).alone is None, "it is urgent"


def test_a_long_prompt_goes_on_while_short_ones_run_alone() -> None:
    """What decoding slots are owed falls in their rounds, also where each stands between rounds of a prompt alone."""
    c = Controller(8, 0)
    c.owed = c.chunk_ms = 300.0
    for _ in range(20):
        c.landed(8, 20.0, 0, 8)
        c.timed(8, 20.0, 0, 0, 0.0)
        c.landed_alone(320, 20.0, others=True)
        c.timed_beside(20.0)
    assert c.owed <= 0
