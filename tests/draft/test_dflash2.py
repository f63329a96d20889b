"""DFlash2 and DSpark: their numbers are llama.cpp's, drafts are those of a reference over the text's own taps, and the text is the target's."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from block_drafters import (
    DEVICE,
    Reference,
    dflash2_of,
    dspark_of,
    recorded_block,
)
from engine_rig import DEMO, DEMO_DRAFT, FIXTURES, GREEDY, Rig, rig
from known_texts import N_TEXT, demo_prompts, joined, known_texts, tiny
from rewrite import rewrite

from pyspec import draft
from pyspec.draft.blocks import BlockLength
from pyspec.draft.dflash import DFlash
from pyspec.draft.dflash2 import DFlash2Net, largest
from pyspec.draft.dspark import DSparkNet
from pyspec.errors import BadTensors, ConfigError, PairError
from pyspec.gguf import open_gguf
from pyspec.slots.drafts import DraftRequest


def test_dflash2_scores_and_drafts_are_those_of_llama_cpp() -> None:
    net, rows, batch, want = recorded_block("dflash2")
    assert isinstance(net, DFlash2Net)
    tokens, _ = net.drafts(rows[None], len(rows) - 1, batch.tokens[:1], tells=False)
    assert tokens.tolist() == want["draft"].tolist()
    values, ids, gate = net._candidates(rows[1:])
    before = torch.cat([batch.tokens[:1], tokens[:-1]])
    follows = net.behind(ids.flatten()).view(*ids.shape, -1) * (net.before(before) * gate)[:, None]
    scores, places = values + follows.sum(-1), np.zeros(1, dtype=int)
    for row, (theirs, table) in enumerate(zip(want["ids"], want["scores"], strict=True)):
        mine = [ids[row].tolist().index(token) for token in theirs]
        assert np.abs(scores[row, mine].numpy() - table[places[-1]]).max() < 1e-4
        places = np.append(places, table[places[-1]].argmax())


def test_dspark_tokens_and_confidence_are_those_of_llama_cpp() -> None:
    net, rows, batch, want = recorded_block("dspark")
    assert isinstance(net, DSparkNet)
    tokens, sure = net.drafts(rows[None], len(rows), batch.tokens[:1], tells=True)
    assert tokens.tolist() == want["logits"].argmax(-1).tolist()
    assert sure is not None and np.abs(sure.numpy() - want["conf"]).max() < 1e-4
    given = net.token(torch.cat([batch.tokens[:1], tokens[:-1]]))
    assert np.abs(net.bias(given, residual=net.head(rows)).numpy() - want["logits"]).max() < 1e-4


@pytest.mark.parametrize("n_vocab", [40, 1280, 1300])
def test_the_largest_logits_are_found_in_pieces(n_vocab: int) -> None:
    logits = torch.randn(7, n_vocab, generator=torch.Generator().manual_seed(2))
    values, columns = largest(logits, 4)
    want = logits.topk(4)
    assert torch.equal(values, want.values) and torch.equal(columns, want.indices)


# -- drafters for targets of the tests --------------------------------------------------------------------------------


@cache
def drafter_for(kind: str, target: str) -> Path:
    path = tiny(target, drafter=True)
    n_vocab = open_gguf(tiny(target)).tensors["token_embd.weight"].shape[0]
    match kind:
        case "dflash2":
            return dflash2_of(path, n_vocab)
        case "dflash2-capped":
            return dflash2_of(path, n_vocab, cap=3.0)
        case "dspark-behind":
            return dspark_of(path, n_vocab, from_anchor=False, sure=False)
        case _:
            return dspark_of(path, n_vocab)


def drafted(kind: str, target: str = "qwen35", **settings: object) -> Rig:
    given = {"draft_path": drafter_for(kind, target), "n_draft_fixed": True, "device": DEVICE}
    return rig(tiny(target), **(given | settings))


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_rounds_ahead_draft_as_rounds_that_are_read(kind: str) -> None:
    """With drafts that are often right: the demo's drafter, whose new parts have no opinion."""
    n_vocab = open_gguf(DEMO).tensors["token_embd.weight"].shape[0]
    makers = {
        "dflash2": lambda: dflash2_of(DEMO_DRAFT, n_vocab, quiet=True),
        "dspark": lambda: dspark_of(DEMO_DRAFT, n_vocab, quiet=True, from_anchor=False),
    }
    found = []
    for path, is_ahead in ((DEMO_DRAFT, False), (makers[kind](), False), (makers[kind](), True)):
        settings: dict[str, object] = {"np": 2, "n_draft_max": 4, "n_draft_fixed": True, "device": DEVICE}  # fmt: skip
        r = rig(DEMO, draft_path=path, **settings)
        r.loop.lookahead.on = is_ahead
        heard = r.all([prompt for prompt, _ in demo_prompts()[:3]], 40, GREEDY)
        found.append([(h.tokens, h.timings.accepted_per_pos) for h in heard])
    assert [[tokens for tokens, _ in one] for one in found[1:]] == [
        [tokens for tokens, _ in found[0]]
    ] * 2
    assert found[1] == found[2]
    assert found[0] == found[1] or DEVICE != "cpu"  # a GPU's DFlash reads a coarse copy of the head
    assert sum(sum(accepted) for _, accepted in found[0]) > 40


