"""How decoding slots and prompts share the rows of a forward."""

from __future__ import annotations

from engine_rig import Rig, fake_rig

from pyspec.engine.loop.round import RowLimits, plan_work


def busy(n_prompt: list[int], n_decoding: int = 2) -> Rig:
    """`n_decoding` slots decode, and these prompts were just seated."""
    r = fake_rig(n_decoding + len(n_prompt), ctx=4096)
    for i in range(n_decoding):
        r.submit([i + 1, 2, 3], 100)
    r.loop.step()
    for n in n_prompt:
        r.submit([7] * n, 4)
    r.loop.admit()
    return r


def widths(r: Rig, limits: RowLimits) -> list[int]:
    return [w.seq.width for w in plan_work(r.loop.jobs.values(), {}, limits)]


def test_what_a_forward_has_no_room_for_waits() -> None:
    assert widths(busy([300, 300, 300]), RowLimits(512, 2048)) == [1, 1, 300, 210]


def test_the_last_of_all_prompts_is_read_in_a_forward_that_is_a_quarter_larger() -> None:
    assert widths(busy([300, 300]), RowLimits(512, 2048)) == [1, 1, 300, 300]
    assert widths(busy([638]), RowLimits(512, 2048)) == [1, 1, 638]
    assert widths(busy([639]), RowLimits(512, 2048)) == [1, 1, 510]


def test_no_forward_is_larger_than_there_is_memory_for() -> None:
    assert widths(busy([300, 300]), RowLimits(512, 512)) == [1, 1, 300, 210]
    assert widths(busy([300, 300]), RowLimits(512, 602)) == [1, 1, 300, 300]


def test_prompts_alone_have_their_own_limit() -> None:
    assert widths(busy([900, 900, 900], 0), RowLimits(512, 2048)) == [900, 900, 248]
