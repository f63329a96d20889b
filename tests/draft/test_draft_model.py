"""A draft model of its own: the target's text with any of them, and every draft right where it is the target itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_rig import FIXTURES, GREEDY, Rig, plain_rig, rig
from known_texts import N_TEXT, joined, known_texts, tiny
from plans import fix_lengths
from rewrite import rewrite

from pyspec.config import EngineSettings
from pyspec.draft.chain import Chain
from pyspec.draft.draft_model import DraftModel, row_bytes
from pyspec.draft.token_map import TokenTexts, mapped, read_map
from pyspec.engine.api import Engine
from pyspec.engine.plan.fit import fit
from pyspec.errors import BadTensors, ConfigError, PairError, UnknownArchitecture
from pyspec.gguf import open_gguf
from pyspec.models.weights import Weights
from pyspec.request import SamplingParams
from pyspec.slots.arena import Arena
from pyspec.text.vocab import BYTE

LLAMA, QWEN3, GEMMA3, QWEN35 = (
    FIXTURES / f"{name}.gguf" for name in ("llama", "qwen3", "gemma3", "qwen35")
)
TOKENS, KINDS = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
TABLES = ("token_embd.weight", "output.weight")


def folder() -> Path:
    return Path(mkdtemp(prefix="pyspec-draft-"))


def values(path: Path, name: str) -> np.ndarray:
    file = open_gguf(path)
    return file.raw(name).view("<f4").reshape(file.tensors[name].shape).copy()


def with_tensors(path: Path, tensors: dict[str, np.ndarray], **changes: object) -> Path:
    """The same model with other numbers in these tensors."""
    return rewrite(path, folder() / path.name, drop=tensors.__contains__, add=tensors, change=changes)


@cache
def near(path: Path) -> Path:
    """A model like the target that often errs."""
    name, rng = "output_norm.weight", np.random.default_rng(3)
    own = values(path, name)
    return with_tensors(path, {name: own * rng.normal(1, 0.4, own.shape)})


def drafted(target: Path, draft: Path, **settings: object) -> Rig:
    return rig(target, **({"draft_path": draft, "n_draft_fixed": True, "spec_type": "draft"} | settings))


@cache
def free_texts(path: Path) -> dict[tuple[int, ...], list[int]]:
    """Those of the known texts in which no end token was passed over, which a draft model would propose."""
    r, params = plain_rig(path), replace(GREEDY, ignore_eos=False)
    return {
        p: text for p, text in known_texts(path).items() if r.generate(p, N_TEXT, params).tokens == text
    }


def n_rounds(n: int, n_draft: int) -> int:
    """Of a text of `n` tokens whose drafts are all right; the prompt gives the first."""
    return -(-(n - 1) // (n_draft + 1))


# -- the text ---------------------------------------------------------------------------------------------------------

PAIRS = {"llama": LLAMA, "qwen3": QWEN3, "gemma3": GEMMA3, "qwen35": QWEN35}
BOTH = pytest.mark.parametrize("path", [LLAMA, QWEN35], ids=["pages", "state"])


@pytest.mark.sampled(2, most=1)
@pytest.mark.parametrize("np", [1, 2, 4, 5, 8, 10])
@pytest.mark.parametrize("name", PAIRS)
def test_the_text_is_the_targets_with_staggered_joins(name: str, np: int) -> None:
    path, texts = PAIRS[name], known_texts(PAIRS[name])
    r = drafted(path, near(path), np=np, ubatch=40)
    heard = joined(r, [*texts])
    assert [h.tokens for h in heard] == list(texts.values())
    n, right = (sum(getattr(h.timings, x) for h in heard) for x in ("draft_n", "draft_n_accepted"))
    assert 0.05 * n < right < 0.95 * n, f"{right} of {n}: both right and wrong drafts were part of this"


@pytest.mark.sampled(2, most=1)
@pytest.mark.parametrize("np", [1, 2, 4, 8])
@pytest.mark.parametrize("name", [*PAIRS, "qwen2", "qwen3moe", "qwen35moe", "nemotron_dense"])
def test_a_model_that_is_the_target_drafts_its_whole_text(name: str, np: int) -> None:
    path = FIXTURES / f"{name}.gguf"
    texts = free_texts(path)
    heard = joined(drafted(path, path, np=np, ubatch=40), [*texts])
    assert [h.tokens for h in heard] == list(texts.values())
    for h in heard:
        assert h.timings.draft_n == h.timings.draft_n_accepted
        assert h.timings.n_rounds == n_rounds(N_TEXT, 4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("n_draft", [1, 2, 7])
@pytest.mark.parametrize("is_ahead", [False, True])
@BOTH
def test_it_does_in_rounds_that_are_launched_ahead(path: Path, is_ahead: bool, n_draft: int) -> None:
    texts = free_texts(path)
    r = drafted(path, path, np=3, n_draft_max=n_draft)
    r.overwrite_results()
    if is_ahead:
        r.run_ahead(defers=True)
    heard = joined(r, [*texts])
    assert [h.tokens for h in heard] == list(texts.values())
    assert all(h.timings.draft_n == h.timings.draft_n_accepted > 0 for h in heard)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("waiting", [2, 16])
@BOTH
def test_after_rounds_without_drafts_it_has_read_what_it_missed(
    path: Path, is_ahead: bool, waiting: int
) -> None:
    """Five rounds without drafts, then two with: every draft is right, so its rows are those of the text."""
    texts, rounds = free_texts(path), count()
    r = drafted(path, path, np=2, n_draft_max=3)
    assert isinstance(r.loop.drafter, Chain)
    r.loop.drafter.most_waiting = waiting
    r.loop.lookahead.on = is_ahead
    fix_lengths(r.loop, lambda caps: [cap * (n % 7 > 4) for n in (next(rounds),) for _, cap in caps])
    heard = joined(r, [*texts])
    assert [h.tokens for h in heard] == list(texts.values())
    assert sum(h.timings.draft_n for h in heard) == sum(h.timings.draft_n_accepted for h in heard) > 30


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_ahead", [False, True])
@BOTH
def test_where_only_some_slots_draft_the_others_keep_up(path: Path, is_ahead: bool) -> None:
    texts, rounds = free_texts(path), count()
    r = drafted(path, path, np=3, n_draft_max=3)
    r.loop.lookahead.on = is_ahead
    fix_lengths(
        r.loop, lambda caps: [min(cap, (n + slot) % 4) for n in (next(rounds),) for slot, cap in caps]
    )
    heard = joined(r, [*texts])
    assert [h.tokens for h in heard] == list(texts.values())
    assert all(h.timings.draft_n == h.timings.draft_n_accepted > 0 for h in heard)


def test_recorded_passes_draft_what_calls_draft() -> None:
    texts = list(free_texts(QWEN3))[:4]
    found = []
    for is_recorded in (True, False):
        r = drafted(QWEN3, near(QWEN3), np=2)
        drafter = r.loop.drafter
        assert isinstance(drafter, Chain)
        if not is_recorded:
            r.call_by_call()
        found.append([(h.tokens, h.timings.accepted_per_pos) for h in joined(r, texts)])
        ways = (drafter._first, drafter._steps[0], drafter._late)
        assert not any(way._cannot for way in ways) and bool(drafter._steps[0]._tapes) is is_recorded
    assert found[0] == found[1]


@pytest.mark.sampled(most=1)
@BOTH
def test_passes_that_are_padded_as_for_graphs_draft_the_same(path: Path) -> None:
    """Padding has no slot, no record and no place in the text's pages."""
    texts = free_texts(path)
    r = drafted(path, path, np=5)
    drafter, table = r.loop.drafter, r.loop.table
    assert isinstance(drafter, Chain)
    r.loop.worker.arena = Arena(5, table.n_page, torch.device("cpu"), 5)
    drafter.use_graphs(lambda: Arena(5, table.n_page, torch.device("cpu"), 16))
    r.loop.lookahead.on = True
    heard = joined(r, [*texts])
    assert [h.tokens for h in heard] == list(texts.values())
    assert all(h.timings.draft_n == h.timings.draft_n_accepted > 0 for h in heard)


