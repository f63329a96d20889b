"""Rope that a file stretches: log probabilities of llama.cpp, keys that mean nothing, and drafters."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import FIXTURES, Bench
from rewrite import rewrite

from pyspec.config import settings_from
from pyspec.draft.dflash_file import read_config as read_drafter
from pyspec.errors import BadGGUF, BadTensors, ModelError
from pyspec.gguf import open_gguf
from pyspec.models import read_config
from pyspec.models.blocks.sparse_attention import TailRope
from pyspec.models.rope import RopeFlags, RopeScaling, RopeSpec, read_scaling
from pyspec.models.ropes import Rope, flags_of

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "fixtures" / "make"))
from fixture_rope import (  # noqa: E402
    CASES,
    FLAG_CASES,
    LATENT_CASES,
    LONGROPE,
    N_CTX,
    YARN,
    divisors,
    keys_of,
    latent,
)  # fmt: skip

DEMO_DRAFT = ROOT / "pyspec" / "demo" / "pyspec-demo-dflash.gguf"


def changed(to: Path, model: str, fields: dict[str, object]) -> Path:
    source = FIXTURES / f"{model}.gguf"
    with open_gguf(source) as file:
        n_rot = file.hparams.integer("rope.dimension_count", 0)
        add = divisors(n_rot // 2) if fields.get("type") == "longrope" else None
        return rewrite(source, to / "m.gguf", change=keys_of(file.architecture, fields), add=add)


def flags_given(flags: Mapping[str, object], n_ctx: int = N_CTX) -> RopeFlags:
    return flags_of(settings_from(dict(flags, ctx=n_ctx)))


@pytest.mark.parametrize("chunk", [120, 17])
@pytest.mark.parametrize("name", CASES)
def test_stretched_rope_gives_llama_cpp_log_probabilities(name: str, chunk: int, tmp_path: Path) -> None:
    model, fields = CASES[name]
    tokens = np.load(FIXTURES / f"{model}.npz")["tokens"].tolist()
    bench = Bench(changed(tmp_path, model, dict(fields)))
    got = torch.cat([bench.feed(0, tokens[i : i + chunk]) for i in range(0, len(tokens), chunk)])[
        -1
    ].log_softmax(-1)
    want = torch.from_numpy(np.load(FIXTURES / "rope_scaling.npz")[name])
    assert (got - want).abs().max() < 1e-3


@pytest.mark.parametrize("name", FLAG_CASES)
def test_flags_and_longrope_give_llama_cpp_log_probabilities(name: str, tmp_path: Path) -> None:
    model, fields, flags = FLAG_CASES[name]
    tokens = np.load(FIXTURES / f"{model}.npz")["tokens"].tolist()
    bench = Bench(changed(tmp_path, model, dict(fields)), rope=flags_given(flags))
    got = bench.feed(0, tokens)[-1].log_softmax(-1)
    want = torch.from_numpy(np.load(FIXTURES / "rope_scaling.npz")[name])
    # llama.cpp's gelu is a table
    assert (got - want).abs().max() < (5e-3 if model == "gemma3" else 1e-3)


@pytest.mark.parametrize("chunk", [40, 9])
@pytest.mark.parametrize("name", LATENT_CASES)
def test_latent_attention_with_a_temperature_gives_llama_cpp_log_probabilities(
    name: str, chunk: int, tmp_path: Path
) -> None:
    tokens = np.load(FIXTURES / "deepseek2.npz")["tokens"].tolist()
    bench = Bench(latent(name, tmp_path / "m.gguf"))
    got = torch.cat([bench.feed(0, tokens[i : i + chunk]) for i in range(0, len(tokens), chunk)])
    want = torch.from_numpy(np.load(FIXTURES / "rope_scaling.npz")[name])
    assert (got[-1].log_softmax(-1) - want).abs().max() < 1e-3


def test_the_cases_tell_one_kind_from_another() -> None:
    found = np.load(FIXTURES / "rope_scaling.npz")
    assert np.abs(found["llama yarn"] - found["llama none"]).max() > 0.1
    assert np.abs(found["llama yarn"] - found["llama without a type"]).max() > 0.1
    assert np.abs(found["llama yarn"] - found["llama yarn, longer"]).max() > 0.1


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"type": "su"}, "rope scaling 'su' is not supported"),
        ({"type": "YARN"}, "rope scaling 'YARN' is not supported"),
        (YARN | {"factor": -2.0}, r"rope\.scaling\.factor is -2\.0"),
        (YARN | {"factor": float("nan")}, r"rope\.scaling\.factor is nan"),
        (YARN | {"original_context_length": 0}, r"rope\.scaling\.original_context_length is 0"),
        (YARN | {"attn_factor": 0.0}, r"rope\.scaling\.attn_factor is 0"),
        ({"../scale_linear": float("inf")}, r"rope\.scale_linear is inf"),
    ],
)
def test_scaling_that_means_nothing_is_refused(
    fields: dict[str, object], says: str, tmp_path: Path
) -> None:
    with (
        pytest.raises((ModelError, BadGGUF), match=says),
        open_gguf(changed(tmp_path, "qwen3", fields)) as file,
    ):
        read_config(file)


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_divisors_that_mean_nothing_are_refused(wrong: float, tmp_path: Path) -> None:
    short, long = divisors(8).values()
    add = {"rope_factors_short.weight": short, "rope_factors_long.weight": np.where(long > 5, wrong, long)}  # fmt: skip
    path = rewrite(
        FIXTURES / "llama.gguf", tmp_path / "m.gguf", change=keys_of("llama", LONGROPE), add=add
    )
    with pytest.raises(BadTensors, match=r"rope_factors_long\.weight has numbers that are not positive"):
        Bench(path, rope=flags_given({}))
    Bench(path, rope=flags_given({}, n_ctx=32))  # which reads the others


def test_keys_that_llama_cpp_does_not_read_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_gguf(
        changed(tmp_path, "qwen35", YARN | {"yarn_beta_fast": 16.0, "yarn_beta_slow": 1.0})
    ) as file:
        assert read_scaling(file).factor == 4.0
    assert [r.getMessage() for r in caplog.records] == [
        "qwen35.rope.scaling.yarn_beta_fast 16 is not used, as llama.cpp does not for this architecture"
    ]


def test_a_drafter_stretches_rope_as_its_own_file_says(tmp_path: Path) -> None:
    path = rewrite(DEMO_DRAFT, tmp_path / "d.gguf", change=keys_of("dflash", YARN))
    with open_gguf(path) as file:
        assert read_drafter(file).rope.scaling == RopeScaling(4.0, "yarn", 32, ramp=1.0)


def test_yarn_leaves_fast_frequencies_alone_and_divides_slow_ones() -> None:
    device = torch.device("cpu")
    spec = RopeSpec(64, 1e4, True, RopeScaling(8.0, "yarn", 4096, 1.25, ramp=1.0))
    plain, rope = Rope(RopeSpec(64, 1e4, True), device), Rope(spec, device)
    assert rope.freq[0] == plain.freq[0] and torch.allclose(rope.freq[-1], plain.freq[-1] / 8)
    positions = torch.tensor([0, 5])
    cos, sin = rope.angles(positions)
    length = 1.25 * (1 + 0.1 * math.log(8))
    assert torch.allclose(cos**2 + sin**2, torch.full_like(cos, length**2))
    assert cos[0].min() == pytest.approx(length)


def test_a_base_of_one_turns_all_dimensions_alike_however_rope_is_stretched() -> None:
    scaling = RopeScaling(8.0, "yarn", 4096, ramp=1.0)
    assert Rope(RopeSpec(64, 1.0, True, scaling), torch.device("cpu")).freq.isfinite().all()
    tail = TailRope(64, 1.0, factor=8.0, n_ctx_orig=4096).freq()
    assert tail.isfinite().all() and tail[-1] == 1 / 8


def test_flags_change_the_two_ropes_of_deepseek4_as_llama_cpp_does() -> None:
    """Compared with llama.cpp once, with a vocabulary for the fixture: a base is that of blocks without compressed rows, the rest is of the others."""
    plain, stretched = TailRope(64, 1e4), TailRope(64, 1.6e5, 16.0, 4096)
    flags = flags_given(
        {"rope_scale": 32.0, "rope_freq_base": 2e4, "yarn_orig_ctx": 64, "yarn_beta_fast": 8.0}
    )
    assert plain.flagged(flags) == TailRope(64, 2e4)
    assert stretched.flagged(flags) == TailRope(64, 1.6e5, 32.0, 64, beta_fast=8.0)
    even = stretched.flagged(flags_given({"rope_scaling": "linear"}))
    assert torch.allclose(even.freq(), TailRope(64, 1.6e5).freq() / 16)
    assert torch.equal(
        stretched.flagged(flags_given({"rope_scaling": "none"})).freq(), TailRope(64, 1.6e5).freq()
    )
