"""Kernels from which one wait or barrier is taken away fail the tests that emulate them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import test_attend as attend
import test_best as best
import test_gdn as gdn
import test_heads as heads
import test_index_rows as index_rows
import test_latent as latent
import test_linear_emulated as linear
import test_mamba2 as mamba2
import test_moe_route_emulated as route
import test_norms as norms
import test_recurrent_cuda as recurrent
import test_rope_latent as rope_latent
import test_rows as rows
import test_wgmma_cuda as wgmma
from emulated.machine import needs_compiler
from machines import CPU, EMULATED, Machine

from pyspec.cuda import jit
from pyspec.cuda.ops.linear import cuda as linear_cuda
from pyspec.cuda.ops.linear import pair as linear_pair
from pyspec.cuda.ops.linear import wgmma as linear_wgmma
from pyspec.cuda.ops.rows.ref import PrepKind
from pyspec.gguf import GGMLType

pytestmark = [needs_compiler, pytest.mark.slow]


def of(seed: int) -> Machine:
    return Machine("emulated", CPU, seed)


def attended(name: str, seed: int) -> None:
    attend.test_every_row_is_the_references_and_padding_comes_out_as_zeros(of(seed), name)


def multiplied(way: str, seed: int) -> None:
    linear.test_products_equal_exact_sums_of_rounded_rows(GGMLType.Q8_0, way, seed)


def prompted(seed: int) -> None:
    mamba2.test_chunked_prompts_follow_the_reference(of(seed), "narrow")


def latently(name: str, seed: int) -> None:
    latent.test_every_row_is_the_references_and_padding_comes_out_as_zeros(of(seed), name)


def convolved(seed: int) -> None:
    recurrent.test_states_and_outputs_do_not_depend_on_how_tokens_came_nor_on_neighbours_to_the_bit(
        of(seed), "short_conv"
    )


def rounds_of_gdn(seed: int) -> None:
    op = gdn.op_of(1, 1, columns=2, chunked=gdn.NEVER)
    gdn.test_ragged_rounds_follow_the_reference(of(seed), op, gdn.ROUNDS)


def prompts_of_gdn(seed: int) -> None:
    op = gdn.op_of(1, 2, columns=2, chunked=63)
    gdn.test_chunked_prompts_follow_the_reference(of(seed), op, gdn.PROMPTS, (9, 0))


def rows_of_gdn(seed: int) -> None:
    gdn.test_rows_prepared_on_the_way_have_the_bits_of_outputs_prepared_alone(
        of(seed), gdn.op_of(1, 1, columns=2), gdn.PREPARED
    )


def warpgroups(_: int) -> None:
    wgmma.test_products_equal_float64(EMULATED, GGMLType.Q8_0, 264, 1024, (35,))


def indexed(_: int) -> None:
    index_rows.test_warpgroups_score_tiles_of_every_size(
        EMULATED, [(900, 40)], 3
    )  # more rows than the ring has


MUTANTS: list[tuple[str, str, int, Callable[[int], None]]] = [
    ("rows", "__syncthreads();", 0, lambda seed: rows.test_row_major_rows_equal_the_reference(of(seed), 384, PrepKind.PLAIN)),
    # keys and values of 16 bits, of bytes, and of fewer bits, in this order
    *(
        ("attend", "wait_oldest();", i, lambda seed, name=name: attended(name, seed))
        for i, name in ((0, "ragged"), (2, "q8_0"), (3, "f8"), (4, "q4_0"), (5, "q4_0"))
    ),
    ("attend", "__syncwarp();  // other lanes' scales", 0, lambda seed: attended("q8_0", seed)),
    ("attend", "__syncwarp();  // other lanes' factors and fifth bits", 0, lambda seed: attended("q5_1 window", seed)),
    *(
        ("attend", "__syncwarp();  // other lanes' copies", i, lambda seed, name=name: attended(name, seed))
        for i, name in ((0, "ragged"), (1, "f8"), (2, "q4_0"))
    ),
    *(  # before the place of factors, or of the step, is filled again
        ("attend", "__syncwarp();", i, lambda seed, name=name: attended(name, seed))
        for i, name in ((3, "q8_0"), (5, "f8"), (7, "q4_0"), (9, "q4_0"))
    ),
    ("attend", "__syncthreads();  // the first warp has found them", 0, lambda seed: attended("ragged", seed)),
    ("attend_latent", "copies_wait<0>();", 0, lambda seed: latently("ragged", seed)),
    *(("attend_latent", "__syncthreads();", i, lambda seed: latently("ragged", seed)) for i in (0, 1, 2, 3, 5, 6, 7)),
    ("attend_latent", "if (BUFFERS == 1) __syncthreads();", 0, lambda seed: latently("q8_0", seed)),
    ("rope_latent", "__syncwarp();", 0, lambda seed: rope_latent.test_it_passes_the_ops_check("f16", (3, 128, 40, 24), seed > 0)),
    ("heads", "copies_wait<0>();", 0, lambda seed: heads.test_products_are_the_references(of(seed), heads.spec_of("Q5_K"))),
    ("heads", "__syncthreads();", 0, lambda seed: heads.test_products_are_the_references(of(seed), heads.spec_of("Q5_K"))),
    ("moe_route", "__syncthreads();", 4, lambda seed: route.test_of_groups_with_equal_sums_the_first_are_kept("groups of more than a warp")),
    ("moe_route", "__syncthreads();", 3, lambda seed: route.test_routes_are_the_references("groups of more than a warp")),
    ("short_conv", "__syncthreads();", 0, convolved),
    ("best", "__syncthreads();", 0, lambda seed: best.test_tokens_and_values_are_the_references(EMULATED, seed, best.FEW)),
    ("best", "__syncthreads();", 1, lambda seed: best.test_tokens_and_values_are_the_references(EMULATED, seed, best.FEW)),
    ("best", "if (is_last) tickets[row] = 0;", 0, lambda seed: best.test_tokens_and_values_are_the_references(EMULATED, seed, best.FEW)),
    ("norms", "__syncthreads();", 0, lambda seed: norms.test_rows_are_the_references(of(seed), 2048, False)),
    ("attend_plain", "__syncthreads();", 0, lambda seed: attended("f32", seed)),
    ("linear", "copies_wait<STAGES - 2>();", 0, lambda seed: multiplied("linear", seed)),
    ("linear_sm90", "barrier_wait(empty + at.stage * 8, at.parity);", 0, lambda seed: multiplied("linear_sm90", seed)),
    ("linear_sm90", "leave(behind, acc);", 1, lambda seed: multiplied("linear_sm90", seed)),
    *(
        ("linear_pair", text, which, lambda seed: multiplied("linear_pair", seed))
        for text, which in (
            ("if (again) barrier_wait(empty + at.slot * 8, at.parity ^ 1);", 0),
            ("barrier_wait(rows_full + at.slot * 8, at.parity);", 0),
            ("barrier_wait_cluster(barrier, band >> 1 & 1);", 0),
            ("    all_meet();", 0),  # shares of this CTA are there
            ("wait_for_cluster();", 1),
            ("barrier_arrive(empty + at.slot * 8);", 0),
        )
    ),
    ("gdn", "__syncthreads();", 0, rounds_of_gdn),
    ("gdn", "__syncthreads();", 1, rounds_of_gdn),
    *(
        ("gdn", text, which, rows_of_gdn)
        for text, which in (("__syncthreads();", 2), ("barrier_wait(barrier, j / 2 % 2);", 0), ("out.meet();", 0))
    ),
    ("gdn_chunk", "copies_wait<1>();", 0, prompts_of_gdn),
    ("mamba2_chunk", "__syncthreads();", 0, prompted),
    *(("mamba2_chunk", "copies_wait<0>();", i, prompted) for i in range(4)),
    *(("mamba2_chunk", f"  meet_{who}();", i, prompted) for who in ("keepers", "makers") for i in (0, 1)),
    ("linear_wgmma", "wgmma_wait<0>();", 0, warpgroups),
    ("linear_wgmma", "barrier_wait(b.full + b.stage * 8, b.parity);", 0, warpgroups),
    *(
        ("linear_wgmma", text, which, warpgroups)
        for text, which in (
            ("barrier_wait(ring.empty + ring.stage * 8, ring.parity ^ 1);", 1),  # of rows
            ("barrier_wait(b.empty + b.stage * 8, b.parity ^ 1);", 0),
            ("if (old_b) release_rows(old_b);", 0),
            *(("wait_for_cluster();", i) for i in (0, 1)),
        )
    ),
    *(
        ("index_rows", text, which, indexed)
        for text, which in (
            ("barrier_wait(ring.full(), ring.parity);", 0),
            ("barrier_wait(ring.empty(), ring.parity ^ 1);", 0),
            ("if (lane == 0) barrier_arrive(ring.empty());", 0),
            ("wgmma_wait<0>();", 0),
            ("wgmma_fence();", 0),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("stem", "text", "which", "run"), MUTANTS, ids=[f"{m[0]}-{m[1]}-{m[2]}" for m in MUTANTS]
)
def test_without_it_the_kernel_is_wrong(
    stem: str, text: str, which: int, run: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = jit.source
    parts = real(stem).split(text)
    assert len(parts) > which + 1, f"{stem}.cu has no such {text}"
    mutant = text.join(parts[: which + 1]) + ";" + text.join(parts[which + 1 :])
    monkeypatch.setattr(jit, "source", lambda name: mutant if name == stem else real(name))
    monkeypatch.setattr(
        linear_cuda, "n_stages", lambda type, shape, capability: 2 if capability >= (9, 0) else 3
    )
    monkeypatch.setattr(linear_pair, "MAX_SLOTS", 4)
    monkeypatch.setattr(linear_wgmma, "PADS", (64,))
    monkeypatch.setattr(linear_wgmma, "stages", lambda type, pad, many=0: (2, 2))
    with pytest.raises(AssertionError):  # EmulationError is one
        for seed in range(3):
            run(seed)
