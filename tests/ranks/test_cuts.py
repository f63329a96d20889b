"""Each rank's share of a file: the plan against the manifests, shares against whole tensors, and refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from rank_bench import FIXTURES

from pyspec.cuda.ops.linear.dequant import SUPPORTED, dequantize
from pyspec.cuda.rank import Rank
from pyspec.errors import ModelError
from pyspec.gguf import GGMLType, GGUFFile, TensorInfo, open_gguf
from pyspec.models import cuts, read_config
from pyspec.models.checks import check_ranks
from pyspec.models.cuts import Cut, KeyGroups, Keys, Readers, Units, each_of, share_of, surplus
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
    "granitemoe": 2,
    "smollm3": 2,
    "seed_oss": 2,
    "qwen2moe": 2,
    "dots1": 2,
    "bailingmoe2": 2,
    "ernie4_5-moe": 2,
    "glm4": 2,
    "phi3": 2,
    "olmo2": 2,
    "exaone4": 2,
    "exaone-moe": 2,
    "muse-glimmer": 2,
    "k2-horizon": 2,
    "laguna": 2,
    "step35": 2,
    "falcon-h1": 2,
    "cohere2": 2,
    "hunyuan-dense": 2,
    "hunyuan-moe": 2,
    "gemma2": 2,
    "kimi-linear": 3,
    "bailingmoe3": 3,
    "llama4": 2,
    "qwen4exp": 2,
    "glm-dsa": 2,
    "kimi-k3": 3,
    "k2-horizon-mova": 2,
    "glm5-next": 2,
}
UNEVEN = {  # numbers of ranks that divide neither their heads nor their columns
    "llama": (3, 8),
    "qwen35": (3, 4),
    "qwen3next": (3,),
    "nemotron_latent": (3, 4),
    "nemotron_latent_q8_0": (2, 3, 4),
    "lfm2moe": (3, 5),
    "gpt-oss": (3,),
    "minimax-m2": (3,),
}
CASES = [*DIVIDED.items(), *((name, n) for name, numbers in UNEVEN.items() for n in numbers)]


def opened(name: str) -> tuple[GGUFFile, dict[str, Cut]]:
    file = open_gguf(FIXTURES / f"{name}.gguf")
    return file, cuts_of(read_config(file).tensors(file))


def read(share: cuts.Share, file: GGUFFile) -> np.ndarray:
    out = np.empty(share.info.n_bytes, np.uint8)
    share.read_into(file, out)
    return out


@pytest.mark.parametrize(("name", "n"), CASES)
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


@pytest.mark.parametrize(("name", "n"), CASES)
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
            places = torch.cat(
                [torch.full((-a,), -1) if a < 0 else torch.arange(a, b) for a, b in share.pieces]
            )
            is_own = places >= 0
            found, zeros = (own.index_select(c.axis, at.nonzero()[:, 0]) for at in (is_own, ~is_own))
            assert torch.equal(found, whole.index_select(c.axis, places[is_own])), (tensor, i)
            assert not zeros.any(), (tensor, i)
            seen[places[is_own]] += 1
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
        ("qwen35_q8_0", 2, "columns 0 to 16 are no whole blocks of 32 (Q8_0); --tp 1 would do"),
        ("deepseek2", 2, "5 heads do not divide by 2; --tp 1 or 5 would do"),
        ("minimax-m2", 4, "2 key heads are fewer than 4 ranks; --tp 1 or 2 or 3 would do"),
        ("qwen3next", 4, "2 key heads of Gated DeltaNet are fewer than 4 ranks; --tp 1 or 2 or 3 would do"),
    ],
)  # fmt: skip
def test_what_does_not_divide_is_refused_with_the_numbers_that_do(name: str, n: int, said: str) -> None:
    file, cut = opened(name)
    with pytest.raises(ModelError) as refusal:
        check_ranks(file, cut, n)
    assert said in str(refusal.value) and f"--tp {n} does not divide {name}.gguf" in str(refusal.value)


def test_rows_of_a_vocabulary_need_not_divide() -> None:
    tokens = Units(301, "tokens", uneven=True)
    assert [tokens.of(Rank(i, 4)) for i in range(4)] == [(0, 76), (76, 152), (152, 228), (228, 301)]
    assert not tokens.flaw(4) and "fewer than" in tokens.flaw(302)


def test_columns_that_do_not_divide_go_up_to_whole_blocks() -> None:
    """2,688 columns are 84 blocks of 32, 42 of 64; 96 numbers without blocks go by 32, where they do not divide."""
    assert [each_of(2688, n, 32) for n in (1, 2, 3, 4, 5)] == [2688, 1344, 896, 672, 544]
    assert [each_of(2688, n, 64) for n in (2, 4)] == [1344, 704] and each_of(17408, 8, 256) == 2304
    assert [each_of(96, n) for n in (2, 3, 5)] == [48, 32, 32] and each_of(7, 3) == 3
    own = Units(672, "columns", block=64)
    assert [own.runs(Rank(i, 4)) for i in (0, 3)] == [[(0, 192), (0, 0)], [(576, 672), (-96, 0)]]


@pytest.mark.parametrize("n_key", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("n_reader", [1, 3, 4])
@pytest.mark.parametrize("tiled", [False, True])
def test_every_reader_stands_once_beside_its_key_head(n_key: int, n_reader: int, tiled: bool) -> None:
    groups = KeyGroups(n_key, n_reader)
    keys, readers = Keys(groups, "keys"), Readers(groups, "readers", tiled=tiled)
    for n in (1, 2, 3, 4, 7, 16):
        n_place, each = groups.places(n)
        seen = []
        for i in range(n):
            own = [a for a, _ in keys.runs(Rank(i, n))]
            read = [a for a, _ in readers.runs(Rank(i, n))]
            assert len(own) == n_place and len(read) == n_place * each
            for at, reader in enumerate(read):
                if reader < 0:
                    continue
                key = own[at % n_place if tiled else at // each]
                assert key == (reader % n_key if tiled else reader // n_reader)
                seen.append(reader)
        assert sorted(seen) == list(range(n_key * n_reader))
    if n_key % 2 == 0:
        assert KeyGroups(n_key, n_reader).places(2) == (n_key // 2, n_reader)


def test_readers_are_an_even_number_where_kernels_want_one() -> None:
    """48 value heads of 16 key heads over 16 ranks: four each, one of zeros."""
    assert KeyGroups(16, 3).places(16) == (1, 3) and KeyGroups(16, 3, even=True).places(16) == (1, 4)
    assert KeyGroups(16, 3, even=True).places(8) == (2, 3)
    assert KeyGroups(1, 3, even=True).places(1) == (1, 3)


@pytest.mark.parametrize("type", [t for t in GGMLType if t in SUPPORTED], ids=lambda t: t.name)
def test_zero_bytes_are_zeros_in_every_type(type: GGMLType) -> None:
    n = 2 * type.block_size
    found = dequantize(torch.zeros(2 * type.type_size, dtype=torch.uint8), type, (1, n))
    assert found.shape == (1, n) and not found.any()


def test_what_ranks_hold_more_is_counted() -> None:
    file, cut = opened("llama")
    assert surplus(file, cut, 1) == surplus(file, cut, 2) == 0.0
    whole = sum(file.tensors[name].n_bytes for name in cut if name in file.tensors)
    shares = [
        share_of(file.tensors[x], c, Rank(i, 3))
        for x, c in cut.items()
        for i in range(3)
        if x in file.tensors
    ]
    assert sum(s.info.n_bytes for s in shares) == pytest.approx(whole * (1 + surplus(file, cut, 3)))
    assert surplus(file, cut, 3) > 0.05


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
