"""Requests of many conversations over many replicas, on paper: how much of the prompts is cached, and how even the load is, by policy.

`python tools/simulate_routing.py --replicas 64`. The trace is made from a seed: conversations of agents that share system prompts, with
turns that come after a pause. A replica has slots, a queue, a cache of blocks that forgets the oldest ends of texts, and times of a
forward as assumed below. The choice `affinity` is the server's own (pyspec/engine/policy/affinity.py); no engine runs.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pyspec.engine.policy.affinity import BLOCK, Affinity, KnownTexts

PROMPT_RATE = 8000.0  # prompt tokens a second of a replica
ROUND_S, SLOT_S = 0.012, 0.0006  # seconds of a round, and more for each busy slot
PER_ROUND = 2.7  # tokens of a slot
N_AGENT = 24


@dataclass
class Turn:
    """One request. keys: blocks of its prompt; the answer's blocks follow in the next turn's."""

    conversation: int
    client: int
    keys: list[int]
    n_answer: int
    pause: float  # seconds before it, behind the last answer


@dataclass
class Replica:
    """slots free, requests that wait, and what its cache holds."""

    free: int
    cache: KnownTexts
    waiting: deque[tuple[float, Turn]] = field(default_factory=deque)
    busy_until: float = 0.0  # prompts are read one after the other
    n_open: int = 0
    seconds: float = 0.0  # of work


def trace(n: int, seed: int) -> list[list[Turn]]:
    """`n` conversations."""
    draw = random.Random(seed)
    fresh = iter(range(10**9))
    systems = [
        [next(fresh) for _ in range(int(draw.lognormvariate(4.2, 0.8)) + 4)] for _ in range(N_AGENT)
    ]
    conversations = []
    for i in range(n):
        agent = min(int(draw.paretovariate(0.9)) - 1, N_AGENT - 1)  # few agents have most of the traffic
        text, turns = list(systems[agent]), []
        for _ in range(1 + min(int(draw.expovariate(1 / 6)), 30)):
            text += [next(fresh) for _ in range(1 + int(draw.lognormvariate(2.2, 1.0)))]
            n_answer = 20 + int(draw.lognormvariate(5.0, 0.8))
            turns.append(Turn(i, agent * 7 + i % 7, list(text), n_answer, draw.expovariate(1 / 12)))
            text += [next(fresh) for _ in range(n_answer // BLOCK)]
        conversations.append(turns)
    return conversations


Choice = Callable[[Turn, Sequence[int]], int]
"""The replica of a request, by the open requests of each."""


def choices(n: int, n_slot: int, n_block: int) -> dict[str, Choice]:
    """The policies, by name."""
    affinity = Affinity(n, n_block, n_slot)
    longest = [KnownTexts(n_block) for _ in range(n)]
    turns = iter(range(10**9))

    def by_affinity(turn: Turn, n_open: Sequence[int]) -> int:
        i = affinity.order(turn.keys, n_open)[0]
        affinity.chose(i, turn.keys)
        return i

    def by_prefix(turn: Turn, n_open: Sequence[int]) -> int:
        i = min(range(n), key=lambda i: (-longest[i].n_known(turn.keys), n_open[i]))
        longest[i].add(turn.keys)
        return i

    return {
        "in turn": lambda turn, n_open: next(turns) % n,
        "fewest open requests": lambda turn, n_open: min(range(n), key=lambda i: n_open[i]),
        "hash of the client": lambda turn, n_open: hash((turn.client, 77)) % n,
        "hash of the conversation": lambda turn, n_open: hash((turn.conversation, 77)) % n,
        "longest prefix, whatever the load": by_prefix,
        "affinity": by_affinity,
    }


@dataclass(frozen=True)
class Outcome:
    """hits: share of prompt tokens; spread: work of the busiest replica relative to the mean; waits: seconds to the first token, sorted."""

    hits: float
    spread: float
    waits: list[float]

    def wait(self, share: float) -> float:
        return self.waits[min(int(share * len(self.waits)), len(self.waits) - 1)]


def run(conversations: list[list[Turn]], choose: Choice, args: argparse.Namespace) -> Outcome:
    """Play the trace."""
    draw = random.Random(5)
    n_block = args.cache // BLOCK
    replicas = [Replica(args.np, KnownTexts(n_block)) for _ in range(args.replicas)]
    events: list[
        tuple[float, int, str, int, Turn]
    ] = []  # time, number, what, replica or index of the turn, turn
    number, at = 0, 0.0
    for turns in conversations:
        at += draw.expovariate(args.rate)
        heapq.heappush(events, (at, number := number + 1, "come", 0, turns[0]))
    n_hit = n_token = 0
    waits: list[float] = []
    index = [0] * len(conversations)

    def seat(i: int, now: float, came: float, turn: Turn) -> None:
        nonlocal number, n_hit, n_token
        r = replicas[i]
        r.free -= 1
        n = len(turn.keys) * BLOCK
        known = min(r.cache.n_known(turn.keys), n - 1)
        r.cache.add(turn.keys)
        n_hit, n_token = n_hit + known, n_token + n
        read = (n - known) / PROMPT_RATE
        first = max(now, r.busy_until) + read
        r.busy_until = first
        write = turn.n_answer / PER_ROUND * (ROUND_S + SLOT_S * (args.np - r.free))
        r.seconds += read + write
        waits.append(first - came)
        heapq.heappush(events, (first + write, number := number + 1, "end", i, turn))

    while events:
        now, _, what, i, turn = heapq.heappop(events)
        if what == "come":
            i = choose(turn, [r.n_open for r in replicas])
            replicas[i].n_open += 1
            if replicas[i].free:
                seat(i, now, now, turn)
            else:
                replicas[i].waiting.append((now, turn))
            continue
        r = replicas[i]
        r.free, r.n_open = r.free + 1, r.n_open - 1
        if r.waiting:
            seat(i, now, *r.waiting.popleft())
        turns = conversations[turn.conversation]
        index[turn.conversation] += 1
        if index[turn.conversation] < len(turns):
            then = turns[index[turn.conversation]]
            heapq.heappush(events, (now + then.pause, number := number + 1, "come", 0, then))
    work = [r.seconds for r in replicas]
    return Outcome(n_hit / n_token, max(work) * len(work) / sum(work), sorted(waits))


def main() -> None:
    """A table of the policies."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--np", type=int, default=16)
    parser.add_argument("--cache", type=int, default=600_000, help="tokens that a replica's cache holds")
    parser.add_argument("--chats", type=int, default=6000)
    parser.add_argument("--rate", type=float, default=60.0, help="conversations that begin in a second")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    conversations = trace(args.chats, args.seed)
    turns = [turn for each in conversations for turn in each]
    mean = sum(len(turn.keys) for turn in turns) * BLOCK / len(turns)
    print(
        f"{len(conversations)} conversations, {len(turns)} requests, {mean:.0f} prompt tokens in the mean\n"
    )
    print(
        "| policy | cached | busiest / mean | first token, median | 99 of 100 |\n| --- | --- | --- | --- | --- |"
    )
    for name, choose in choices(args.replicas, args.np, args.cache // BLOCK).items():
        o = run(conversations, choose, args)
        print(
            f"| {name} | {100 * o.hits:.1f} % | {o.spread:.2f} | {o.wait(0.5):.2f} s | {o.wait(0.99):.2f} s |",
            flush=True,
        )


if __name__ == "__main__":
    main()