@pytest.mark.skipif(DEVICE == "cpu", reason="graphs are a GPU's")
@pytest.mark.parametrize("np", [1, 3])
@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_graphs_draft_and_leave_the_text(kind: str, np: int) -> None:
    texts, r = known_texts(tiny("qwen35")), drafted(kind, np=np, warm_up=True)
    heard = joined(r, texts, cancels=True)
    assert [h.tokens for h in heard] == list(texts.values())
    drafter = r.loop.drafter
    assert isinstance(drafter, DFlash) and drafter.block._graphs
    assert sum(h.timings.draft_n for h in heard) > 100


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize("kind", ["dflash2", "dspark", "dspark-behind"])
def test_uncertain_drafts_are_cut(kind: str) -> None:
    """By the probability among a row's candidates, by the confidence head, or by the probability among all tokens."""
    prompt = max(known_texts(tiny("qwen35")), key=len)
    reference, r = Reference(tiny("qwen35"), drafter_for(kind, "qwen35")), drafted(kind)
    drafter = r.loop.drafter
    assert isinstance(drafter, DFlash)
    r.submit(prompt, 4)
    while not (slot := r.loop.table.slots[0]).n_past:
        r.loop.step()
    n, n_row = drafter.plan.n_draft, drafter.length.trained
    features = reference.features(slot.tokens)
    want, sure = reference.draft(7, features, n, n_row)
    assert list(drafter.draft([DraftRequest(slot, 7, n)])[0].tokens) == want
    lower, upper = sorted(sure)[n // 2 - 1 : n // 2 + 1]
    drafter.p_min = (lower + upper) / 2  # between two, which rounding does not cross
    length = next((i for i, x in enumerate(sure) if x < drafter.p_min), n)
    assert list(drafter.draft([DraftRequest(slot, 7, n)])[0].tokens) == want[:length]


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_slots_draft_the_same_together_as_alone(kind: str) -> None:
    r = drafted(kind, np=3)
    drafter, table = r.loop.drafter, r.loop.table
    assert isinstance(drafter, DFlash)
    for prompt in list(known_texts(tiny("qwen35")))[:3]:
        r.submit(prompt, N_TEXT)
    while not all(slot.n_past for slot in table.slots):
        r.loop.step()
    asked = [DraftRequest(slot, 10 + i, 3) for i, slot in enumerate(table.slots)]
    together = [d.tokens for d in drafter.draft(asked)]
    few = drafter.length.rows(3, 3)
    drafter.plan = replace(drafter.plan, block=BlockLength(few))
    for order in ([2, 0, 1], [1], [0, 2]):
        assert [d.tokens for d in drafter.draft([asked[i] for i in order])] == [
            together[i] for i in order
        ]


def test_a_file_is_recognised_and_llama_cpps_name_fits() -> None:
    for kind, name in (("dflash2", "dflash"), ("dflash2", "draft-dflash2"), ("dspark", "draft-dspark")):
        file = open_gguf(drafter_for(kind, "qwen35"))
        assert draft.recognised(file) == kind
        assert drafted(kind, spec_type=name.removeprefix("draft-")).info.drafter == kind
    assert draft.recognised(open_gguf(tiny("qwen35", drafter=True))) == "dflash"


def test_a_drafter_for_another_width_or_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        PairError, match="has 286 tokens, the target 320: they do not share a vocabulary"
    ):
        rig(tiny("qwen35"), draft_path=FIXTURES / "dflash2.gguf")
    n = open_gguf(tiny("qwen35")).tensors["token_embd.weight"].shape[0]
    for kind, name in (("dflash2", "selector_predecessor.weight"), ("dspark", "markov_w1.weight")):
        few = rewrite(
            drafter_for(kind, "qwen35"),
            tmp_path / f"{kind}.gguf",
            drop=lambda x, name=name: x == name,
            add={name: np.zeros((n - 1, 6), dtype="<f4")},
        )
        with pytest.raises(BadTensors, match=f"{name}: want \\[{n}, 6\\], file has \\[{n - 1}, 6\\]"):
            rig(tiny("qwen35"), draft_path=few)


def test_the_file_has_to_be_one() -> None:
    for kind, tensor in (("dflash2", "selector_hidden"), ("dspark", "markov_w1")):
        with pytest.raises(ConfigError, match=f"--spec-type {kind} needs a draft file"):
            rig(tiny("qwen35"), spec_type=kind)
        with pytest.raises(PairError, match=f"has {tensor}.weight; this file has not"):
            rig(tiny("qwen35"), spec_type=kind, draft_path=tiny("qwen35", drafter=True))
    with pytest.raises(PairError, match="--spec-type dspark, not dflash"):
        rig(tiny("qwen35"), spec_type="dflash", draft_path=drafter_for("dspark", "qwen35"))
