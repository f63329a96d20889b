"""DFlash2 and DSpark: their numbers are llama.cpp's, drafts are those of a reference over the text's own taps, and the text is the target's."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import count
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
    watch,
)
from engine_rig import DEMO, DEMO_DRAFT, FIXTURES, GREEDY, Rig, rig
from known_texts import N_TEXT, demo_prompts, joined, known_texts, tiny
from rewrite import rewrite
from sampling import slow

from pyspec import draft
from pyspec.draft.blocks import BlockLength
from pyspec.draft.dflash import DFlash
from pyspec.draft.dflash2 import DFlash2Net, largest
from pyspec.draft.dspark import DSparkNet
from pyspec.errors import BadTensors, ConfigError, ModelError, PairError
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


PAIRS = [
    slow("dflash2", "qwen35"),
    ("dflash2-capped", "qwen3"),
    ("dspark", "qwen35"),
    slow("dspark-behind", "qwen3"),
]


@pytest.mark.parametrize(("kind", "target"), PAIRS)
def test_drafts_are_those_of_the_reference(kind: str, target: str) -> None:
    """After prompts, accepted and refused drafts, and rounds without any."""
    texts, rounds = list(known_texts(tiny(target)).items())[:4], count()
    reference, r = Reference(tiny(target), drafter_for(kind, target)), drafted(kind, target, np=2)
    seen = watch(r)
    r.loop.controller.choose = lambda caps, _offers=(), _beside=0: [  # type: ignore[method-assign]
        cap * (n % 4 < 3) for n in (next(rounds),) for _, cap in caps
    ]
    heard = [r.submit(prompt, N_TEXT) for prompt, _ in texts]
    r.run()
    assert r.info.drafter == kind.partition("-")[0]
    assert [h.tokens for h in heard] == [text for _, text in texts]
    wholes = [[*prompt, *text] for prompt, text in texts]
    features = [reference.features(whole) for whole in wholes]
    assert len(seen) > 40
    for tokens, drafts, n_row in seen:
        at = next(i for i, whole in enumerate(wholes) if whole[: len(tokens)] == tokens)
        want, _ = reference.draft(tokens[-1], features[at][: len(tokens) - 1], len(drafts), n_row)
        assert drafts == want, f"behind {len(tokens)} tokens"


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("np", [1, 2, 4, 8, 10])
@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_the_text_is_the_targets_with_staggered_joins_and_cancels(
    kind: str, is_ahead: bool, np: int
) -> None:
    texts, r = known_texts(tiny("qwen35")), drafted(kind, np=np, ubatch=40)
    r.loop.lookahead.on = is_ahead
    heard = joined(r, texts, cancels=True)
    assert [h.tokens for h in heard] == list(texts.values())
    assert sum(h.timings.draft_n for h in heard) > 100


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
        settings: dict[str, object] = {
            "np": 2,
            "n_draft_max": 4,
            "n_draft_fixed": True,
            "device": DEVICE,
        }
        r = rig(DEMO, draft_path=path, **settings)
        r.loop.lookahead.on = is_ahead
        heard = [r.submit(prompt, 40, GREEDY) for prompt, _ in demo_prompts()[:3]]
        r.run()
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


@pytest.mark.sampled(most=1)
@pytest.mark.skipif(DEVICE != "cpu", reason="recordings are a CPU's")
@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_blocks_are_recorded(kind: str) -> None:
    r = drafted(kind)
    prompt, text = next(iter(known_texts(tiny("qwen35")).items()))
    assert r.generate(prompt, N_TEXT).tokens == text
    drafter = r.loop.drafter
    assert isinstance(drafter, DFlash) and not drafter.block._cannot and drafter.block._tapes


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_a_prefix_of_the_cache_is_drafted_from_as_a_text_that_was_read(kind: str) -> None:
    reference = Reference(tiny("qwen35"), drafter_for(kind, "qwen35"))
    prompt, r = max(known_texts(tiny("qwen35")), key=len), drafted(kind, page_size=16)
    first = r.generate(prompt, 12)
    seen, turn = watch(r), [*prompt, *first.tokens, 3, 4, 5]
    h = r.generate(turn, 20)
    assert h.timings.cache_n == len(prompt) + 11
    features = reference.features([*turn, *h.tokens])
    assert seen
    for tokens, drafts, n_row in seen:
        want, _ = reference.draft(tokens[-1], features[: len(tokens) - 1], len(drafts), n_row)
        assert drafts == want


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


@pytest.mark.parametrize(
    ("kind", "change", "error", "text"),
    [
        (
            "dflash2",
            {"target_layers": [1, 9]},
            PairError,
            r"taps layers \[0, 8\]; the target has layers 0\.\.",
        ),
        (
            "dspark",
            {"target_layers": [1]},
            PairError,
            "reads 128 features; 1 taps of the target give 64",
        ),
        ("dspark", {"embedding_length": 32}, PairError, "has hidden size 32, the target 64"),
        ("dflash2", {"conv_group_size": 7}, PairError, "width 64, no multiple of its groups of 7"),
        ("dflash2", {"selector_rank": 5}, BadTensors, "selector_hidden.weight: want "),
        ("dflash2", {"conv_kernel_size": 4}, BadTensors, "attn_conv_base: want "),
        ("dflash2", {"hidden_activation": "gelu"}, PairError, "activation is gelu; silu is supported"),
        (
            "dspark",
            {"embedding_scale": 2.0},
            PairError,
            "embedding_scale of the drafter is 2; 1 is supported",
        ),
        ("dspark", {"hyper_connection.count": 4}, ModelError, "this architecture has one"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_with_the_reason(
    kind: str, change: dict[str, object], error: type[Exception], text: str, tmp_path: Path
) -> None:
    change = {f"dflash.{key}": value for key, value in change.items()}
    other = rewrite(drafter_for(kind, "qwen35"), tmp_path / "d.gguf", change=change)
    with pytest.raises(error, match=text):
        rig(tiny("qwen35"), draft_path=other)


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
