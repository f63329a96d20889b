"""Runs a real public model, Gemma 3 270M in Q4_K_M, and compares it with recorded answers of llama.cpp: `make real`.

    python tools/real_model.py                       fetches the model (253 MB, once) into pyspec's cache
    python tools/real_model.py --model FILE.gguf     takes this file

For each prompt of tests/real it compares token ids, log probabilities along the recorded tokens, and greedy texts: with and without drafts from
n-grams, by one slot and by three. Exit status 1 if anything differs, 2 if the model can not be had.

llama.cpp recorded every answer twice (tools/record_real.py): with the file's quantised weights, whose products round their inputs to 8 bits, and
with the same weights as F32. On a CPU pyspec computes in F32, so the second record is the one that it has to meet.
"""

from __future__ import annotations

import argparse
import queue
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from real_compare import ANSWERS, Answer, Case, Recorded, Scores, distance, is_tie, parting, read, spread
from real_fetch import GEMMA, FetchError, cache_folder, fetch

import pyspec
from pyspec.request import Done, Event, Failed, PromptLogprobs, Request, SamplingParams

BOUND_F32 = 0.002
"""Of a log probability against the F32 record."""
BOUND_QUANTISED = 0.5
"""Against the other one: the two records of llama.cpp differ by as much."""
N_CONTEXT = 2048
N_ROW = 128  # of a forward of a prompt, because a row's log probabilities take a megabyte
N_TOP = 40
GREEDY = SamplingParams(temperature=0.0)
WAYS = (("np 1", 1, 0), ("np 1, drafts", 1, None), ("np 3", 3, 0), ("np 3, drafts", 3, None))
"""Columns of the table: slots, and drafted tokens of a request."""


@dataclass
class Row:
    """The findings of one prompt."""

    case: Case
    has_ids: bool
    f32: float = 0.0
    quantised: float = 0.0
    texts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    flaws: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def scores(engine: pyspec.Engine, prompt: Sequence[int], answer: Answer) -> Scores:
    """Log probabilities along an answer, as those of a prompt that ends in it."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    whole = (*prompt, *answer.tokens)
    request = Request(prompt=whole, params=GREEDY, max_tokens=1, prompt_logprobs=N_TOP, cache_prompt=False)
    engine.submit(request, events.put)
    found: list[dict[int, float]] = []
    while True:
        event = events.get()
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, PromptLogprobs):
            found += [dict(entry.top) | {entry.token: entry.logprob} for entry in event.entries]
        if isinstance(event, Done):
            return found[len(prompt) - 1 :]


def score(engine: pyspec.Engine, row: Row) -> None:
    """Compare log probabilities with both records; they are computed once where both have the same tokens."""
    case = row.case
    along = scores(engine, case.ids, case.f32)
    row.f32 = distance(case.f32, along)
    if case.quantised.tokens != case.f32.tokens:
        along = scores(engine, case.ids, case.quantised)
    row.quantised = distance(case.quantised, along)
    for name, found, bound in (("F32", row.f32, BOUND_F32), ("quantised", row.quantised, BOUND_QUANTISED)):
        if found > bound:
            row.flaws.append(
                f"a log probability is {found:.4f} away from the {name} record, at most {bound} is rounding"
            )


def generate(engine: pyspec.Engine, rows: Sequence[Row], way: str, n_draft: int | None) -> tuple[float, float]:
    """Greedy texts of all prompts, as many at once as the engine has slots. Seconds, and accepted drafts of those verified."""
    begun, n_drafted, n_accepted = time.monotonic(), 0, 0
    requests = [
        Request(
            prompt=row.case.ids,
            params=GREEDY,
            max_tokens=len(row.case.f32.tokens) + row.case.f32.ended,
            n_draft_max=n_draft,
            cache_prompt=False,
        )
        for row in rows
    ]
    for row, result in zip(rows, engine.generate_many(requests), strict=True):
        row.texts[way] = result.tokens
        n_drafted += result.timings.draft_n
        n_accepted += result.timings.draft_n_accepted
    return time.monotonic() - begun, n_accepted / n_drafted if n_drafted else 0.0


def judge(row: Row) -> None:
    """Compare a prompt's texts with the F32 record and with each other."""
    case, first = row.case, row.texts[WAYS[0][0]]
    for way, tokens in row.texts.items():
        if tokens != first:
            row.flaws.append(f"the text of '{way}' is not that of '{WAYS[0][0]}'")
    at = parting(case.f32, first)
    if at is not None:
        is_fair = is_tie(case.f32, at, BOUND_F32)
        gap = f"{case.f32.gap(at):.4f}" if at < len(case.f32.tokens) else "no"
        (row.notes if is_fair else row.flaws).append(f"parts from the F32 record at token {at}, gap {gap}")
    at = parting(case.quantised, first)
    if at is not None:
        gap = f"{case.quantised.gap(at):.3f}" if at < len(case.quantised.tokens) else "no"
        is_fair = is_tie(case.quantised, at, BOUND_QUANTISED)
        (row.notes if is_fair else row.flaws).append(f"parts from the quantised record at token {at}, gap {gap}")


