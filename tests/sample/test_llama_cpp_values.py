"""Against values of llama.cpp's own samplers (llama-cpp-python 0.3.36, llama_sampler_apply), kept in llama_cpp.json.

`logits` are the input rows; row 3 has three equal best ones, left out where a cut falls between them: llama.cpp keeps the one that its sort
put first, we keep the lower ids. `cuts`: tokens and probabilities after top-k, typical, top-p, min-p, temperature. `penalties`: logits
after the penalties sampler. `dry`: DRY's penalties, with the vocabulary of the tests' small llama model (`words`, latin-1) and its
tokenisation of breaker endings (`encoded`).
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from pyspec.request import SamplingParams
from pyspec.sample import chain, edits
from pyspec.sample.dry import DryBreakers
from pyspec.sample.sampler import SlotSampler

KNOWN = json.loads((Path(__file__).parent / "llama_cpp.json").read_text())
LOGITS = torch.tensor(KNOWN["logits"])


class Words:
    """The vocabulary the values were made with."""

    n_vocab = len(KNOWN["words"])

    def token_bytes(self, token: int) -> bytes:
        return KNOWN["words"][token].encode("latin-1")

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        assert not add_special and not parse_special
        return KNOWN["encoded"][text]


@pytest.mark.parametrize(
    "case",
    KNOWN["cuts"],
    ids=lambda case: f"row{case['row']}-{'-'.join(map(str, case['params'].values()))}",
)
def test_cuts_leave_the_tokens_and_probabilities_llama_cpp_leaves(case):
    row = LOGITS[case["row"]][None]
    params = SamplingParams(**case["params"])
    settings = chain.Settings.stack([params], [0.0], row.shape[1], row.device)
    keep = chain.survivors(row, settings)[0]
    expected = dict(case["probs"])
    assert keep.nonzero().squeeze(1).tolist() == sorted(expected)
    probabilities = (row[0] / params.temperature).masked_fill(~keep, -torch.inf).softmax(-1)
    torch.testing.assert_close(
        probabilities[keep], torch.tensor([p for _, p in case["probs"]]), atol=2e-6, rtol=0
    )


@pytest.mark.parametrize(
    "case", KNOWN["cuts"][::4], ids=lambda case: "-".join(map(str, case["params"].values()))
)
def test_draws_of_evenly_spread_numbers_follow_llama_cpp_probabilities(case):
    params, n = SamplingParams(**case["params"]), 2000
    rows = LOGITS[case["row"]].expand(n, -1).contiguous()
    settings = chain.Settings.stack(
        [params] * n, [(i + 0.5) / n for i in range(n)], rows.shape[1], rows.device
    )
    share = torch.bincount(chain.pick(rows, settings)[0], minlength=rows.shape[1]) / n
    expected = torch.zeros(rows.shape[1])
    for token, p in case["probs"]:
        expected[token] = p
    torch.testing.assert_close(share, expected, atol=1.01 / n, rtol=0)


@pytest.mark.parametrize(
    "case", KNOWN["penalties"], ids=lambda case: str(case["params"]["repeat_last_n"])
)
def test_penalties_change_logits_as_llama_cpp_does(case):
    row = LOGITS[case["row"]][None].clone()
    params = SamplingParams(**case["params"])
    sampler = SlotSampler(params, row.shape[1], (), case["history"])
    edits.apply(row, [(0, params, sampler.edits([]))])
    torch.testing.assert_close(row[0], torch.tensor(case["logits"]), atol=2e-5, rtol=0)


@pytest.mark.parametrize("case", KNOWN["dry"], ids=range(len(KNOWN["dry"])))
def test_dry_takes_off_what_llama_cpp_takes_off(case):
    settings = {
        **case["params"],
        "dry_sequence_breakers": tuple(case["params"]["dry_sequence_breakers"]),
    }
    sampler = SlotSampler(
        SamplingParams(**settings), Words.n_vocab, (), case["history"], DryBreakers(Words())
    )
    found = sampler.dry.penalties(np.array(case["history"]))
    assert sorted(found) == [token for token, _ in case["penalties"]]
    for token, penalty in case["penalties"]:
        assert found[token] == pytest.approx(penalty, rel=1e-5, abs=1e-4)
