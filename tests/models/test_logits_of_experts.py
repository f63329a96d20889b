"""`nemotron_h`, `nemotron_h_moe` and `qwen35moe`: logits, states and MTP blocks against llama.cpp, in any division of the rows."""

from __future__ import annotations

import pytest
import torch
from harness import Bench, near
from llama_cases import (
    ATOL,
    bench_of,
    check_chained_steps,
    check_mtp_rows,
    check_ragged_slots,
    check_refused_rows,
    told,
)
from test_nemotron import mtp_of

from pyspec.draft.chain import Chain

WITH_MTP = [
    "nemotron_moe",
    "nemotron_latent",
    "nemotron_latent_q8_0",
    "qwen35moe",
    "qwen35moe_mixed_q8_0",
]
MODELS = ["nemotron_dense", "nemotron_differ", "qwen35moe_fused_tied", *WITH_MTP]
each_with_mtp = pytest.mark.parametrize("name", WITH_MTP)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dense", [torch.float32, None], ids=["unpacked", "packed"])
@pytest.mark.parametrize("chunk", [1, 3, 16, 100])
@pytest.mark.parametrize("name", MODELS)
def test_prefill_in_any_chunks_gives_llama_cpp_logits(
    name: str, chunk: int, dense: torch.dtype | None
) -> None:
    (tokens, want), bench = told(name), bench_of(name, dense=dense)
    got = torch.cat([bench.feed(0, tokens[i : i + chunk]) for i in range(0, len(tokens), chunk)])
    # One choice at its 12th token turns, and the states remember
    assert near(got, want, dense, ATOL, 0.6 if name == "nemotron_latent_q8_0" else 0.1)


@pytest.mark.sampled(1, most=11)
@pytest.mark.parametrize(
    ("name", "width"),
    [
        *((name, width) for width in range(1, 18) for name in ("nemotron_dense", "nemotron_latent")),
        *((name, width) for width in range(1, 10) for name in ("qwen35moe", "qwen35moe_fused_tied", "qwen35moe_mixed_q8_0")),
    ],
)  # fmt: skip
def test_verify_of_any_width_gives_the_same_logits(name: str, width: int) -> None:
    (tokens, want), bench = told(name), bench_of(name)
    got = [bench.feed(0, tokens[i : i + width], keep=False) for i in range(0, len(tokens), width)]
    assert (torch.cat(got) - want).abs().max() < ATOL


@pytest.mark.parametrize("name", ["nemotron_latent", "qwen35moe"])
def test_hidden_states_are_after_the_final_norm(name: str) -> None:
    (tokens, want), bench = told(name, "hidden"), bench_of(name)
    assert (bench.forward(bench.seq(0, tokens)).hidden.cpu() - want).abs().max() < ATOL


@pytest.mark.parametrize("name", ["nemotron_latent_q8_0", "qwen35moe_mixed_q8_0"])
def test_rounding_to_eight_bits_explains_llama_cpps_own_logits(name: str) -> None:
    """llama.cpp rounds activations, which flips near ties of the router; we may not be farther from it than that."""
    tokens, exact = told(name)
    rows = exact, told(name, "quantised_logits")[1], bench_of(name).feed(0, tokens)
    exact, rounded, got = (x.double().log_softmax(-1) for x in rows)
    ours, theirs = (float((rounded.exp() * (rounded - q)).sum(-1).mean()) for q in (got, exact))
    assert ours < 1.1 * theirs + 1e-4


def block_of(name: str) -> tuple[Bench, Chain]:
    return mtp_of(name, layer_norm=name.startswith("nemotron"))


@each_with_mtp
def test_mtp_rows_are_llama_cpps(name: str) -> None:
    check_mtp_rows(*block_of(name), name)


@each_with_mtp
def test_chained_mtp_steps_are_llama_cpps(name: str) -> None:
    check_chained_steps(*block_of(name), name)


@pytest.mark.parametrize(
    ("name", "width", "kept"),
    [
        *(("nemotron_latent", w, k) for w in (1, 2, 3, 8, 17) for k in {1, 2, w // 2, w} if 0 < k <= w),
        *(("qwen35moe", w, k) for w in (1, 2, 5, 9) for k in range(1, w + 1)),
    ],
)
def test_s6_refused_rows_leave_no_trace(name: str, width: int, kept: int) -> None:
    check_refused_rows(name, width, kept, 5 if name == "nemotron_latent" else 3)


def test_ragged_slots_do_not_touch_each_other() -> None:
    """Slots meet at experts, and nowhere else."""
    check_ragged_slots(bench_of("qwen35moe", n_slot=8), "qwen35moe")
