"""Logits of tiny random models against llama.cpp, whichever way the rows came in."""

import numpy as np
import pytest
import torch
from harness import DEVICE, FIXTURES, Bench

MODELS = [
    "llama",
    "llama_freqs_tied",
    "llama_q8_0",
    "qwen3",
    "qwen3_tied_q8_0",
    "qwen35",
    "qwen35_equal_tied",
    "qwen35_q8_0",
    "qwen35_full_heads_q8_0",
]
ATOL = 1e-3
NARROW, WIDEST = 20, 17


def expected(name: str) -> tuple[list[int], torch.Tensor, dict[str, np.ndarray]]:
    data = dict(np.load(FIXTURES / f"{name}.npz"))
    return data["tokens"].tolist(), torch.from_numpy(data["logits"]), data


def divergence(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Mean KL(theirs || ours) in nats."""
    p, q = theirs.double().log_softmax(-1), ours.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def slices(n: int, width: int) -> list[slice]:
    """Forwards of n tokens: `width` a forward for the first and the last NARROW tokens, the ones between in one."""
    head, tail = min(NARROW, n), max(n - NARROW, min(NARROW, n))
    starts = [*range(0, head, width), *([head] if head < tail else []), *range(tail, n, width)]
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], n], strict=True)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("chunk", [1, 3, 16, 100])
@pytest.mark.parametrize("name", MODELS)
def test_prefill_in_any_chunks_gives_llama_cpp_logits(name: str, chunk: int) -> None:
    tokens, want, _ = expected(name)
    bench = Bench(FIXTURES / f"{name}.gguf")
    parts = slices(len(tokens), chunk)
    got = torch.cat([bench.feed(0, tokens[part]) for part in parts])
    assert (got - want).abs().max() < ATOL
    assert divergence(got, want) < 1e-4


@pytest.mark.sampled(1)
@pytest.mark.parametrize("width", range(1, WIDEST + 1))
@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "qwen35", "qwen35_equal_tied", "qwen35_full_heads_q8_0"]
)
def test_verify_of_any_width_gives_the_same_logits(name: str, width: int) -> None:
    tokens, want, _ = expected(name)
    bench = Bench(FIXTURES / f"{name}.gguf")
    got = torch.cat(
        [
            bench.feed(0, tokens[part], keep=part.stop - part.start > WIDEST)
            for part in slices(len(tokens), width)
        ]
    )
    assert (got - want).abs().max() < ATOL


@pytest.mark.parametrize("name", ["llama_q8_0", "qwen35_q8_0"])
def test_packed_weights_give_the_logits_of_unpacked_ones(name: str) -> None:
    tokens, want, _ = expected(name)
    got = Bench(FIXTURES / f"{name}.gguf", dense=None).feed(0, tokens)
    # Kernels round rows, to f16 on a GPU and to 16-bit whole numbers on a CPU, which these tiny models amplify: 8-bit rows are at up to 2e-2
    assert divergence(got, want) < (1e-5 if DEVICE.type == "cpu" else 1e-3)


@pytest.mark.parametrize("name", [m for m in MODELS if m.endswith("q8_0")])
def test_logits_stay_near_llama_cpps_eight_bit_activations(name: str) -> None:
    """llama.cpp rounds activations to 8 bits and we do not, so the bound is what that rounding alone does."""
    tokens, _, data = expected(name)
    got = Bench(FIXTURES / f"{name}.gguf").feed(0, tokens)
    rounding = divergence(torch.from_numpy(data["logits"]), torch.from_numpy(data["quantised_logits"]))
    assert divergence(got, torch.from_numpy(data["quantised_logits"])) < 1.1 * rounding + 1e-4


def test_hidden_states_are_after_the_final_norm() -> None:
    tokens, _, data = expected("qwen35")
    bench = Bench(FIXTURES / "qwen35.gguf")
    out = bench.forward(bench.seq(0, tokens))
    assert (out.hidden.cpu() - torch.from_numpy(data["hidden"])).abs().max() < ATOL


def test_demo_target_gives_llama_cpp_logits() -> None:
    data = np.load(FIXTURES / "demo.npz")
    path = FIXTURES.parents[1] / "pyspec" / "demo" / "pyspec-demo.gguf"
    bench = Bench(path, n_slot=3)
    for i in range(3):
        got = bench.feed(i, data[f"tokens_{i}"].tolist())
        ids = torch.from_numpy(data[f"top_ids_{i}"]).long()
        want = torch.from_numpy(data[f"top_logits_{i}"])
        assert (got.gather(-1, ids) - want).abs().max() < ATOL
        assert (got.logsumexp(-1) - torch.from_numpy(data[f"lse_{i}"])).abs().max() < ATOL
        assert divergence(got, torch.from_numpy(data[f"quantised_logits_{i}"]).float()) < 1e-3
