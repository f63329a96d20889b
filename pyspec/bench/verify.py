"""Compare speculative texts with plain ones, token by token: equal, a near tie, or a bug.

Greedy text depends on the target alone, so drafts must not change it. If two tokens are nearly equal, though, the sums of a verify and
of a single row may round to either side. So where texts differ, the target is run again at that place: the logits of both tokens
distinguish a tie from a bug.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pyspec.engine.api import Engine
from pyspec.engine.result import Result
from pyspec.errors import ConfigError
from pyspec.request import SamplingParams

TIE = {"cpu": 2e-3, "cuda": 0.1}
"""Logits closer than this may be ordered either way; on a GPU the order of sums depends on the batch size."""
N_TOP = 64  # tokens whose logits are requested where texts differ
N_LAST = 3  # tokens shown before that place
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Parting:
    """The first difference between a speculative text and the plain one.

    token       index in the answer, from 0
    plain, spec token ids there; -1: the text ended, as with any end-of-generation token
    logits      of both, minus the best token's: 0 for the best itself; None: not among the best ones
    margin      logit of the plain token, which should have been chosen, minus that of the speculative one; if the target now prefers a third
                token, the best logit minus the lower of the two
    """

    prompt: int
    token: int
    plain: int
    spec: int
    plain_text: str
    spec_text: str
    logits: tuple[float | None, float | None]
    margin: float
    verdict: Literal["near tie", "bug"]
    before: str


@dataclass(frozen=True)
class Verification:
    """The result. n_compared: tokens up to the first difference; drafted, accepted: how much of it was speculative."""

    n_prompt: int
    n_compared: int
    drafted: int
    accepted: int
    tie: float
    partings: tuple[Parting, ...]

    @property
    def bugs(self) -> tuple[Parting, ...]:
        return tuple(p for p in self.partings if p.verdict == "bug")

    @property
    def n_equal(self) -> int:
        return self.n_prompt - len(self.partings)


def verify(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    tie: float = 0.0,
    progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Answer every prompt with and without drafts, concurrently in all slots, and compare.

    tie  logits closer than this are a tie; 0: the device's default. Raises ConfigError if nothing is drafted, because that would prove nothing.
    """
    if engine.info.drafter == "none":
        advice = "give one with -md, or --spec-type"
        raise ConfigError(f"no drafter, so there is nothing to verify ({advice})")
    tie = tie or TIE[engine.info.device.partition(":")[0]]
    n = len(prompts)

    def report_from(offset: int) -> Callable[[int, int], None] | None:
        return None if progress is None else lambda done, of: progress(offset + done, 2 * n)

    def answers(n_draft_max: int | None, offset: int) -> list[Result]:
        return engine.generate_many(
            prompts, params=GREEDY, max_tokens=max_tokens, cache_prompt=False, n_draft_max=n_draft_max,
            progress=report_from(offset),
        )  # fmt: skip

    spec, plain = answers(None, 0), answers(0, n)
    drafted = sum(r.timings.draft_n for r in spec)
    if not drafted:
        advice = "--spec-fixed drafts always"
        raise ConfigError(f"nothing was drafted in {n} answers, which proves nothing ({advice})")
    partings, n_compared = [], 0
    for i, (a, b) in enumerate(zip(plain, spec, strict=True)):
        at = _parting(a, b)
        n_compared += min(len(a.tokens), len(b.tokens)) if at is None else at
        if at is not None:
            partings.append(_judged(engine, i, [*prompts[i], *a.tokens[:at]], at, (a, b), tie))
    accepted = sum(r.timings.draft_n_accepted for r in spec)
    return Verification(n, n_compared, drafted, accepted, tie, tuple(partings))


def _parting(plain: Result, spec: Result) -> int | None:
    """Index of the first differing token; the end of a text counts as a token."""
    a, b = [*plain.tokens, plain.finish], [*spec.tokens, spec.finish]
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)


def _judged(
    engine: Engine, prompt: int, text: list[int], at: int, answers: tuple[Result, Result], tie: float
) -> Parting:
    plain, spec = (r.tokens[at] if at < len(r.tokens) else -1 for r in answers)
    seen = engine.generate(
        text, params=GREEDY, max_tokens=1, logprobs=N_TOP, n_draft_max=0, cache_prompt=False
    )
    logits = dict(seen.logprobs[0].top) if seen.logprobs else {}
    best = max(logits.values(), default=0.0)
    own = [_logit(logits, token, engine.info.eog_ids) for token in (plain, spec)]
    known = [x for x in own if x is not None]
    margin = best - min(known) if len(known) == 2 else float("inf")
    return Parting(
        prompt=prompt,
        token=at,
        plain=plain,
        spec=spec,
        plain_text=_text(engine, plain),
        spec_text=_text(engine, spec),
        logits=(_below(own[0], best), _below(own[1], best)),
        margin=margin,
        verdict="near tie" if margin < tie else "bug",
        before=engine.decode(text[-N_LAST:], special=True),
    )


def _logit(logits: dict[int, float], token: int, ends: Sequence[int]) -> float | None:
    """The logit of a token, or of the likeliest end; None if it is not among the best."""
    found = [logits[t] for t in (ends if token < 0 else (token,)) if t in logits]
    return max(found, default=None)


def _below(logit: float | None, best: float) -> float | None:
    return None if logit is None else logit - best


def _text(engine: Engine, token: int) -> str:
    return "(end)" if token < 0 else engine.decode([token], special=True)