def check_ids(engine: pyspec.Engine, recorded: Recorded) -> tuple[list[Row], int]:
    """A row for each prompt, and how many of the other strings have other ids."""
    rows = []
    for case in recorded.cases:
        ids = engine.tokenizer.encode(case.text, parse_special=case.parse_special)
        rows.append(Row(case, tuple(ids) == case.ids))
        if not rows[-1].has_ids:
            rows[-1].flaws.append("its token ids differ")
    n_wrong = 0
    for i, (text, ids) in enumerate(recorded.strings):
        if tuple(engine.tokenizer.encode(text, parse_special=i % 2 == 0)) != ids:
            print(f"other ids: {text!r}")
            n_wrong += 1
    return rows, n_wrong


def show(rows: Sequence[Row]) -> None:
    print(f"\n{'prompt':<12}{'tokens':>7}  ids   {'F32':>7} {'quantised':>9} {'llama.cpp':>9}  texts")
    for row in rows:
        texts = "equal" if len(set(row.texts.values())) == 1 else "DIFFER"
        ids = "equal" if row.has_ids else "OTHER"
        own = spread(row.case)
        print(
            f"{row.case.name:<12}{len(row.case.ids):>7}  {ids} {row.f32:>7.4f} {row.quantised:>9.3f} {own:>9.3f}  {texts}"
        )
        for line in row.notes:
            print(f"{'':<12}{line}")
        for line in row.flaws:
            print(f"{'':<12}WRONG: {line}")


def compare(model: Path, recorded: Recorded) -> int:
    """Run everything and print it. The number of prompts and strings that are wrong."""
    print(f"{model.name} beside {recorded.program}", flush=True)
    rows: list[Row] = []
    n_wrong = 0
    for n_slot in (1, 3):
        begun = time.monotonic()
        settings = {"np": n_slot, "ctx": N_CONTEXT, "kv_type": "f32", "ubatch": N_ROW}
        with pyspec.Engine.load(model, "ngram", **settings) as engine:
            print(f"-np {n_slot}: loaded in {time.monotonic() - begun:.1f} s, {engine.info.device}", flush=True)
            if not rows:
                begun = time.monotonic()
                rows, n_wrong = check_ids(engine, recorded)
                for row in rows:
                    score(engine, row)
                print(f"log probabilities: {time.monotonic() - begun:.1f} s", flush=True)
            for way, n, n_draft in WAYS:
                if n == n_slot:
                    seconds, kept = generate(engine, rows, way, n_draft)
                    print(
                        f"texts, {way}: {seconds:.1f} s" + (f", {kept:.0%} of drafts kept" if kept else ""), flush=True
                    )
    for row in rows:
        judge(row)
    show(rows)
    n_wrong += sum(bool(row.flaws) for row in rows)
    n = len(recorded.cases) + len(recorded.strings)
    print(f"\n{n - n_wrong} of {len(recorded.cases)} prompts and {len(recorded.strings)} further strings are right")
    return n_wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a file in place of the fetched one")
    arguments = parser.parse_args()
    if not ANSWERS.is_file():
        print(f"make real: {ANSWERS} is missing; tools/record_real.py writes it", file=sys.stderr)
        return 2
    try:
        model = arguments.model or fetch(GEMMA, cache_folder())
    except FetchError as e:
        print(f"make real: {e}", file=sys.stderr)
        return 2
    return 1 if compare(model, read()) else 0


if __name__ == "__main__":
    sys.exit(main())
