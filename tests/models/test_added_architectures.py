"""qwen2, qwen3moe and gemma3 against llama.cpp, and gemma3 against its formulas in f64: llama.cpp's gelu is a table of f16."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import ADDED as NAMES
from harness import DEVICE, FIXTURES, Bench
from rewrite import rewrite

from pyspec.config import EngineSettings
from pyspec.engine.plan.describe import describe
from pyspec.engine.plan.memory_plan import AssumedGpu
from pyspec.engine.plan.planned_bytes import plan_memory
from pyspec.errors import BadGGUF, BadTensors, ModelError
from pyspec.gguf import open_gguf
from pyspec.models import read_config
from pyspec.models.blocks.attention import Attention
from pyspec.models.checks import check_tensors
from pyspec.models.kernels import needs_of_model
from pyspec.models.model import ModelSpec
from pyspec.slots.memory import allocate
from pyspec.text.tokenizer import Tokenizer

CAPTURED = {  # no windows, no experts, no recurrences
    *("qwen2", "granite", "mistral3", "smollm3", "seed_oss", "ernie4_5", "glm4", "phi3", "olmo2", "exaone4", "k2-horizon", "hunyuan-dense"),
}  # fmt: skip
GEMMA = FIXTURES / "gemma3.gguf"  # a window of 8; blocks 0 to 4 and 6 of 7 have it
ATOL = 1e-4 if DEVICE.type == "cpu" else 2e-2
WIDER = {
    "exaone4-32b": 1e-3,  # 64 blocks without norms before their parts: f32 itself is 5e-4 off there
    "kimi-k3": 1e-3,  # outputs of a thousandth of what they sum, normed: f32 is 3e-4 off there (llama.cpp 2e-4)
}


def data_of(name: str) -> tuple[list[int], torch.Tensor]:
    found = np.load(FIXTURES / f"{name}.npz")
    return found["tokens"].tolist(), torch.from_numpy(found["exact" if "exact" in found else "logits"])


def bound(name: str) -> float:
    return max(ATOL, WIDER.get(name, 0.0))


def spec_of(path: Path) -> ModelSpec:
    with open_gguf(path) as file:
        config = read_config(file)
    return config


def attentions(path: Path) -> list[Attention]:
    parts = [block.parts[0].spec for block in spec_of(path).blocks]
    assert all(isinstance(part, Attention) for part in parts)
    return parts  # type: ignore[return-value]


def fed(path: Path, tokens: list[int], chunk: int, *, keep: bool = True) -> torch.Tensor:
    bench = Bench(path)
    pieces = [bench.feed(0, tokens[i : i + chunk], keep=keep) for i in range(0, len(tokens), chunk)]
    return torch.cat(pieces)


@pytest.mark.parametrize("chunk", [1, 3, 16, 100])
@pytest.mark.parametrize("name", NAMES)
def test_chunks_of_any_size_give_the_logits(name: str, chunk: int) -> None:
    tokens, want = data_of(name)
    assert (fed(FIXTURES / f"{name}.gguf", tokens, chunk) - want).abs().max() < bound(name)


@pytest.mark.sampled(most=6)
@pytest.mark.parametrize("width", range(1, 18))
@pytest.mark.parametrize("name", NAMES)
def test_verifies_of_any_width_give_the_logits(name: str, width: int) -> None:
    tokens, want = data_of(name)
    assert (fed(FIXTURES / f"{name}.gguf", tokens, width, keep=False) - want).abs().max() < bound(name)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the tier of CPUs")
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_packed_files_give_the_logits_on_a_cpu(name: str, *, keep: bool) -> None:
    """Products in C++, too, where there is a compiler."""
    tokens, want = data_of(name)
    bench = Bench(FIXTURES / f"{name}.gguf", dense=None)
    got = torch.cat([bench.feed(0, tokens[i : i + 7], keep=keep) for i in range(0, len(tokens), 7)])
    assert (got - want).abs().max() < 10 * bound(name)


@pytest.mark.parametrize("name", NAMES)
def test_slots_do_not_see_each_other(name: str) -> None:
    """A verify of one slot of which two rows stay, a prompt's odd piece of another, one row of a third, in one forward."""
    tokens, want = data_of(name)
    bench = Bench(FIXTURES / f"{name}.gguf", n_slot=3)
    starts = [bench.feed(slot, tokens[: 5 + 8 * slot]) for slot in range(3)]
    assert all((got - want[: len(got)]).abs().max() < bound(name) for got in starts)
    seqs = [
        bench.seq(0, [*tokens[5:7], 3, 4, 5], keep=False),
        bench.seq(1, tokens[13:24]),
        bench.seq(2, tokens[21:22]),
    ]
    got = bench.forward(*seqs).logits.cpu()
    right = [got[:2] - want[5:7], got[5:16] - want[13:24], got[16:] - want[21:22]]
    assert all(off.abs().max() < bound(name) for off in right)
    for seq, n in zip(seqs, (2, 11, 1), strict=True):
        bench.commit(seq, n)
    for slot, at in enumerate((7, 24, 22)):
        assert (bench.feed(slot, tokens[at:]) - want[at:]).abs().max() < bound(name)


