"""glm5-next: what the tests of all architectures do not ask: decoding behind a prompt, the MTP block against llama.cpp, decays without a bound, traits
whose change must be seen, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import DEVICE, FIXTURES, Bench
from rewrite import rewrite

from pyspec.errors import ModelError
from pyspec.gguf import open_gguf
from pyspec.models import read_config
from pyspec.models.blocks.kda import Kda
from pyspec.models.blocks.mla import Mla
from pyspec.models.model import ModelSpec
from pyspec.slots.batch import Seq, SeqMode, lay_out

MODEL = FIXTURES / "glm5-next.gguf"
DATA = dict(np.load(MODEL.with_suffix(".npz")))
TOKENS = DATA["tokens"].tolist()
ATOL = 1e-4 if DEVICE.type == "cpu" else 2e-2


def off(path: Path, tokens: list[int] = TOKENS, want: str = "logits") -> float:
    return float(np.abs(Bench(path).feed(0, tokens).cpu().numpy() - DATA[want]).max())


def spec_of(path: Path) -> ModelSpec:
    with open_gguf(path) as file:
        return read_config(file)


@pytest.mark.parametrize("dense", [torch.float32, None])
def test_decoding_behind_a_prompt_gives_llama_cpps_logits(dense: torch.dtype | None) -> None:
    tokens, bench = DATA["tokens_b"].tolist(), Bench(MODEL, dense=dense)
    got = [bench.feed(0, tokens[:40]), *(bench.feed(0, [token]) for token in tokens[40:])]
    assert np.abs(torch.cat(got).numpy() - DATA["logits_b"]).max() < ATOL


def test_the_mtp_block_gives_llama_cpps_rows_and_goes_on_from_itself() -> None:
    bench, n = Bench(MODEL), len(TOKENS)
    block = bench.drafter("mtp", n_draft=4).block  # type: ignore[attr-defined]
    hidden = bench.forward(bench.seq(0, TOKENS)).hidden
    assert np.abs(hidden.cpu().numpy() - DATA["hidden"]).max() < ATOL
    before = torch.cat((torch.zeros_like(hidden[:1]), hidden[:-1]))
    with torch.inference_mode():
        for pieces in ([n], [5, 1, 11, n - 17]):  # pools that end within pieces
            at, found = 0, []
            for width in pieces:
                own = Seq(0, at, TOKENS[at : at + width], SeqMode.VERIFY)
                found.append(block.forward(lay_out(bench.table, [own], DEVICE), before[at : at + width]))
                at += width
            rows = torch.cat(found)
            assert np.abs(rows.cpu().numpy() - DATA["mtp_hidden"]).max() < ATOL
            assert np.abs(block.head(rows).cpu().numpy() - DATA["mtp_logits"]).max() < ATOL
        state, steps = hidden[-1:], ("chain_tokens", "chain_logits", "chain_hidden")
        for i, (token, logits, wide) in enumerate(zip(*(DATA[x] for x in steps), strict=True)):
            batch = lay_out(bench.table, [Seq(0, n + i, [int(token)], SeqMode.VERIFY, 1)], DEVICE)
            state = block.forward(batch, state)
            assert np.abs(block.head(state)[0].cpu().numpy() - logits).max() < ATOL
            assert np.abs(state[0].cpu().numpy() - wide).max() < ATOL


def test_decays_without_a_bound_come_by_softplus(tmp_path: Path) -> None:
    path = rewrite(MODEL, tmp_path / "m.gguf", change={"glm5-next.kda.gate_lower_bound": None})
    got = Bench(path).feed(0, TOKENS)[-1].cpu().numpy()
    assert (
        np.abs(got - DATA["unbound"]).max()
        < ATOL
        < 0.1
        < np.abs(DATA["unbound"] - DATA["logits"][-1]).max()
    )


@pytest.mark.parametrize(
    "part",
    ["indexer_compressor_gate", "indexer_compressor_ape", "indexer.k_norm.bias", "hc_attn_fn", "hc_ffn_base", "ssm_dt.bias", "attn_k_b"],
)  # fmt: skip
def test_every_part_counts(part: str, tmp_path: Path) -> None:
    with open_gguf(MODEL) as file:
        zeros = {
            name: np.zeros(info.shape, "<f4") for name, info in file.tensors.items() if part in name
        }
    assert zeros and off(rewrite(MODEL, tmp_path / "m.gguf", drop=zeros.__contains__, add=zeros)) > 1e-2


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.indexer.top_k", 12),
        ("attention.indexer.types", 1),  # for all blocks
        ("hyper_connection.sinkhorn_iterations", 1),
        ("swiglu_clamp_exp", 2.0),
        ("swiglu_clamp_shexp", 1.0),
        ("attention.layer_norm_epsilon", 1.0),
        ("kda.gate_lower_bound", -4.0),
    ],
)
def test_every_key_counts(key: str, value: object, tmp_path: Path) -> None:
    keys = {f"glm5-next.{key}": value}
    if key.endswith("types"):  # the block that now has an indexer has the tensors of the one before it
        with open_gguf(MODEL) as file:
            own = {name.replace("blk.1.", "blk.3."): file.raw(name).view("<f4").reshape(info.shape)
                   for name, info in file.tensors.items() if name.startswith("blk.1.indexer")}  # fmt: skip
        path = rewrite(MODEL, tmp_path / "m.gguf", change=keys, add=own)
    else:
        path = rewrite(MODEL, tmp_path / "m.gguf", change=keys)
    assert off(path) > 1e-3


def test_blocks_have_their_mixers_and_the_mtp_block_an_indexer_and_one_stream() -> None:
    spec = spec_of(MODEL)
    mixers = [block.parts[0].spec for block in spec.blocks]
    assert [type(mixer) for mixer in mixers] == [Kda, Mla, Kda, Mla, Kda]
    chooses, follows = mixers[1], mixers[3]
    assert isinstance(chooses, Mla) and isinstance(follows, Mla)
    assert chooses.indexer is not None and chooses.indexer.shape.top_k == 2
    assert follows == replace(chooses, indexer=None, follows=True)
    assert spec.mtp is not None and spec.mtp.block.parts[0].spec == chooses
    assert (spec.residual.n, spec.mtp.residual.n, spec.n_hidden) == (4, 1, spec.n_embd)
    assert spec.mtp.block.parts[1].spec.biased  # type: ignore[attr-defined]  # llama.cpp wants the bias


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("attention.indexer.top_k", 10, "want a multiple of 4"),
        ("attention.indexer.kpool", 16, "want a multiple of 16"),
        ("attention.indexer.kpool_select_tail", False, "kpool_select_tail is false"),
        ("attention.indexer.types", [1, 0, 1, 1, 1], "first block with attention has no indexer"),
        ("attention.indexer.types", [1, 1, 1], "has 3 entries"),
        ("swiglu_clamp_exp", -1.0, "swiglu_clamp_exp is -1.0; want a number from 0"),
        ("rope.dimension_count", 8, "turns nothing here"),
    ],
)
def test_keys_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, key: str, value: object, why: str
) -> None:
    path = rewrite(MODEL, tmp_path / "m.gguf", change={f"glm5-next.{key}": value})
    with pytest.raises(ModelError, match=why):
        spec_of(path)


def test_a_file_whose_mtp_block_was_left_out_is_read(tmp_path: Path) -> None:
    for keys in ({}, {"glm5-next.block_count": 5}):
        path = rewrite(
            MODEL, tmp_path / "m.gguf", drop=lambda name: name.startswith("blk.5."), change=keys
        )
        assert off(path) < ATOL