@pytest.mark.sampled(most=1)
@BOTH
def test_a_draft_ends_below_a_probability(path: Path) -> None:
    texts = free_texts(path)
    sure, all_of_them = (joined(drafted(path, path, np=2, draft_p_min=p), [*texts]) for p in (0.05, 0.0))
    assert [h.tokens for h in sure] == list(texts.values())
    assert 0 < sum(h.timings.draft_n for h in sure) < sum(h.timings.draft_n for h in all_of_them)
    assert all(h.timings.draft_n == h.timings.draft_n_accepted for h in sure)


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("name", ["llama", "qwen35"])
def test_cancels_at_any_moment_leave_the_others_their_text(name: str) -> None:
    path = PAIRS[name]
    r, texts = drafted(path, near(path), np=3, ubatch=24), list(free_texts(path).items())
    for rounds in range(7):
        kept = [(r.submit(p, N_TEXT), text) for p, text in texts[:2]]
        gone = [r.submit(p, N_TEXT) for p, _ in texts[2:5]]
        r.steps(rounds)
        for h in gone:
            r.loop.cancel(h.job)
        r.run()
        assert all(h.tokens == text for h, text in kept)
        assert all(h.finish == "cancelled" for h in gone)


@pytest.mark.sampled(most=1)
@BOTH
def test_sampled_text_is_that_without_drafts(path: Path) -> None:
    warm = SamplingParams(temperature=0.9, seed=7, ignore_eos=True)
    prompts = list(free_texts(path))[:3]
    one, two = drafted(path, near(path)), plain_rig(path)
    for prompt in prompts:
        assert one.generate(prompt, 40, warm).tokens == two.generate(prompt, 40, warm).tokens


