"""One forward over several ranks: the model's logits, and the same bits every time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch
from rank_bench import CPU, FIXTURES, RankBench, together
from rewrite import rewrite
from torch import Tensor

from pyspec import synth
from pyspec.cuda.collective import Collective
from pyspec.errors import DeviceError

DEMO = Path(__file__).parents[2] / "pyspec" / "demo" / "pyspec-demo.gguf"
MOST_KL = 1e-6
FAST = [
    ("qwen35", 2),
    ("qwen35moe_fused_tied", 2),
    ("llama_freqs_tied", 4),
    ("nemotron_latent", 2),
    ("deepseek4", 2),
]
FAST += [("qwen2", 2), ("qwen3moe", 2), ("granite", 2), ("mistral3", 2)]
FAST += [("glm4moe", 2), ("minimax-m2", 2), ("lfm2moe", 2), ("qwen3next", 2), ("gpt-oss", 2)]
FAST += [("latent", 2), ("latent", 4)]
FAST += [("gemma4", 2), ("gemma4_moe", 2), ("gemma4_e", 4)]
FAST += [("qwen35", 3), ("nemotron_latent", 3), ("llama", 3)]  # zeros and copies where nothing divides
SLOW = [
    ("demo", 2), ("llama", 2), ("llama", 4), ("llama_q8_0", 2), ("qwen3", 4), ("qwen3_tied_q8_0", 2), ("qwen35_equal_tied", 2),
    ("qwen35_full_heads_q8_0", 2), ("qwen35moe", 2), ("nemotron_dense", 2), ("nemotron_differ", 2), ("nemotron_moe", 2),
    ("deepseek4_pro", 2), ("demo", 3), ("qwen3next", 3), ("gemma4_e", 3), ("glm4moe", 3), ("gpt-oss", 3), ("lfm2moe", 3), ("minimax-m2", 3),
    ("granitemoe", 2), ("granitehybrid-moe", 2), ("smollm3", 2), ("qwen2moe", 2), ("bailingmoe2", 2), ("ernie4_5-moe", 2), ("glm4", 2),
    ("phi3", 2), ("olmo3", 2), ("exaone4", 2), ("exaone-moe", 2), ("dots1", 3), ("seed_oss", 3),
    ("muse-glimmer", 2), ("laguna", 2), ("falcon-h1", 2), ("cohere2", 2), ("step35", 2), ("k2-horizon", 2), ("laguna", 3),
    ("hunyuan-dense", 2), ("hunyuan-moe", 2), ("gemma2", 2), ("kimi-linear", 3), ("bailingmoe3", 3), ("llama4", 2),
    ("qwen4exp", 2), ("glm-dsa", 2), ("kimi-k3", 3), ("k2-horizon-mova", 2), ("glm5-next", 2),
    ("qwen35", 4), ("nemotron_latent", 4), ("nemotron_moe", 3),
]  # fmt: skip
CASES = [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


def path_of(name: str) -> Path:
    if name.startswith("gemma4"):  # the heads of its fixtures do not divide
        return _gemma4(name)
    if name.startswith("latent"):
        return _latent(name)
    return DEMO if name == "demo" else FIXTURES / f"{name}.gguf"


@cache
def _gemma4(name: str) -> Path:
    dims = synth.TINY["gemma4"]
    kinds = {"gemma4_moe": {"n_expert": 6, "n_used": 2, "n_ff_expert": 32}}
    kinds["gemma4_e"] = {"n_input": 8, "n_sharing": 2}
    path = Path(mkdtemp(prefix="pyspec-ranks-")) / f"{name}.gguf"
    return synth.write(replace(dims, **kinds.get(name, {})), path, quant="f32")


@cache
def _latent(name: str) -> Path:
    """deepseek2 of eight heads, experts in groups, and matrices that 8-bit blocks hold."""
    sizes = {"n_head": 8, "rank": 64, "n_rot": 16, "head_dim": 48, "n_value": 32, "n_layer": 3}
    dims = replace(synth.TINY["deepseek2"], **sizes)
    path = Path(mkdtemp(prefix="pyspec-ranks-")) / f"{name}.gguf"
    return synth.write(dims, path, quant="q8_0" if name == "latent_q8_0" else "f32")


@cache
def by_ranks(name: str, n: int, packed: bool = False) -> list[list[Tensor]]:
    dense = None if packed else torch.float32
    return together(n, lambda ranks: RankBench(path_of(name), ranks, dense).forwards())


def kl(a: Tensor, b: Tensor) -> float:
    p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).max())


@pytest.mark.sampled(1, most=6)
@pytest.mark.parametrize(("name", "n"), CASES)
def test_ranks_together_are_the_model(name: str, n: int) -> None:
    alone = RankBench(path_of(name), None).forwards()
    for one, shared in zip(alone, by_ranks(name, n)[0], strict=True):
        assert one.shape == shared.shape and kl(one, shared) <= MOST_KL


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize(("name", "n"), CASES)
def test_all_ranks_have_the_same_bits_and_have_them_again(name: str, n: int) -> None:
    by_ranks.cache_clear()
    once = by_ranks(name, n)
    by_ranks.cache_clear()
    again = by_ranks(name, n)
    assert all(torch.equal(a, b) for r in (*once[1:], *again) for a, b in zip(once[0], r, strict=True))


def test_sums_of_ranks_are_normed_whole_before_they_go_back_to_the_stream(tmp_path: Path) -> None:
    """gemma3 with four heads instead of three: norms behind attention and feed-forward, windows, one key head for all ranks."""
    rng = np.random.default_rng(1)
    shapes = {"attn_q": (64, 32), "attn_output": (32, 64)}
    new = {
        f"blk.{i}.{x}.weight": rng.standard_normal(shape) / 6
        for i in range(7)
        for x, shape in shapes.items()
    }
    path = rewrite(
        FIXTURES / "gemma3.gguf",
        tmp_path / "m.gguf",
        change={"gemma3.attention.head_count": 4},
        drop=new.__contains__,
        add=new,
    )
    alone = RankBench(path, None).forwards()
    ranks = together(2, lambda ranks: RankBench(path, ranks).forwards())
    for one, first, second in zip(alone, *ranks, strict=True):
        assert kl(one, first) <= MOST_KL and torch.equal(first, second)


@pytest.mark.parametrize(
    "name",
    ["llama_q8_0", "nemotron_latent_q8_0", "latent_q8_0", pytest.param("demo", marks=pytest.mark.slow)],
)
def test_packed_blocks_give_the_same_as_unpacked_ones(name: str) -> None:
    """But for the rounding of rows to 16-bit whole numbers."""
    wide, packed = by_ranks(name, 2), by_ranks(name, 2, packed=True)
    for a, b in zip(wide[0], packed[0], strict=True):
        p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
        assert (p.exp() * (p - q)).sum(-1).max() < 1e-5


def test_a_sum_is_taken_in_the_order_of_ranks_wherever_a_row_stands() -> None:
    x = torch.randn(3, 4, 1000, generator=torch.Generator().manual_seed(1)) * torch.tensor(
        [1e8, 1.0, 1e-8]
    ).view(3, 1, 1)

    def sums(ranks: Collective) -> tuple[Tensor, Tensor, Tensor]:
        own = x[ranks.rank.index]
        return ranks.sum(own), torch.cat([ranks.sum(row[None]) for row in own]), ranks.sum(own[:0])

    for whole, rows, none in together(3, sums):
        assert (
            torch.equal(whole, x[0] + x[1] + x[2])
            and torch.equal(whole, rows)
            and none.shape == (0, 1000)
        )


def test_columns_of_unequal_ranks_stand_side_by_side() -> None:
    x = torch.randn(2, 7)
    widths = [3, 3, 1]
    parts = x.split(widths, -1)
    found = together(3, lambda ranks: ranks.columns(parts[ranks.rank.index], widths))
    assert all(torch.equal(y, x) for y in found)


def test_ranks_that_lose_one_say_so() -> None:
    def leave(ranks: Collective) -> str:
        ranks.sum(
            torch.ones(4, device=CPU)
        )  # both have met: a rank that leaves earlier is reported with other words
        if ranks.rank.index == 1:
            ranks.abort()
            return ""
        ranks.why = lambda: "rank 1 ended: signal 9"
        with pytest.raises(DeviceError) as error:
            ranks.sum(torch.ones(4, device=CPU))
        return str(error.value)

    assert together(2, leave)[0] == "rank 0 of 2 has lost the others: rank 1 ended: signal 9"
