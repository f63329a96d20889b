"""Which cases of a test run in `make test`, and which in `make test-all` alone.

Many tests have more cases than are worth a run each time. The other cases are marked slow, never dropped:

* `@pytest.mark.sampled` keeps few cases in which all pairs of values occur that occur in any: nearly all mistakes need no more
  than two things to meet. `@pytest.mark.sampled(1)` keeps every value once; `most=2` keeps two of these, where each takes long.
* A parameter `arch` of a test that compiles is sampled by NEIGHBOURS: code that compiles for the oldest and for ours compiles for similar ones.
* `few(values, *kept)` keeps the named values; `slow(*values)` is one case that it leaves out.
* Cases of a card (tests/kernels/machines.py) are never left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest
from _pytest.mark import ParameterSet

NEIGHBOURS = {"sm_86": "sm_80", "sm_89": "sm_80", "sm_100a": "sm_90a", "sm_120f": "sm_90a"}
"""Omitted architectures, and those that stand for them."""
Case = Mapping[str, Hashable]


def few(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Values of one parameter; all but those kept are slow."""
    return [v if v in kept else pytest.param(v, marks=pytest.mark.slow) for v in values]


def slow(*values: Any, id: str | None = None) -> ParameterSet:
    """One slow case of a test with several parameters."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def meetings(case: Case, strength: int) -> set[Hashable]:
    """Every `strength` values that meet in a case; all of them if there are fewer."""
    return {frozenset(x) for x in combinations(case.items(), min(strength, len(case)))}


def cover(cases: Sequence[Case], strength: int, most: int | None = None) -> set[int]:
    """Indices of few cases in which all pairs of values occur, or as many as `most` cases allow; the same for the same cases.

    Among the cases with most new pairs, the one with the least chosen values comes first.
    """
    left = [meetings(case, strength) for case in cases]
    chosen: set[int] = set()
    used: Counter[tuple[str, Hashable]] = Counter()
    while any(left) and (most is None or len(chosen) < most):
        best = max(
            range(len(cases)), key=lambda i: (len(left[i]), -sum(used[x] for x in cases[i].items()))
        )
        chosen.add(best)
        used.update(cases[best].items())
        new = left[best]
        left = [rest - new for rest in left]
    return chosen


def mark_slow(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that `make test` leaves out."""
    tests: dict[str, list[tuple[pytest.Function, pytest.Mark]]] = {}
    for item in items:
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        compiles = "compile" in item.name.partition("[")[0]
        if compiles and item.callspec.params.get("arch") in NEIGHBOURS:
            item.add_marker(pytest.mark.slow)
        mark = item.get_closest_marker("sampled")
        if mark is not None and not any(map(item.get_closest_marker, ("slow", "card"))):
            tests.setdefault(item.nodeid.partition("[")[0], []).append((item, mark))
    for same in tests.values():
        cases = [{name: repr(value) for name, value in item.callspec.params.items()} for item, _ in same]
        mark = same[0][1]
        chosen = cover(cases, *(mark.args or (2,)), **mark.kwargs)
        for i, (item, _) in enumerate(same):
            if i not in chosen:
                item.add_marker(pytest.mark.slow)


def all_pairs(values: Mapping[str, Sequence[Hashable]]) -> list[dict[str, Hashable]]:
    """Few cases, one value of each parameter, in which every two values of two parameters meet; the same for the same parameters.

    Each case takes, parameter by parameter, the value with most new pairs; among equals the least chosen one.
    """
    names = sorted(values, key=lambda name: (-len(values[name]), name))
    left = {
        frozenset(((a, x), (b, y)))
        for a, b in combinations(names, 2)
        for x in values[a]
        for y in values[b]
    }
    used: Counter[tuple[str, Hashable]] = Counter()
    cases: list[dict[str, Hashable]] = []
    while left:
        case = dict(min(left, key=lambda pair: sorted(map(repr, pair))))
        for name in names:
            if name not in case:
                case[name] = max(
                    values[name],
                    key=lambda x: (
                        sum(frozenset(((name, x), one)) in left for one in case.items()),
                        -used[name, x],
                    ),
                )
        left -= meetings(case, 2)
        used.update(case.items())
        cases.append(case)
    return cases