@BOTH
def test_a_round_that_fails_is_drafted_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of its drafts stand there, and none of them was verified."""
    prompt, text = next(iter(free_texts(path).items()))
    r = drafted(path, path)
    h = r.submit(prompt, N_TEXT)
    r.steps(3)
    for _ in range(2):
        r.loop.draft()
    r.run()
    assert h.tokens == text and h.timings.draft_n == h.timings.draft_n_accepted


# -- the cache --------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("path", [LLAMA, GEMMA3, QWEN35], ids=["llama", "gemma3", "qwen35"])
def test_a_prefix_of_the_cache_has_the_draft_models_rows(path: Path) -> None:
    r = drafted(path, path, page_size=16)
    prompt = max(free_texts(path), key=len)
    first = r.generate(prompt, 20)
    for n in (1, 9):  # whole pages, and a part of one
        again = r.generate([*prompt, *first.tokens[:-n], 5, 6], 30)
        assert again.timings.cache_n > 64
        assert again.timings.draft_n == again.timings.draft_n_accepted > 0


@BOTH
def test_rows_that_wait_are_computed_before_their_page_is_filed(path: Path) -> None:
    r = drafted(path, path, page_size=16, np=2)
    assert isinstance(r.loop.drafter, Chain)
    r.loop.drafter.most_waiting = 1000
    prompt = max(free_texts(path), key=len)
    r.generate(prompt, 20, n_draft_max=0)
    again = r.generate(prompt, 30)
    assert again.timings.cache_n >= 96 and again.timings.draft_n == again.timings.draft_n_accepted > 0


@pytest.mark.sampled(most=1)
@BOTH
def test_a_slots_file_brings_the_draft_models_rows_back(path: Path, tmp_path: Path) -> None:
    options = {"np": 2, "ctx": 256, "kv_type": "f32", "page_size": 16, "warm_up": False, "device": "cpu"}
    options |= {"spec_type": "draft", "n_draft_fixed": True}
    prompt = max(free_texts(path), key=len)
    with Engine.open(str(path), str(path), options) as e:
        first = e.generate(prompt, params=GREEDY, max_tokens=20)
        e.save_slot(0, tmp_path / "a.slot")
    with Engine.open(str(path), str(path), options) as e:
        e.restore_slot(1, tmp_path / "a.slot")
        again = e.generate([*prompt, *first.tokens, 3, 4], params=GREEDY, max_tokens=30)
        assert again.timings.cache_n > 100
        assert again.timings.draft_n == again.timings.draft_n_accepted > 0


# -- its length -------------------------------------------------------------------------------------------------------


def test_behind_its_trained_length_it_drafts_no_more() -> None:
    """The text stays the target's, and another request with a shorter context drafts as before."""
    short = with_tensors(LLAMA, {}, **{"llama.context_length": 80})
    r = drafted(LLAMA, short, np=2, page_size=16)
    assert "in the first 80 tokens of a context" in r.info.draft_note
    prompt = max(free_texts(LLAMA), key=len)[:60]
    long = r.generate(prompt, 60)
    assert long.tokens == plain_rig(LLAMA).generate(prompt, 60).tokens
    t = long.timings
    assert t.draft_n == t.draft_n_accepted and 8 < t.draft_n <= 20 and t.n_rounds > 35
    again = r.generate([*prompt, *long.tokens[:12]], 20)
    assert again.timings.cache_n > 64 and again.timings.draft_n == again.timings.draft_n_accepted > 4