@pytest.mark.parametrize("name", NAMES)
def test_texts_give_llama_cpp_ids(name: str) -> None:
    found = np.load(FIXTURES / f"{name}.npz")
    with open_gguf(FIXTURES / f"{name}.gguf") as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
    starts = [0, *found["ends"][:-1]]
    for text, first, end in zip(found["texts"].tolist(), starts, found["ends"], strict=True):
        assert (
            tokenizer.encode(text, add_special=False, parse_special=True)
            == found["ids"][first:end].tolist()
        ), text


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_planned_as_it_is_taken(name: str) -> None:
    """Pages of all blocks, for a CPU and for a GPU that is not here; a GPU captures prompts only where no block has a window or experts."""
    path = FIXTURES / f"{name}.gguf"
    settings = EngineSettings(np=2, ctx=64, kv_type="f32", device="cpu", check_tap_shift=False)
    d = describe(path, settings)
    taken = allocate(d.own.parts(), d.sizes, d.device)
    assert plan_memory(d).kv == sum(t.nbytes for part in taken.paged for t in part.tensors())
    assumed = describe(path, replace(settings, device="auto"), AssumedGpu(free=1 << 40))
    assert plan_memory(assumed).kv == plan_memory(d).kv
    needs = needs_of_model(assumed.own, assumed.file, assumed.on, 1, 64)
    assert needs.holds_prompts == (name in CAPTURED)


# -- gemma3's formulas -----------------------------------------------------------------------------------------------


def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight


def turned(x: np.ndarray, base: float, factor: float) -> np.ndarray:
    """x [row, head, dim], half-split pairs."""
    half = x.shape[-1] // 2
    at = np.arange(len(x))[:, None, None] / factor * base ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate((a * np.cos(at) - b * np.sin(at), a * np.sin(at) + b * np.cos(at)), -1)


def gemma3_logits(
    path: Path, tokens: list[int], *, window: int = 8, near_base: float = 1e4
) -> torch.Tensor:
    with open_gguf(path) as file:
        w = {
            name: file.raw(name).view("<f4").reshape(info.shape).astype(float)
            for name, info in file.tensors.items()
        }
    n, d = len(tokens), w["blk.0.attn_q_norm.weight"].shape[0]
    behind = np.arange(n)[:, None] - np.arange(n)
    x = w["token_embd.weight"][tokens] * w["token_embd.weight"].shape[1] ** 0.5
    for i in range(7):
        t = {
            name.removeprefix(f"blk.{i}.").removesuffix(".weight"): v
            for name, v in w.items()
            if f"blk.{i}." in name
        }
        is_near = i != 5
        rope = (near_base, 1.0) if is_near else (1e6, 8.0)
        y = rms(x, t["attn_norm"])
        q, k, v = ((y @ t[f"attn_{p}"].T).reshape(n, -1, d) for p in "qkv")
        q, k = turned(rms(q, t["attn_q_norm"]), *rope), turned(rms(k, t["attn_k_norm"]), *rope)
        scores = np.einsum("rhd,kd->hrk", q, k[:, 0]) * d**-0.5
        scores[:, (behind < 0) | (is_near & (behind >= window))] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        o = np.einsum("hrk,kd->rhd", p / p.sum(-1, keepdims=True), v[:, 0]).reshape(n, -1)
        x = x + rms(o @ t["attn_output"].T, t["post_attention_norm"])
        y = rms(x, t["ffn_norm"])
        g, u = y @ t["ffn_gate"].T, y @ t["ffn_up"].T
        g = g / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (g + 0.044715 * g**3)))
        x = x + rms((g * u) @ t["ffn_down"].T, t["post_ffw_norm"])
    return torch.from_numpy(rms(x, w["output_norm.weight"]) @ w["token_embd.weight"].T).float()


def test_the_formulas_are_those_of_the_fixture() -> None:
    tokens, want = data_of("gemma3")
    assert (gemma3_logits(GEMMA, tokens) - want).abs().max() < 1e-5
    for wrong in ({"window": 9}, {"window": 7}, {"near_base": 1e6}):
        assert (gemma3_logits(GEMMA, tokens, **wrong) - want).abs().max() > 0.1, (
            "the fixture tells these apart"
        )


@pytest.mark.parametrize("chunk", [7, 33, 100, 131])
def test_contexts_far_beyond_the_window(chunk: int) -> None:
    """Pieces of a prompt that are shorter than the window, and many windows long."""
    tokens = np.random.default_rng(3).integers(0, 301, 131).tolist()
    assert (fed(GEMMA, tokens, chunk) - gemma3_logits(GEMMA, tokens)).abs().max() < ATOL


