"""Measure the cost of a grammar: the packaged pair, free, under a grammar that allows everything, and under JSON Schemas.

    python tools/bench_constrained.py [--streams 8] [--tokens 80] [--turns 3] [--sampled] [--only records] [--profile]

Each runs plain, with drafts, and with an oracle's drafts. Rates are tokens a second of all streams, of CPU time if the device is a CPU
(other processes do not count). The prompts are those with the longest answers. The engine learns texts under a grammar from one round of
other prompts, and forgets the additions of each turn. A text under a schema is another text, which a drafter may know less of. The
oracle drafts the coming tokens at the cost of the drafter that it replaces, so the rest of the gap to free text is the engine's own.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pyspec.device.worker import Launched
from pyspec.draft.drafter import Drafter
from pyspec.engine.api import Engine
from pyspec.engine.loop.job import Job
from pyspec.engine.loop.loop import Loop
from pyspec.engine.loop.pending_round import PendingRound
from pyspec.engine.loop.speculator import Speculator
from pyspec.engine.result import RequestSet
from pyspec.request import Grammar, Request, SamplingParams
from pyspec.slots.drafts import DraftRequest, Drafts

RECORD = {
    "name": {"type": "string"},
    "city": {"type": "string"},
    "age": {"type": "integer", "minimum": 0, "maximum": 120},
}
PEOPLE = {
    "type": "array",
    "minItems": 40,
    "items": {
        "type": "object",
        "properties": RECORD,
        "required": [*RECORD],
        "additionalProperties": False,
    },
}
PROSE = {
    "type": "object",
    "properties": {"answer": {"type": "string", "minLength": 2000}},
    "required": ["answer"],
}
ENUMS = {
    "type": "array",
    "minItems": 40,
    "items": {
        "type": "object",
        "properties": {
            "temperature_celsius": {"enum": [1, 2, 3]},
            "weather_condition": {"enum": ["sunny", "raining"]},
        },
        "required": ["temperature_celsius", "weather_condition"],
        "additionalProperties": False,
    },
}
ROWS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
}
GRAMMARS: dict[str, Grammar | None] = {
    "free": None,
    "asked for": None,
    "asked JSON": Grammar(kind="json_schema", source=json.dumps(ROWS)),
    "same text": Grammar(kind="regex", source="(?s:.*)"),
    **{
        name: Grammar(kind="json_schema", source=json.dumps(schema))
        for name, schema in (
            ("prose", PROSE),
            ("records", PEOPLE),
            ("enums", ENUMS),
            ("any JSON", {"type": "array", "minItems": 200}),
        )
    },
}
PROMPTS = Path(__file__).parents[1] / "pyspec" / "demo" / "prompts.jsonl"
WAYS = ("drafts", "plain", "oracle")  # drafts first: their source must not have seen the text
NAMES = ["Lena", "Omar", "Ada", "Tom", "Zoe", "Ravi", "Mia", "Ben", "Pia", "Lucy", "Amir", "Victor"]
N_AFTER = 3  # requests of a stream, one after the other, so that fast streams do not wait for slow ones
Texts = dict[tuple[tuple[int, ...], str], Sequence[int]]


PARTS = (
    (Loop, "admit launch_next draft plan run ask_masked commit"),
    (PendingRound, "refuse find_spans choose"),
    (Launched, "drafted_tokens wait"),
    (Speculator, "_collect_offers lengths _ask _fit has_offers"),
    (Job, "take"),
)


@dataclass
class Sum:
    """Of all turns: seconds, tokens, rounds, drafted and accepted tokens; seconds by part; rounds launched ahead, and slots that left one."""

    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    parts: Counter[str] = field(default_factory=Counter)
    ahead: int = 0
    off: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Oracle:
    """Replaces a drafter: it drafts from known texts and does the drafter's other work unchanged. Off, it is the drafter."""

    def __init__(self, loop: Loop, drafter: Drafter) -> None:
        self.loop, self.ask, self.texts, self.is_on = loop, drafter.draft, Texts(), False
        self.ask_ahead = drafter.draft_ahead

    def draft(self, requests: Sequence[DraftRequest]) -> Sequence[Drafts]:
        found = self.ask(requests)
        return [Drafts(self._truth(r)) for r in requests] if self.is_on else found

    def draft_ahead(self, *asked: Any) -> Any:
        """The device knows no text that will come: with the oracle no round is launched ahead."""
        return None if self.is_on else self.ask_ahead(*asked)

    def _truth(self, request: DraftRequest) -> list[int]:
        asked = self.loop.jobs[request.slot.index].request
        text, at = self.texts[asked.prompt, said(asked)], request.slot.n_past + 1 - len(asked.prompt)
        return list(text[at : at + request.n_draft])