# -- vocabularies -----------------------------------------------------------------------------------------------------


def shuffled(path: Path, extra: int = 0) -> Path:
    """The same model with its tokens in another order, and with some that the target does not have behind them."""
    file = open_gguf(path)
    tokens = file.fields.strings(TOKENS)
    kinds = file.fields.integers(KINDS, len(file.fields.strings(TOKENS)))
    order = np.random.default_rng(1).permutation(len(tokens))
    own = {name: values(path, name)[order] for name in TABLES}
    own = {name: np.concatenate([x, np.zeros((extra, x.shape[1]), "<f4")]) for name, x in own.items()}
    ids = {
        key: int(np.flatnonzero(order == i)[0])
        for key, i in file.metadata.items()
        if key.endswith("_token_id")
    }
    texts = [*(tokens[i] for i in order), *(f"unknown{i}" for i in range(extra))]
    return with_tensors(
        path, own, **{TOKENS: texts, KINDS: [*(kinds[i] for i in order), *[1] * extra], **ids}
    )


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_vocabulary_in_another_order_is_mapped(is_ahead: bool) -> None:
    texts = free_texts(LLAMA)
    r = drafted(LLAMA, shuffled(LLAMA, 11), np=2)
    r.loop.lookahead.on = is_ahead
    heard = joined(r, [*texts])
    assert [h.tokens for h in heard] == list(texts.values())
    n, right = (sum(getattr(h.timings, x) for h in heard) for x in ("draft_n", "draft_n_accepted"))
    assert right > 0.9 * n > 0


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("more", [-7, 7])
def test_vocabularies_that_differ_in_their_padding_need_no_map(more: int) -> None:
    """Recorded passes stay recorded, and no id leads beyond a table."""
    fields = open_gguf(LLAMA).fields
    tokens = fields.strings(TOKENS)
    n, kinds = len(tokens) + more, fields.integers(KINDS, len(tokens))
    rows = {name: values(LLAMA, name) for name in TABLES}
    own = {
        name: np.concatenate([x, np.full((7, x.shape[1]), 9.0, "<f4")])[:n] for name, x in rows.items()
    }
    texts = [*tokens, *(f"[PAD{i}]" for i in range(7))][:n]
    draft = with_tensors(LLAMA, own, **{TOKENS: texts, KINDS: [*kinds, *[5] * 7][:n]})
    known = free_texts(LLAMA)
    r = drafted(LLAMA, draft, np=2)
    heard = joined(r, [*known])
    assert [h.tokens for h in heard] == list(known.values())
    assert isinstance(r.loop.drafter, Chain) and not r.loop.drafter._steps[0]._cannot
    r.generate([298, 299, 297], 8)


