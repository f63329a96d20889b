"""Conversations of many clients over full engines, on paper: how much of their prompts is cached, by the order in which they wait.

`python tools/simulate_load.py --clients 200 --replicas 4`. Clients behave as in tests/long_runs/replicas.py: each sends the next turn of its
conversation at once, and comes back a second after a 429. Queue, places, choice of the replica, slots and pages are the server's own; a
prefix goes on at the ends of turns and of system prompts only, as with recurrent layers. Times are assumed.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pyspec.engine.policy.affinity import Affinity, chain
from pyspec.engine.policy.evict import LeftTexts, evict_for
from pyspec.engine.policy.queue import Queue
from pyspec.errors import QueueFull
from pyspec.slots.prefix import NOBODY, NOT_KNOWN, Node, Owner, State
from pyspec.slots.table import Slot, SlotTable

PAGE = 32
SYSTEM, FIRST, MORE, ANSWER, LIMIT = 63, 109, 46, 27, 60  # tokens as the demo model counts them
AWAY_S = 8.0  # until a killed engine is back
BACK_S, RETRY_S = 0.02, 1.0  # from an answer to the next turn; from a 429 to the next attempt


@dataclass(frozen=True)
class Ways:
    """What the server does: cached requests go forward, conversations that go on have places, replicas share theirs."""

    ordered: bool = True
    places: bool = True
    shared: bool = True


@dataclass(eq=False)
class Turn:
    """One request, as the queue and its places see it. then: what its client does behind its answer."""

    conversation: int
    number: int
    tokens: tuple[int, ...]
    answer: tuple[int, ...]
    came: int = 0
    client: str = ""
    owner: Owner = NOBODY
    group: str = ""
    wanted_slot: int = -1
    n_left: int = LIMIT
    then: Callable[[], None] = lambda: None
    life: int = 0  # engines that it was given to
    is_counted: bool = False
    charged: int = 0
    work: int = 0
    n_to_read: int = 0

    @property
    def cost(self) -> int:
        return len(self.tokens)

    @property
    def n_rows(self) -> int:
        return len(self.tokens) + LIMIT + 17

    @property
    def reusable(self) -> tuple[int, ...]:
        return self.tokens


@dataclass
class Replica:
    """An engine's slots and queue. left: texts in its cache, as the server believes."""

    np: int
    n_token: int
    table: SlotTable = field(init=False)
    queue: Queue[Turn] = field(init=False)
    left: LeftTexts = field(init=False)
    running: dict[int, Turn] = field(default_factory=dict)
    is_up: bool = True

    def __post_init__(self) -> None:
        self.table = SlotTable(self.np, self.n_token // PAGE, PAGE)
        self.table.needs_state = True
        self.queue, self.left = Queue(1 << 20), LeftTexts(self.n_token)

    @property
    def n_open(self) -> int:
        return len(self.running) + len(self.queue)


def turns_of(conversation: int, n: int) -> list[Turn]:
    """A conversation. Three system prompts are shared, and all other tokens are its own."""
    fresh = iter(range(1000 * (conversation + 1), 10**9))
    text = [conversation % 3 + 1] * SYSTEM
    turns = []
    for number in range(n):
        text += [next(fresh) for _ in range(FIRST - SYSTEM if not number else MORE - ANSWER)]
        answer = [next(fresh) for _ in range(ANSWER)]
        turns.append(Turn(conversation, number, tuple(text), tuple(answer)))
        text += answer
    return turns


@dataclass
class Outcome:
    """n_moved: turns that another replica had than the turn before."""

    n_hit: int = 0
    n_token: int = 0
    n_put_off: int = 0
    n_moved: int = 0
    seconds: float = 0.0

    @property
    def hits(self) -> float:
        return self.n_hit / max(1, self.n_token)


class Play:
    """One run."""

    def __init__(self, args: argparse.Namespace, n_replica: int, ways: Ways, seed: int = 1) -> None:
        self.args, self.ways, self.draw = args, ways, random.Random(seed)
        self.replicas = [Replica(args.np, args.cache) for _ in range(n_replica)]
        self.affinity = Affinity(n_replica, args.cache // 32, args.np)
        self.conversations = iter(range(args.chats))
        self.homes: dict[int, int] = {}
        self.n_left = args.chats * args.turns
        self.out, self.now, self._n = Outcome(), 0.0, 0
        self.events: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, seconds: float, do: Callable[[], None]) -> None:
        """Do something later."""
        self._n += 1
        heapq.heappush(self.events, (self.now + seconds, self._n, do))

    def run(self) -> Outcome:
        for _ in range(self.args.clients):
            self.at(0.3 * self.draw.random(), self.next_conversation)
        if self.args.every:
            self.at(self.args.every, lambda: self.kill(0))
        while self.n_left:
            self.now, _, do = heapq.heappop(self.events)
            do()
        self.out.seconds = self.now
        return self.out

    def next_conversation(self) -> None:
        if (number := next(self.conversations, None)) is not None:
            self.send(iter(turns_of(number, self.args.turns)))

    def send(self, rest: Iterator[Turn]) -> None:
        if (turn := next(rest, None)) is None:
            self.next_conversation()
        else:
            self.ask(turn, rest)

    def ask(self, turn: Turn, rest: Iterator[Turn]) -> None:
        """One attempt of a client."""
        keys = chain(turn.tokens)
        up = [r for r in self.replicas if r.is_up]
        goes_on = lambda: self.ways.places and any(r.left.goes_on(keys) for r in up)  # noqa: E731
        order = self.affinity.order(keys, [r.n_open if r.is_up else None for r in self.replicas])
        try:
            if self.ways.shared:
                self._place(turn, up, goes_on)
            else:
                order = [i for i in order if self._has_place(turn, self.replicas[i], goes_on)]
            if not order:
                raise QueueFull(0)
        except QueueFull:
            self.out.n_put_off += 1
            self.at(RETRY_S + 0.02 * self.draw.random(), lambda: self.ask(turn, rest))
            return
        self._n += 1
        turn.came, turn.then = self._n, lambda: self.send(rest)
        self.affinity.chose(order[0], keys)
        self.out.n_moved += self.homes.get(turn.conversation, order[0]) != order[0]
        self.give(turn, order[0])

    def _place(self, turn: Turn, replicas: Sequence[Replica], goes_on: Callable[[], bool]) -> None:
        waiting = sorted((t for r in replicas for t in r.queue.waiting()), key=lambda t: t.came)
        evict_for(turn, waiting, self.args.queue * len(replicas), goes_on)

    def _has_place(self, turn: Turn, replica: Replica, goes_on: Callable[[], bool]) -> bool:
        try:
            self._place(turn, [replica], goes_on)
        except QueueFull:
            return False
        return True

    def give(self, turn: Turn, i: int) -> None:
        self.homes[turn.conversation] = i
        turn.life += 1
        known = self.replicas[i].table.tree.known(turn.tokens) if self.ways.ordered else NOT_KNOWN
        self.replicas[i].queue.push(turn, known)
        self.seat(i)

    def seat(self, i: int) -> None:
        """Waiting requests get slots."""
        r = self.replicas[i]
        while r.is_up and (turn := r.queue.next(r.table)) is not None:
            slot = r.table.pick()
            assert slot is not None
            hit = r.table.find(turn.tokens)
            r.table.acquire(slot, turn.n_rows, turn.tokens, hit)
            r.running[slot.index] = turn
            if not turn.is_counted:
                turn.is_counted = True
                self.out.n_hit, self.out.n_token = self.out.n_hit + hit.n, self.out.n_token + turn.cost
            n_up = sum(r.is_up for r in self.replicas)  # they share two cores
            slow = n_up * self.args.np * self.args.slow
            seconds = (turn.cost - hit.n) * slow / 7500 + slow * 0.045 * self.draw.uniform(0.6, 1.4)
            self.at(seconds, lambda turn=turn, life=turn.life, slot=slot: self.end(i, turn, life, slot))  # type: ignore[misc]

    def end(self, i: int, turn: Turn, life: int, slot: Slot) -> None:
        """A request ends, unless its engine did."""
        if turn.life != life:
            return
        r = self.replicas[i]
        del r.running[slot.index]
        slot.tokens[:] = [*turn.tokens, *turn.answer]
        r.table.grow(slot, slot.n_past)
        node = r.table.file(slot, whole=True)
        assert node is not None
        for at, where in ((SYSTEM, slot.nodes[(SYSTEM - 1) // PAGE]), (slot.n_past, node)):
            keep_state(where, at)
        r.table.release(slot)
        r.left.leave(chain(turn.tokens)[-1], len(turn.tokens) + len(turn.answer))
        self.n_left -= 1
        self.at(BACK_S * self.draw.uniform(0.3, 2), turn.then)
        self.seat(i)

    def kill(self, i: int) -> None:
        """An engine ends, its requests continue elsewhere, and another one takes its place."""
        r = self.replicas[i]
        lost = [*r.running.values(), *r.queue.drain()]
        self.replicas[i] = Replica(self.args.np, self.args.cache, is_up=False)
        self.affinity.known[i].clear()
        for turn in lost:
            loads = [r.n_open if r.is_up else None for r in self.replicas]
            j = next(iter(self.affinity.order(chain(turn.tokens), loads)), i)
            self.affinity.chose(j, chain(turn.tokens))
            self.give(turn, j)
        self.at(AWAY_S, lambda: self.come_back(i))
        self.at(self.args.every, lambda: self.kill((i + 1) % len(self.replicas)))

    def come_back(self, i: int) -> None:
        self.replicas[i].is_up = True
        self.seat(i)


def keep_state(node: Node, at: int) -> None:
    """A checkpoint behind `at` tokens."""
    if at not in node.states:
        node.states[at] = State(node, at, None)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--np", type=int, default=3)
    parser.add_argument("--queue", type=int, default=16)
    parser.add_argument("--cache", type=int, default=6144, help="tokens that a replica's cache holds")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--chats", type=int, default=400)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between kills; 0: none")
    parser.add_argument("--slow", type=float, default=1.0, help="times as slow a machine")
    return parser.parse_args(given)


def main() -> None:
    """A table of the ways."""
    args = arguments()
    calm = argparse.Namespace(**vars(args) | {"every": 0.0})
    print(
        f"| | one engine | {args.replicas}, no kill | {args.replicas}, kills | seconds | moved | 429 |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, ways in {
        "order and places as before": Ways(False, False, False),
        "places shared": Ways(False, False, True),
        "cached ones forward": Ways(True, False, False),
        "both": Ways(True, False, True),
        "and places for conversations that go on": Ways(),
    }.items():
        one, several = Play(calm, 1, ways).run(), Play(calm, args.replicas, ways).run()
        killed = Play(args, args.replicas, ways).run()
        hits = " | ".join(f"{100 * o.hits:.1f} %" for o in (one, several, killed))
        print(
            f"| {name} | {hits} | {killed.seconds:.0f} | {killed.n_moved} | {killed.n_put_off} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
