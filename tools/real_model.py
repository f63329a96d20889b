"""Runs a real public model, Gemma 3 270M in Q4_K_M, and compares it with recorded answers: `make real`.

    python tools/real_model.py                       fetches the model (253 MB, once) into pyspec's cache
    python tools/real_model.py --model FILE.gguf     takes this file
    python tools/real_model.py --kernels linear=reference     runs these kernels
    python tools/real_model.py --chunks 0            reads all of the texts for their perplexity

For each prompt of tests/real it compares token ids, greedy texts (with and without drafts from n-grams, one prompt at a time and three), and
the log probabilities along the text. Then it computes the perplexity of real texts, beside llama.cpp's, and the KL divergence that types of keys
and values cost (real_perplexity.py). All of that once for each tier of kernels that this machine has: CUDA, Triton and the C++ kernels with a
GPU, the C++ kernels and the reference in torch without one, which is slow and continues prompts one by one, without drafts. Exit status 1 if
anything differs, 2 if the model can not be had or run.

Three answers are recorded. The formulas in F64 (tools/real_exact.py) are what pyspec has to meet. llama.cpp with the same weights as F32
(tools/record_real.py) is up to 0.0098 away from the formulas. Its GELU is a table of F16, which explains about half of that. llama.cpp with
the file as it is rounds the inputs of its products to 8 bits. The distance to that is shown, and nothing follows from it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from real_compare import (
    ANSWERS,
    EXACT,
    N_TOKEN,
    Answer,
    Case,
    Recorded,
    Scores,
    farthest,
    is_tie,
    parting,
    read,
    scores_of,
)
from real_fetch import GEMMA, FetchError, cache_folder, fetch
from real_perplexity import N_CHUNK, PAIRS, RECORDED, measure
from real_perplexity import read as read_perplexities

import pyspec
from pyspec.errors import PyspecError
from pyspec.request import Request, SamplingParams

BOUND_EXACT = 0.012
"""Of a log probability against the formulas in F64. Products of rows as 16-bit whole numbers (cuda/ops/linear/cpu.py) are up to 0.0106
away, products in F32 0.00004 (--kernels linear=reference), llama.cpp's of 8-bit rows up to 1.61.
"""
BOUND_F32 = 0.024
"""Against llama.cpp with F32 weights, which is up to 0.0098 away from the formulas itself."""
F16_ROWS = 0.024
"""More of both on a GPU, where products round their rows to f16, 11 bits: up to 0.029 away, at log probabilities of -16 (H100)."""
N_SLOT, N_CONTEXT = 3, 2048
N_TOP = 40
WAYS = (("one", 1, 0), ("one, drafts", 1, None), ("three", N_SLOT, 0), ("three, drafts", N_SLOT, None))
"""Name, prompts at a time, drafted tokens of a request."""
SLOW = "reference"  # kernels that run the first way alone


@dataclass
class Row:
    """The findings of one prompt. scores: along the text of the first way."""

    case: Case
    texts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    scores: Scores = ()
    flaws: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def text(self) -> tuple[int, ...]:
        return self.texts[WAYS[0][0]]


def generate(
    engine: pyspec.Engine, rows: Sequence[Row], way: str, n_at_once: int, n_draft: int | None
) -> None:
    """Greedy texts of all prompts; with log probabilities, if these are the first ones."""
    begun, n_drafted, n_accepted = time.monotonic(), 0, 0
    params = SamplingParams(temperature=0.0, logprobs=N_TOP if way == WAYS[0][0] else None)
    for i in range(0, len(rows), n_at_once):
        some = rows[i : i + n_at_once]
        requests = [
            Request(
                prompt=row.case.ids,
                params=params,
                max_tokens=N_TOKEN,
                n_draft_max=n_draft,
                cache_prompt=False,
            )
            for row in some
        ]
        for row, result in zip(some, engine.generate_many(requests), strict=True):
            row.texts[way] = result.tokens
            if params.logprobs:
                row.scores = [
                    dict(entry.top) | {entry.token: entry.logprob} for entry in result.logprobs
                ]
            n_drafted += result.timings.draft_n
            n_accepted += result.timings.draft_n_accepted
    kept = f", {n_accepted} of {n_drafted} drafted tokens kept" if n_drafted else ""
    print(f"{way}: {time.monotonic() - begun:.1f} s{kept}", flush=True)


def judge(row: Row, more: float = 0.0) -> None:
    """Compare a prompt's texts and log probabilities with the records that bind, and its texts with each other.

    more: what the device's rounding adds to the bounds of log probabilities
    """
    for way, tokens in row.texts.items():
        if tokens != row.text:
            at = next(i for i in range(N_TOKEN) if tokens[i : i + 1] != row.text[i : i + 1])
            row.flaws.append(
                f"the text of '{way}' is not that of '{WAYS[0][0]}': token {at} is "
                f"{_token(tokens, at)}, not {_token(row.text, at)}"
            )
    for name, answer, bound in (
        ("exact", row.case.exact, BOUND_EXACT + more),
        ("F32", row.case.f32, BOUND_F32 + more),
    ):
        _judge_by(row, name, answer, bound)


def _judge_by(row: Row, name: str, answer: Answer, bound: float) -> None:
    off = farthest(answer, row.text, row.scores)
    if off.size > bound:
        row.flaws.append(
            f"{name}: log probability of {off.token} at token {off.position} is {off.found:.5f}, "
            f"recorded {off.recorded:.5f} (at most {bound:.3f} apart)"
        )
    at = parting(answer, row.text)
    if at is None:
        return
    logprob = row.scores[at][row.text[at]] if at < len(row.text) else 0.0
    is_near = is_tie(answer, at, logprob, bound)
    gap = f"a near tie, {answer.gap(at):.4f} apart" if is_near else "no tie"
    line = f"{name}: token {at} is {_token(row.text, at)}, recorded {_token(answer.tokens, at)}: {gap}"
    (row.notes if is_near else row.flaws).append(line)


def _token(tokens: Sequence[int], position: int) -> str:
    return str(tokens[position]) if position < len(tokens) else "the end"


def check_ids(engine: pyspec.Engine, recorded: Recorded) -> tuple[list[Row], int]:
    """A row for each prompt, and how many of the other strings have other ids."""
    rows = [Row(case) for case in recorded.cases]
    for row in rows:
        ids = tuple(engine.tokenizer.encode(row.case.text, parse_special=row.case.parse_special))
        if ids != row.case.ids:
            row.flaws.append(f"token ids: {_first_difference(ids, row.case.ids)}")
    n_wrong = 0
    for i, (text, ids) in enumerate(recorded.strings):
        found = tuple(engine.tokenizer.encode(text, parse_special=i % 2 == 0))
        if found != ids:
            print(f"WRONG ids of {text!r}: {_first_difference(found, ids)}")
            n_wrong += 1
    return rows, n_wrong


def _first_difference(found: Sequence[int], recorded: Sequence[int]) -> str:
    at = next(i for i in range(len(found) + 1) if found[i : i + 1] != recorded[i : i + 1])
    return f"token {at} is {_token(found, at)}, recorded {_token(recorded, at)}"


def show(rows: Sequence[Row]) -> None:
    """A line for each prompt, with the largest differences of log probabilities."""
    print(f"\n{'':<12}{'':>7}  {'pyspec from':<24} llama.cpp")
    print(f"{'prompt':<12}{'tokens':>7} {'exact':>8} {'F32':>8} {'8 bits':>7} {'F32 from exact':>15}")
    for row in rows:
        case = row.case
        exact, f32, quantised = (
            farthest(answer, row.text, row.scores).size
            for answer in (case.exact, case.f32, case.quantised)
        )
        own = farthest(case.exact, case.f32.tokens, scores_of(case.f32)).size
        print(
            f"{case.name:<12}{len(case.ids):>7} {exact:>8.5f} {f32:>8.4f} {quantised:>7.3f} {own:>15.4f}  "
            + ("WRONG" if row.flaws else "right")
        )
        for line in row.notes:
            print(f"{'':<12}{line}")
        for line in row.flaws:
            print(f"{'':<12}WRONG {line}")


def tiers_here() -> list[tuple[str, str]]:
    """(--kernels, --device) of each tier that this machine has."""
    if torch.cuda.is_available():
        return [("auto", "cuda"), ("triton", "cuda"), ("auto", "cpu")]
    return [("auto", "cpu"), ("reference", "cpu")]


def compare(model: Path, recorded: Recorded, kernels: str, device: str = "auto") -> int:
    """Run all prompts and print it. The number of prompts and strings that are wrong."""
    print(f"\n{model.name} beside {recorded.program}; --kernels {kernels}", flush=True)
    begun = time.monotonic()
    settings = {"np": N_SLOT, "ctx": N_CONTEXT, "kv_type": "f32", "kernels": kernels, "device": device}
    with pyspec.Engine.load(model, "ngram", **settings) as engine:
        print(
            f"loaded in {time.monotonic() - begun:.1f} s on {engine.info.device}; {N_TOKEN} tokens a prompt",
            flush=True,
        )
        rows, n_wrong = check_ids(engine, recorded)
        for way, n_at_once, n_draft in WAYS[:1] if kernels == SLOW else WAYS:
            generate(engine, rows, way, n_at_once, n_draft)
        more = F16_ROWS if engine.info.device.startswith("cuda") else 0.0
    for row in rows:
        judge(row, more)
    show(rows)
    return report(rows, n_wrong, len(recorded.strings))


def report(rows: Sequence[Row], n_wrong: int, n_string: int) -> int:
    """Print how much is right. The number of prompts and strings that are not."""
    n_bad = sum(bool(row.flaws) for row in rows)
    print(
        f"\n{len(rows) - n_bad} of {len(rows)} prompts are right, "
        f"and the ids of {n_string - n_wrong} of {n_string} further strings"
    )
    return n_bad + n_wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a file in place of the fetched one")
    parser.add_argument("--kernels", help="as of pyspec server; default: every tier of this machine")
    parser.add_argument("--chunks", type=int, default=N_CHUNK, help="sequences of a text; 0: all")
    arguments = parser.parse_args()
    for path, tool in (
        (ANSWERS, "record_real.py"),
        (EXACT, "real_exact.py"),
        (RECORDED, "record_perplexity.py"),
    ):
        if not path.is_file():
            print(f"make real: {path} is missing; tools/{tool} writes it", file=sys.stderr)
            return 2
    try:
        model = arguments.model or fetch(GEMMA, cache_folder())
        tiers = [(arguments.kernels, "auto")] if arguments.kernels else tiers_here()
        n_bad = 0
        for kernels, device in tiers:
            n_bad += compare(model, read(), kernels, device)
            n_bad += measure(
                model,
                read_perplexities(),
                PAIRS,
                n_chunk=arguments.chunks,
                kernels=kernels,
                device=device,
            )
        return 1 if n_bad else 0
    except (FetchError, PyspecError) as e:
        print(f"make real: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
