"""What a grammar costs: the packaged pair with drafts, free, under a grammar that allows all, and under JSON Schemas.

    python tools/bench_constrained.py [--streams 8] [--tokens 120] [--repeat 3] [--sampled] [--on]

Tokens a second of CPU time (others on the machine do not count), of all streams, the best of several runs taken in turns, and what part that is of free text. "same text" shows
what a grammar takes; a text under a schema is another text, so its drafts are right more or less often: tokens a round and microseconds a round are told apart.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from pyspec.engine.api import Engine
from pyspec.engine.result import RequestSet
from pyspec.request import Grammar, Request, SamplingParams

RECORD = {
    "name": {"type": "string"},
    "city": {"type": "string"},
    "age": {"type": "integer", "minimum": 0, "maximum": 120},
}
PEOPLE = {
    "type": "array",
    "minItems": 40,
    "items": {"type": "object", "properties": RECORD, "required": [*RECORD], "additionalProperties": False},
}
PROSE = {"type": "object", "properties": {"answer": {"type": "string", "minLength": 2000}}, "required": ["answer"]}
ENUMS = {
    "type": "array",
    "minItems": 40,
    "items": {
        "type": "object",
        "properties": {"temperature_celsius": {"enum": [1, 2, 3]}, "weather_condition": {"enum": ["sunny", "raining"]}},
        "required": ["temperature_celsius", "weather_condition"],
        "additionalProperties": False,
    },
}
GRAMMARS: dict[str, Grammar | None] = {
    "free": None,
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


def run(engine: Engine, requests: list[Request]) -> tuple[float, int, int]:
    """Seconds of CPU time, tokens, and rounds that the streams decoded together."""
    before, began = engine.metrics(), time.process_time()
    results = RequestSet(list(requests), None, False).run(engine.submit, engine.cancel, engine.info.n_slot)
    took, after = time.process_time() - began, engine.metrics()
    return took, sum(len(r.tokens) for r in results), after.rounds - before.rounds  # type: ignore[union-attr]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--on", action="store_true", help="beyond the ends of texts")
    args = parser.parse_args()
    params = SamplingParams(temperature=0.8 if args.sampled else 0.0, seed=1, ignore_eos=args.on)
    rows = sorted(
        map(json.loads, PROMPTS.read_text(encoding="utf-8").splitlines()), key=lambda row: -len(row["answer_ids"])
    )
    with Engine.load("demo", args.draft, np=args.streams, ctx=1024) as engine:
        asked = {}
        for name, grammar in GRAMMARS.items():
            compiled = None if grammar is None else engine.check_grammar(grammar)
            asked[name] = [
                Request(prompt=tuple(row["prompt_ids"]), params=params, max_tokens=args.tokens, grammar=compiled, cache_prompt=False)
                for row in rows[: args.streams]
            ]  # fmt: skip
        best: dict[str, tuple[float, int, int]] = {}
        for i in range(args.repeat + 1):
            for name, requests in asked.items():
                found = run(engine, requests)
                if i and (name not in best or found[0] / found[1] < best[name][0] / best[name][1]):
                    best[name] = found
    free = best["free"][1] / best["free"][0]
    print(f"{args.streams} streams, {args.tokens} tokens each, {'sampled' if args.sampled else 'greedy'}, {args.draft}")
    print(f"{'':10} {'tok/s':>8} {'of free':>8} {'tokens/round':>13} {'us/round':>9}")
    for name, (took, n_token, n_round) in best.items():
        rate = n_token / took
        print(f"{name:10} {rate:8.0f} {rate / free:8.2f} {n_token / n_round:13.2f} {1e6 * took / n_round:9.0f}")


if __name__ == "__main__":
    main()
