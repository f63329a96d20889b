"""Cases that `make test` leaves out are marked slow, and the kept ones have every pair of values."""

from __future__ import annotations

import random
from itertools import combinations, product

import pytest
from sampling import NEIGHBOURS, cover, few

from pyspec.cuda.jit import ARCHS

pytest_plugins = ("pytester",)


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_a_cover_has_every_meeting_and_few_cases(strength: int) -> None:
    axes = {"kind": "abcd", "n": (1, 2, 8), "on": (False, True), "seed": (0, 1, 2)}
    cases = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    chosen = [cases[i] for i in cover(cases, strength)]
    for names in combinations(axes, strength):
        for values in product(*(axes[name] for name in names)):
            assert any(all(case[k] == v for k, v in zip(names, values, strict=True)) for case in chosen)
    assert len(chosen) <= {1: 4, 2: 16, 3: 50}[strength] < len(cases) == 72


def test_a_cover_of_cases_by_hand_has_what_occurs_and_no_more() -> None:
    rng = random.Random(0)
    cases = [{"a": rng.randint(0, 3), "b": rng.randint(0, 3), "c": rng.randint(0, 3)} for _ in range(40)]
    pairs = lambda case: {frozenset(x) for x in combinations(case.items(), 2)}  # noqa: E731
    chosen = cover(cases, 2)
    assert set().union(*(pairs(cases[i]) for i in chosen)) == set().union(*map(pairs, cases))
    assert len(chosen) < 40
    assert cover(cases, 2) == chosen, "every worker chooses the same"
    assert cover([{"only": i} for i in range(5)], 2) == set(range(5)), (
        "one parameter has no pairs: all values stay"
    )


def test_values_that_are_chosen_once_more_are_those_chosen_least() -> None:
    cases = [{"kind": kind, "n": n} for kind in "abcdef" for n in (1, 2)]
    chosen = [cases[i]["n"] for i in cover(cases, 1)]
    assert sorted(chosen) == [1, 1, 1, 2, 2, 2]


def test_architectures_are_left_out_only_beside_one_that_stands_for_them() -> None:
    assert set(NEIGHBOURS) < set(ARCHS) and set(NEIGHBOURS.values()) <= set(ARCHS) - set(NEIGHBOURS)


def test_values_beside_the_named_ones_are_slow() -> None:
    found = few("abc", "b")
    assert found[1] == "b" and [p.values for p in (found[0], found[2])] == [("a",), ("c",)]
    assert all(mark.name == "slow" for p in (found[0], found[2]) for mark in p.marks)


def test_fast_and_slow_cases_together_are_all_cases(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        import pytest
        from sampling import mark_slow

        @pytest.hookimpl(tryfirst=True)
        def pytest_collection_modifyitems(items):
            mark_slow(items)
        """
    )
    pytester.makepyfile(
        test_shapes="""
        import pytest

        @pytest.fixture(params=[0, 1])
        def seed(request):
            return request.param

        @pytest.mark.sampled
        @pytest.mark.parametrize("a", range(4))
        @pytest.mark.parametrize("b", range(4))
        def test_pairs(a, b, seed): ...

        @pytest.mark.sampled(1)
        @pytest.mark.parametrize("a", range(4))
        @pytest.mark.parametrize("b", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
        def test_values(a, b): ...

        @pytest.mark.parametrize("a", range(4))
        def test_all(a): ...
        """,
        test_of_archs_of_a_test="""
        import pytest

        @pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a"])
        def test_it_compiles_for(arch): ...
        """,
    )
    args = ("-p", "no:cacheprovider", "-o", "markers=slow\nsampled")
    counts = [
        pytester.runpytest_inprocess(*args, *which).parseoutcomes()
        for which in (("-m", "not slow"), ("-m", "slow"))
    ]
    assert [c["passed"] for c in counts] == [16 + 4 + 4 + 2, 16 + 8 + 1]