class Clock:
    """Seconds spent in each part of a round, those of parts inside it included."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.n_ahead = self.n_off = 0
        for owner, names in PARTS:
            for name in names.split():
                self._watch(owner, name)

    def _watch(self, owner: type, name: str) -> None:
        do = getattr(owner, name)

        def timed(*args: Any, **settings: Any) -> Any:
            began = time.perf_counter()
            try:
                found = do(*args, **settings)
            finally:
                self.seconds[name] += time.perf_counter() - began
            if name == "launch_next":
                self.n_ahead += found is not None
            if name == "commit" and args[-1] is not None:
                self.n_off += len(args[-1].off)
            return found

        setattr(owner, name, timed)


def csv_prompts(engine: Engine, n: int) -> list[tuple[int, ...]]:
    """Prompts that the model answers with JSON by itself: "asked for" without a schema, "asked JSON" with its own schema."""
    found = []
    for i in range(n):
        rows = "\n".join(
            f"{NAMES[(5 * i + j) % len(NAMES)]},{20 + (7 * i + 5 * j) % 60}" for j in range(5)
        )
        found.append(
            engine.encode([{"role": "user", "content": f"Convert this CSV to JSON:\nname,age\n{rows}"}])
        )
    return found


def free_of(name: str) -> str:
    return "asked for" if name.startswith("asked") else "free"


def said(request: Request) -> str:
    return request.grammar.source if request.grammar is not None else ""


def run(engine: Engine, requests: list[Request], found: Sum, clock: Clock | None = None) -> Texts:
    """Time one turn and return its texts."""
    now = time.process_time if engine.loop.worker.device.type == "cpu" else time.perf_counter
    if clock is not None:
        clock.__dict__.update(seconds=found.parts, n_ahead=0, n_off=0)
    before, began = engine.metrics(), now()
    results = RequestSet(list(requests), None, False).run(
        engine.submit, engine.cancel, engine.info.n_slot
    )
    found.seconds += now() - began
    if clock is not None:
        found.ahead, found.off = found.ahead + clock.n_ahead, found.off + clock.n_off
    found.rounds += engine.metrics().rounds - before.rounds
    texts = Texts()
    for request, result in zip(requests, results, strict=True):
        assert not isinstance(result, BaseException)
        texts[request.prompt, said(request)] = result.tokens
        found.tokens += len(result.tokens)
        found.drafted += result.timings.draft_n
        found.accepted += result.timings.draft_n_accepted
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--on", action="store_true", help="beyond the ends of texts")
    parser.add_argument(
        "--profile", action="store_true", help="milliseconds of a round by what takes them"
    )
    parser.add_argument("--only", nargs="+", default=[*GRAMMARS], choices=[*GRAMMARS])
    args = parser.parse_args()
    clock = Clock() if args.profile else None
    params = SamplingParams(temperature=0.8 if args.sampled else 0.0, seed=1, ignore_eos=args.on)
    rows = map(json.loads, PROMPTS.read_text(encoding="utf-8").splitlines())
    prompts = [tuple(row["prompt_ids"]) for row in sorted(rows, key=lambda row: -len(row["answer_ids"]))]
    n_other = 0
    names = list(dict.fromkeys(each for name in args.only for each in (free_of(name), name)))
    sums = {(name, way): Sum() for name in names for way in WAYS}
    with Engine.load("demo", args.draft, np=args.streams, ctx=1024) as engine:
        loop, books = engine.loop, engine.core.grammars.books
        assert books is not None
        assert loop.drafter is not None
        oracle = Oracle(loop, loop.drafter)
        loop.drafter.draft = oracle.draft  # type: ignore[method-assign]
        loop.drafter.draft_ahead = oracle.draft_ahead  # type: ignore[method-assign]
        grammars = {name: g and engine.check_grammar(g) for name, g in GRAMMARS.items()}
        n_asked = N_AFTER * args.streams
        csv_asked = csv_prompts(engine, n_asked + args.streams)
        for turn in range(-1, args.turns):  # the first one, of other prompts, is not counted
            known = copy.deepcopy(books.books) if turn >= 0 else books.books
            for name in names:
                own = csv_asked if name.startswith("asked") else prompts
                asked = [
                    Request(
                        prompt=p,
                        params=params,
                        max_tokens=args.tokens,
                        grammar=grammars[name],
                        cache_prompt=False,
                    )
                    for p in (own[:n_asked] if turn >= 0 else own[n_asked : n_asked + args.streams])
                ]
                for way in WAYS[: 2 if turn < 0 else 3]:
                    oracle.is_on = way == "oracle"
                    requests = [replace(r, n_draft_max=0) for r in asked] if way == "plain" else asked
                    found = run(engine, requests, sums[name, way] if turn >= 0 else Sum(), clock)
                    n_other += sum(
                        tokens != oracle.texts[asked_for]
                        for asked_for, tokens in found.items()
                        if way == "plain"
                    )
                    oracle.texts |= found
            books.books = known
    print(
        f"{args.streams} streams, {args.tokens} tokens each, {'sampled' if args.sampled else 'greedy'}, {args.draft};"
        f" {n_other} texts are others without drafts"
    )
    print(
        f"{'':10} {'':7} {'tok/s':>7} {'of plain':>8} {'of free':>8} {'tokens/round':>13} {'ms/round':>9} {'drafted':>8} {'right':>7}"
    )
    for (name, way), s in sums.items():
        plain, free = sums[name, "plain"].rate, sums[free_of(name), way].rate
        print(f"{name:10} {way:7} {s.rate:7.0f} {s.rate / plain:8.2f} {s.rate / free:8.2f} {s.tokens / s.rounds:13.2f}"
            f" {1e3 * s.seconds / s.rounds:9.2f} {s.drafted:8} {s.accepted / max(s.drafted, 1):7.2f}")  # fmt: skip
        if args.profile and way == "drafts":
            parts = ", ".join(
                f"{part.strip('_')} {1e3 * t / s.rounds:.2f}" for part, t in s.parts.most_common()
            )
            print(
                f"           ahead {s.ahead / s.rounds:.2f} of rounds, {s.off} left one; ms a round: {parts}"
            )


if __name__ == "__main__":
    main()