def test_partners_have_the_same_text_or_the_nearest() -> None:
    target, own = open_gguf(LLAMA), open_gguf(shuffled(LLAMA, 11))
    n = target.tensors["token_embd.weight"].shape[0]
    found = read_map(target, n, own, n + 11)
    assert found.to_own is not None and found.to_target is not None
    a, b = target.fields.strings(TOKENS), own.fields.strings(TOKENS)
    assert [b[i] for i in found.to_own] == a
    assert [a[i] for i in found.to_target[:n]] == b[:n]
    assert all(a[i] == "u" or a[i].startswith("un") for i in found.to_target[n:]), (
        "the longest that begins 'unknown0'"
    )
    assert read_map(target, n, target, n).to_own is None is read_map(target, n, target, n).to_target


def test_a_vocabulary_with_few_common_tokens_is_refused() -> None:
    tokens = [f"{t}#{i}" if i % 3 else t for i, t in enumerate(open_gguf(LLAMA).fields.strings(TOKENS))]
    with pytest.raises(
        PairError,
        match=r"smaller vocabulary's \d+ tokens the other one has \d+ \(\d+%\), and 50% are wanted",
    ):
        drafted(LLAMA, with_tensors(LLAMA, {}, **{TOKENS: tokens}))


@dataclass
class Rows:
    """The parts of a batch that a draft model reads."""

    tokens: torch.Tensor
    positions: torch.Tensor


def test_a_pair_is_refused_by_the_heads_of_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weights of either are read."""
    monkeypatch.setattr(Weights, "__init__", lambda *_, **__: pytest.fail("weights are read"))
    tokens = [f"{t}#{i}" for i, t in enumerate(open_gguf(LLAMA).fields.strings(TOKENS))]
    with pytest.raises(PairError, match="50% are wanted"):
        Engine.load(LLAMA, with_tensors(LLAMA, {}, **{TOKENS: tokens}), ctx=64, device="cpu")


def vocabulary(texts: Sequence[str], **more: Any) -> TokenTexts:
    return TokenTexts(len(texts), texts, [(False, t.encode()) for t in texts], frozenset(), **more)


def test_a_small_vocabulary_drafts_for_a_large_one_and_the_other_way_round() -> None:
    """A large one has thousands of tokens that a small one spells with several: only the smaller one's count."""
    large = vocabulary([f"word{i}" for i in range(1000)])
    small = vocabulary([f"word{i}" for i in range(60)] + [f"only{i}" for i in range(40)])
    for target, own in ((large, small), (small, large)):
        assert "60% of the smaller one's 100 tokens" in mapped(target, own).remark
    with pytest.raises(PairError, match=r"100 tokens the other one has 40 \(40%\)"):
        mapped(large, vocabulary([f"word{i}" for i in range(40)] + [f"only{i}" for i in range(60)]))


def test_a_partner_is_a_byte_only_where_no_other_token_has_its_text() -> None:
    """Byte tokens stand first in SentencePiece's vocabularies, and no text has them for its characters: drafts from such ids were noise."""
    own = vocabulary(["1", "2", "\n", "1", "2"], bytes=frozenset({0, 1, 2}))
    assert mapped(vocabulary(["2", "1", "\n"]), own).to_own == [4, 3, 2]
    gemma = open_gguf(FIXTURES / "gemma3.gguf")
    found = TokenTexts.of(gemma, 301)
    kinds = gemma.fields.integers(KINDS, 301)
    for (_, text), i in found.ids().items():
        assert kinds[i] != BYTE or all(
            found.keys[j] != (False, text) or kinds[j] == BYTE for j in range(301)
        )