def test_caps_and_windows_of_gemma2_are_llama_cpps_where_keys_are_absent(tmp_path: Path) -> None:
    path, keys = FIXTURES / "gemma2.gguf", {"gemma2.attention.sliding_window": None}
    assert [(x.window, x.cap) for x in attentions(path)] == [(8, 50.0), (0, 50.0)] * 2
    assert spec_of(path).final_cap == 30.0
    other = rewrite(path, tmp_path / "m.gguf", change=keys | {"gemma2.attn_logit_softcapping": 7.0})
    assert [(x.window, x.cap) for x in attentions(other)] == [(4096, 7.0), (0, 7.0)] * 2


def test_alpha_stretches_the_rope_of_hunyuan(tmp_path: Path) -> None:
    path = FIXTURES / "hunyuan-dense.gguf"
    stretched = rewrite(path, tmp_path / "m.gguf", change={"hunyuan-dense.rope.scaling.alpha": 8.0})
    ropes = [{part.rope for part in attentions(p)} for p in (path, stretched)]
    assert ropes[1] == {replace(rope, base=rope.base * 8 ** (16 / 14)) for rope in ropes[0]}


def test_blocks_have_windows_and_ropes_by_the_pattern(tmp_path: Path) -> None:
    found = attentions(GEMMA)
    assert [a.window for a in found] == [8, 8, 8, 8, 8, 0, 8]
    assert {(a.window, a.rope.base, a.rope.scaling.factor) for a in found} == {
        (8, 1e4, 1.0),
        (0, 1e6, 8.0),
    }
    keys: dict[str, object] = {"gemma3.attention.sliding_window_pattern": 2, "gemma3.rope.freq_base_swa": 5e5}  # fmt: skip
    found = attentions(rewrite(GEMMA, tmp_path / "a.gguf", change=keys))
    assert [a.window for a in found] == [8, 0, 8, 0, 8, 0, 8] and found[0].rope.base == 5e5
    keys = {"gemma3.attention.sliding_window_pattern": [True, False] * 3 + [False]}
    assert [a.window for a in attentions(rewrite(GEMMA, tmp_path / "b.gguf", change=keys))] == [8, 0, 8, 0, 8, 0, 0]  # fmt: skip
    found = attentions(
        rewrite(GEMMA, tmp_path / "c.gguf", change={"gemma3.attention.sliding_window": 0})
    )
    assert len(set(found)) == 1 and found[0].rope.base == 1e6, "without windows there is one rope"


def test_a_final_soft_cap_bends_the_logits(tmp_path: Path) -> None:
    tokens, want = data_of("gemma3")
    path = rewrite(GEMMA, tmp_path / "m.gguf", change={"gemma3.final_logit_softcapping": 3.0})
    assert (fed(path, tokens, 40) - 3 * (want / 3).tanh()).abs().max() < ATOL


@pytest.mark.parametrize(("arch", "n_block", "width"), [("gemma2", 46, 32 / 4), ("gemma3", 62, 32 / 3)])
def test_the_largest_size_scales_scores_by_its_width(
    arch: str, n_block: int, width: float, tmp_path: Path
) -> None:
    """By the number of blocks alone: of this file's keys the others stay."""
    path = FIXTURES / f"{arch}.gguf"
    one = spec_of(path)
    other = spec_of(rewrite(path, tmp_path / "m.gguf", change={f"{arch}.block_count": n_block}))
    assert one.attention[0].scale is None and other.attention[0].scale == width**-0.5
    assert replace(other.attention[0], scale=None) == one.attention[0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gemma3.attention.sliding_window_pattern": 0}, r"sliding_window_pattern is 0"),
        ({"gemma3.attention.sliding_window_pattern": [True, False]}, r"sliding_window_pattern has 2 entries"),
        ({"gemma3.rope.freq_base_swa": float("nan")}, r"freq_base_swa is nan"),
        ({"gemma3.final_logit_softcapping": -1.0}, r"final_logit_softcapping is -1\.0"),
    ],
)  # fmt: skip
def test_keys_that_mean_nothing_are_refused(
    change: dict[str, object], says: str, tmp_path: Path
) -> None:
    path = rewrite(GEMMA, tmp_path / "m.gguf", change=change)
    with pytest.raises((ModelError, BadGGUF), match=says), open_gguf(path) as file:
        read_config(file)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("gemma3", "blk.1.post_ffw_norm.weight"),
        ("gemma3", "blk.3.post_attention_norm.weight"),
        ("gemma3", "blk.2.attn_k_norm.weight"),
        ("qwen2", "blk.1.attn_k.bias"),
        ("qwen3moe", "blk.2.ffn_gate_inp.weight"),
    ],
)
def test_a_missing_tensor_is_named(name: str, tensor: str, tmp_path: Path) -> None:
    path = rewrite(FIXTURES / f"{name}.gguf", tmp_path / "m.gguf", drop=lambda name: name == tensor)
    with open_gguf(path) as file, pytest.raises(BadTensors, match=f"{tensor}: missing"):
        check_tensors(file, read_config(file).tensors(file))
