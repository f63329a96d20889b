"""Two engines in one process: each computes as it would alone, in both orders of loading."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sampling import few

from pyspec.config import LoadOptions
from pyspec.cuda.kernel_context import current
from pyspec.engine.api import Engine

Bits = list[tuple[float, ...]]
PROMPT = "Once upon a time there was a river, and beside the river there stood a house of seven stones and one door"
# Unpacked weights, because products of packed ones have the same bits in both modes
EXACTLY: LoadOptions = {"exact": True, "threads": 2, "weights": "dense"}
PLAIN: LoadOptions = {"threads": 1, "weights": "dense"}
REFERENCE: LoadOptions = {"kernels": "gdn=reference", "threads": 2, "weights": "dense"}


def loaded(options: LoadOptions) -> Engine:
    return Engine.load("demo", None, np=2, ctx=256, warm_up=False, prefix_cache=False, **options)


def bits(engine: Engine) -> Bits:
    """Log probabilities of a prompt that is long enough for kernels of many rows, and of a few tokens behind it."""
    result = engine.generate(PROMPT, max_tokens=6, temperature=0.0, logprobs=5)
    return [(p.logprob, *(x for _, x in p.top)) for p in result.logprobs]


_ALONE: dict[str, Bits] = {}


def alone(name: str, options: LoadOptions) -> Bits:
    if name not in _ALONE:
        with loaded(options) as engine:
            _ALONE[name] = bits(engine)
    return _ALONE[name]


PAIRS: dict[str, tuple[LoadOptions, LoadOptions]] = {
    "exact and not": (EXACTLY, PLAIN),
    "not and exact": (PLAIN, EXACTLY),
    "reference and not": (REFERENCE, PLAIN),
    "not and reference": (PLAIN, REFERENCE),
    "exact and reference": (EXACTLY, REFERENCE),
}


@pytest.mark.sampled(1, most=2)
@pytest.mark.parametrize("pair", few(PAIRS, "exact and not", "not and reference"))
def test_two_engines_of_one_process_have_each_their_own_ways(pair: str) -> None:
    first, second = PAIRS[pair]
    want = [alone(str(options), options) for options in (first, second)]
    assert want[0] != want[1], "the two ways give the same bits: this shows nothing"
    n_thread = torch.get_num_threads()
    with loaded(first) as one, loaded(second) as other:
        found = [bits(one), bits(other), bits(one)]
    assert found == [want[0], want[1], want[0]]
    assert (torch.get_num_threads(), current().is_exact, current().tiers) == (n_thread, False, ()), (
        "the program has them, too"
    )


def test_rows_of_an_exact_engine_have_the_same_bits_in_every_run_and_company() -> None:
    """With drafts, whose number depends on the clock, and neighbours whose rows come before or after."""
    with Engine.load(
        "demo", np=3, ctx=512, warm_up=False, prefix_cache=False, exact=True, threads=2
    ) as engine:

        def run(*beside: str) -> Bits:
            options = {"max_tokens": 24, "temperature": 0.0, "logprobs": 4}
            result = engine.generate_many([*beside, PROMPT], **options)[-1]  # type: ignore[call-overload]
            return [(p.logprob, *(x for _, x in p.top)) for p in result.logprobs]

        want = run()
        runs: list[Callable[[], Bits]] = [
            run,
            lambda: run("a b c"),
            lambda: run("The river " * 9, "Seven"),
            run,
        ]
        for i, each in enumerate(runs):
            assert each() == want, f"run {i}"