def test_texts_begin_with_the_draft_models_own_first_token() -> None:
    """Without it a model such as Gemma repeats itself, and the target's vocabulary may have none, or another."""
    texts = ["a", "b", "<s>"]
    own = vocabulary(texts, bos=2)
    assert mapped(vocabulary(texts), own).first == 2 == mapped(vocabulary(texts, bos=1), own).first
    assert mapped(vocabulary(texts), vocabulary(texts)).first is None
    read: list[list[int]] = []
    model = SimpleNamespace(memory=None, states=lambda batch: read.append(batch.tokens.tolist()))
    block = DraftModel(model, None, 3, torch.tensor([1, 0, 2]), first=2)  # type: ignore[arg-type]
    rows = Rows(torch.tensor([0, 1, 0, 1]), torch.tensor([0, 1, 5, 6]))
    block.forward(rows, torch.empty(4, 0))  # type: ignore[arg-type]
    assert read == [[2, 0, 1, 0]]


def test_a_load_says_what_to_expect_of_its_pair(caplog: pytest.LogCaptureFixture) -> None:
    note = drafted(LLAMA, shuffled(LLAMA, 11)).info.draft_note
    assert "100% of the smaller one's" in note
    assert "the target reads 1.0 times its bytes for a token" in note
    assert "seldom pays; --spec-type suffix" in caplog.text
    moe = open_gguf(tiny("qwen3moe"))
    n, used = (moe.hparams.integer(f"expert_{x}count") for x in ("", "used_"))
    experts = sum(t.n_bytes for t in moe.tensors.values() if "_exps." in t.name)
    rest = sum(t.n_bytes for t in moe.tensors.values()) - experts
    embedding = moe.tensors["token_embd.weight"].n_bytes * ("output.weight" in moe.tensors)
    assert used < n and row_bytes(moe) == rest - embedding + experts * used // n


# -- refusals, plans and names -----------------------------------------------------------------------------------------


def test_a_model_that_is_given_is_a_draft_model() -> None:
    assert rig(QWEN3, draft_path=LLAMA).info.drafter == "draft"
    assert rig(tiny("qwen35"), draft_path=tiny("qwen35")).info.drafter == "mtp", "the target's own block"
    assert rig(LLAMA).info.drafter == "none", "no model drafts for itself"
    assert "by the model llama.gguf" in rig(QWEN3, draft_path=LLAMA).info.draft_note


def test_what_can_not_draft_is_refused_with_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--spec-type draft needs a draft model"):
        rig(LLAMA, spec_type="draft")
    with pytest.raises(UnknownArchitecture, match="'rwkv7', which pyspec does not run"):
        drafted(LLAMA, rewrite(LLAMA, tmp_path / "a.gguf", arch="rwkv7"))
    with pytest.raises(PairError, match=r"\(rwkv7\) is for none of the drafters there are"):
        rig(LLAMA, draft_path=tmp_path / "a.gguf")
    with pytest.raises(BadTensors, match=r"blk\.0\.attn_q\.weight: missing"):
        drafted(
            LLAMA, rewrite(LLAMA, tmp_path / "b.gguf", drop=lambda name: name == "blk.0.attn_q.weight")
        )
    with pytest.raises(PairError, match="deepseek4 keeps rows that refused drafts would overwrite"):
        drafted(FIXTURES / "deepseek4.gguf", FIXTURES / "deepseek4.gguf")


def test_its_weights_and_rows_are_planned() -> None:
    plain, pair = (
        fit(LLAMA, EngineSettings(np=2, ctx=64, device="cpu", draft_path=draft, kv_type="f32"))
        for draft in (None, QWEN3)
    )
    assert plain.draft_per_slot == 0 < pair.draft_per_slot
    purposes = dict(pair.asked.by_purpose)
    assert purposes["draft weights"] >= sum(t.n_bytes for t in open_gguf(QWEN3).tensors.values())
    r = drafted(LLAMA, QWEN3, np=2, ctx=64)
    own = sum(
        t.numel() * t.element_size() for part in r.loop.worker.draft_pools() for t in part.tensors()
    )
    assert own == purposes["draft KV"]
