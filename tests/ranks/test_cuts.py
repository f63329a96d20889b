"""Each rank's share of a file: the plan against the manifests, shares against whole tensors, and refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from rank_bench import FIXTURES

from pyspec.cuda.collective import Rank
from pyspec.cuda.ops.linear.dequant import dequantize
from pyspec.errors import ModelError
from pyspec.gguf import GGMLType, GGUFFile, TensorInfo, open_gguf
from pyspec.models import cuts, read_config
from pyspec.models.cuts import Cut, Units, check_ranks, share_of
from pyspec.models.weights import cuts_of

DEMO = Path(__file__).parents[2] / "pyspec" / "demo" / "pyspec-demo.gguf"
DIVIDED = {  # a file and its numbers of ranks
    "llama": 4,
    "llama_freqs_tied": 4,
    "llama_q8_0": 2,
    "qwen3": 4,
    "qwen35": 2,
    "qwen35_equal_tied": 2,
    "qwen35_full_heads_q8_0": 2,
    "qwen35moe": 2,
    "qwen35moe_fused_tied": 2,
    "nemotron_dense": 2,
    "nemotron_differ": 2,
    "nemotron_latent": 2,
    "nemotron_moe": 2,
    "qwen2": 2,
    "qwen3moe": 2,
    "granite": 2,
    "mistral3": 2,
    "glm4moe": 2,
    "minimax-m2": 2,
    "lfm2moe": 2,
}


def opened(name: str) -> tuple[GGUFFile, dict[str, Cut]]:
    file = open_gguf(FIXTURES / f"{name}.gguf")
    return file, cuts_of(read_config(file).tensors(file))


def read(share: cuts.Share, file: GGUFFile) -> np.ndarray:
    out = np.empty(share.info.n_bytes, np.uint8)
    share.read_into(file, out)
    return out


@pytest.mark.parametrize(("name", "n"), DIVIDED.items())
def test_the_cuts_of_a_model_give_the_tensors_that_a_ranks_own_model_wants(name: str, n: int) -> None:
    file, cut = opened(name)
    config = read_config(file)
    want = config.share(n).tensors(file)
    assert any(c.axis == 1 for c in cut.values()) and config.share(1) is config
    for tensor, c in cut.items():
        if tensor in file.tensors and tensor != "output.weight":
            for i in range(n):
                own = share_of(file.tensors[tensor], c, Rank(i, n)).info.shape
                assert own in (want[tensor].shape, *want[tensor].also), (tensor, i)


@pytest.mark.parametrize(("name", "n"), DIVIDED.items())
def test_shares_of_all_ranks_are_the_tensor(name: str, n: int) -> None:
    file, cut = opened(name)
    for tensor, c in cut.items():
        if (info := file.tensors.get(tensor)) is None:
            continue
        whole = dequantize(torch.from_numpy(file.raw(tensor)), info.type, info.shape)
        seen = torch.zeros(info.shape[c.axis], dtype=torch.int)
        for i in range(n):
            share = share_of(info, c, Rank(i, n))
            own = dequantize(torch.from_numpy(read(share, file)), info.type, share.info.shape)
            places = torch.cat([torch.arange(a, b) for a, b in share.pieces])
            assert torch.equal(own, whole.index_select(c.axis, places)), (tensor, i)
            seen[places] += 1
        assert seen.min() >= 1, f"nobody has all of {tensor}"
        assert seen.max() == 1 or any(u.copied for u in c.units)


@pytest.mark.parametrize("alone", [1, 1 << 30], ids=["each row by itself", "many rows at once"])
def test_any_bytes_of_a_share_can_be_read(alone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "ALONE", alone)
    monkeypatch.setattr(cuts, "CHUNK", 5000)
    with open_gguf(DEMO) as file:
        info = file.tensors["blk.0.ssm_out.weight"]
        share = share_of(info, Cut(1, (Units(2, "heads"), Units(2, "heads"))), Rank(1, 2))
        whole = file.raw(info.name).reshape(info.shape[0], 16, -1)
        want = np.concatenate([whole[:, 4:8], whole[:, 12:16]], 1).reshape(-1)
        assert share.info.n_bytes == want.size and info.shape == (384, 512)
        for first, n in ((0, want.size), (1, 7), (271, 273), (5000, 20_001), (want.size - 3, 3)):
            out = np.empty(n, np.uint8)
            share.read_into(file, out, first)
            assert np.array_equal(out, want[first : first + n]), (first, n)


def test_a_rank_reads_no_rows_that_are_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    file, cut = opened("qwen35moe_fused_tied")
    name = "blk.0.ffn_gate_up_exps.weight"
    share, n_read = share_of(file.tensors[name], cut[name], Rank(1, 2)), 0
    read_into = file.read_into

    def count(name: str, out: np.ndarray, first: int = 0) -> None:
        nonlocal n_read
        n_read += out.size
        read_into(name, out, first)

    monkeypatch.setattr(file, "read_into", count)
    monkeypatch.setattr(cuts, "ALONE", 1)
    read(share, file)
    assert n_read == share.info.n_bytes == file.tensors[name].n_bytes // 2


@pytest.mark.parametrize(
    ("name", "n", "said"),
    [
        (
            "qwen35",
            3,
            "blk.0.attn_qkv.weight: 2 key heads of Gated DeltaNet do not divide by 3; --tp 1 or 2 would do",
        ),
        ("qwen35_q8_0", 2, "columns 0 to 16 are no whole blocks of 32 (Q8_0); --tp 1 would do"),
        ("llama", 8, "blk.0.attn_output.weight: 4 heads do not divide by 8; --tp 1 or 2 or 4 would do"),
        ("deepseek2", 2, "5 heads do not divide by 2"),
        ("minimax-m2", 3, "2 key heads do not divide by 3"),
        ("nemotron_latent", 4, "2 groups of Mamba-2 heads do not divide by 4"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_numbers_that_do(name: str, n: int, said: str) -> None:
    file, cut = opened(name)
    with pytest.raises(ModelError) as refusal:
        check_ranks(file, cut, n)
    assert said in str(refusal.value) and f"--tp {n} does not divide {name}.gguf" in str(refusal.value)


def test_rows_of_a_vocabulary_need_not_divide() -> None:
    tokens = Units(301, "tokens", uneven=True)
    assert [tokens.of(Rank(i, 4)) for i in range(4)] == [(0, 76), (76, 152), (152, 228), (228, 301)]
    assert not tokens.flaw(4) and "fewer than" in tokens.flaw(302)


def test_ranks_that_share_a_key_head_have_a_copy_each() -> None:
    heads = Units(2, "key heads", copied=True)
    assert [heads.of(Rank(i, 4)) for i in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert heads.flaw(3) == "2 key heads do not divide by 3" and not heads.flaw(4) and not heads.flaw(1)


def test_one_rank_has_every_tensor_whatever_its_blocks() -> None:
    """Heads of 16 in blocks of 32 and 256: nothing is cut if one rank has both sides."""
    heads, n_byte = Units(16, "key heads"), 8 * 768 // 256 * 144
    info = TensorInfo("blk.0.ssm_out.weight", GGMLType.Q4_K, (8, 768), 0, n_byte, 0)
    cut = Cut(1, (heads, heads, heads))
    assert cut.pieces(48, Rank(0, 1)) == [(0, 48)] and cut.pieces(48, Rank(1, 2)) == [
        (8, 16),
        (24, 32),
        (40, 48),
    ]
    assert share_of(info, Cut(1, (Units(1, "heads"), Units(47, "heads"))), Rank(0, 1)).info == info
