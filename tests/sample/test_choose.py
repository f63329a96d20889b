"""choose(): the rules of acceptance, with any settings, neighbours and drafts."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import TooCloseToCall, distribution, draw, edited

from pyspec.errors import OutOfBounds, RequestError
from pyspec.request import SamplingParams
from pyspec.sample.choose import Chosen, Span, choose, top
from pyspec.sample.noise import resolve_seed
from pyspec.sample.sampler import SlotSampler
from pyspec.slots.drafts import Drafts

N_VOCAB = 13
EOG = (3,)
PLAIN = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}


def sampler(prompt=(1, 2), n_vocab=N_VOCAB, **changes) -> SlotSampler:
    return SlotSampler(
        SamplingParams(**{"seed": 5, "dry_sequence_breakers": (), **changes}), n_vocab, EOG, prompt
    )


def rows_for(best: list[int], n_vocab: int = N_VOCAB) -> torch.Tensor:
    """Rows whose largest logit stands at the given ids."""
    out = torch.linspace(0, 1, n_vocab).repeat(len(best), 1)
    out[torch.arange(len(best)), torch.tensor(best)] = 5.0
    return out


def one(logits: torch.Tensor, who: SlotSampler, drafts=()) -> Chosen:
    return choose(logits, [Span(who, 0, len(drafts) + 1, Drafts(drafts))])[0]


def one_by_one(
    rows: torch.Tensor, params: SamplingParams, prompt: list[int], drafts: list[int]
) -> list[int]:
    """Plain decoding over the same rows for as long as it agrees with the drafts."""
    who, out = SlotSampler(params, rows.shape[1], EOG, prompt), []
    for i in range(len(drafts) + 1):
        kept = choose(rows[i : i + 1], [Span(who, 0, 1)])[0].tokens
        who.commit(kept)
        out += kept
        if i == len(drafts) or kept[0] != drafts[i] or (kept[0] in EOG and not params.ignore_eos):
            break
    return out


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.5]),
    top_k=st.sampled_from([0, 1, 3, 5, 40]),
    top_p=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.3]),
    typical_p=st.sampled_from([0.4, 1.0]),
    min_keep=st.sampled_from([0, 2]),
    repeat_penalty=st.sampled_from([1.0, 1.3]),
    repeat_last_n=st.sampled_from([-1, 0, 2, 64]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    dry_multiplier=st.sampled_from([0.0, 0.9]),
    dry_allowed_length=st.sampled_from([0, 1, 2]),
    dry_sequence_breakers=st.just(()),
    logit_bias=st.sampled_from([(), ((2, 1.5), (4, -math.inf))]),
    seed=st.integers(0, 2**32),
    ignore_eos=st.booleans(),
)
logit = st.one_of(st.integers(-3, 3).map(float), st.floats(-8, 8, width=32))
tokens = st.integers(0, N_VOCAB - 1)


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.lists(logit, min_size=N_VOCAB, max_size=N_VOCAB), min_size=4, max_size=4),
    params_strategy,
    params_strategy,
    st.lists(tokens, max_size=6),
    st.lists(st.one_of(tokens, st.sampled_from([-1, N_VOCAB, 2**40])), max_size=3),
    st.booleans(),
)
def test_speculation_gives_the_tokens_plain_decoding_gives(values, params, other, prompt, drafts, agree):
    rows = torch.tensor(values)
    if agree:  # right drafts, so that long runs are accepted too
        drafts = one_by_one(rows, params, prompt, _clairvoyant(rows, params, prompt))[:3]
    who, neighbour = SlotSampler(params, N_VOCAB, EOG, prompt), SlotSampler(other, N_VOCAB, EOG, prompt)
    batch = torch.cat([rows.flip(0), rows])
    found = choose(
        batch, [Span(neighbour, 0, 4, Drafts([1, 2, 3])), Span(who, 4, len(drafts) + 1, Drafts(drafts))]
    )[1]
    expected = one_by_one(rows, params, prompt, drafts)
    assert found.error is None
    assert found.tokens == expected
    matching = [a == b for a, b in zip(drafts, expected, strict=False)]
    assert found.n_accepted == (matching.index(False) if False in matching else len(matching))


def _clairvoyant(rows: torch.Tensor, params: SamplingParams, prompt: list[int]) -> list[int]:
    who, out = SlotSampler(params, N_VOCAB, EOG, prompt), []
    for i in range(3):
        out += choose(rows[i : i + 1], [Span(who, 0, 1)])[0].tokens
        who.commit(out[-1:])
    return out


@settings(max_examples=150, deadline=None)
@given(
    st.lists(logit, min_size=N_VOCAB, max_size=N_VOCAB), params_strategy, st.lists(tokens, max_size=12)
)
def test_a_token_is_the_one_the_slow_reference_chooses(values, params, history):
    who = SlotSampler(params, N_VOCAB, EOG, history)
    logits = edited(torch.tensor(values).tolist(), params, history, EOG)
    if params.greedy:
        close = sorted(logits)[-2:]
        if close[1] - close[0] < 1e-4 and close[1] != close[0]:
            return
    try:
        expected = draw(distribution(_as_f32(logits), params), who.noise(1)[0])
    except TooCloseToCall:
        return
    found = one(torch.tensor([values]), who).tokens[0]
    if found != expected:  # f32 edits may order near-equal logits differently than the f64 reference
        assert abs(logits[found] - logits[expected]) < 1e-4


def _as_f32(values: list[float]) -> list[float]:
    return torch.tensor(values).tolist()


def test_greedy_keeps_matching_drafts_and_one_token_more():
    assert one(rows_for([5, 6, 7]), sampler(temperature=0), [5, 6]) == Chosen([5, 6, 7], 2)
    assert one(rows_for([5, 6, 7]), sampler(temperature=0), [5, 9]) == Chosen([5, 6], 1)
    assert one(rows_for([5, 6, 7]), sampler(temperature=0), [9, 6]) == Chosen([5], 0)


@pytest.mark.parametrize("n_vocab", [13, 256, 2048])
def test_ties_go_to_the_lowest_id(n_vocab):
    logits = torch.zeros(3, n_vocab)
    logits[1, [7, 9, n_vocab - 1]] = 2.0
    logits[2, n_vocab - 2 :] = 1.0
    found = choose(logits, [Span(sampler(temperature=0, n_vocab=n_vocab), i, 1) for i in range(3)])
    assert [c.tokens[0] for c in found] == [0, 7, n_vocab - 2]


def test_an_accepted_end_token_ends_the_run():
    assert one(rows_for([5, 3, 7]), sampler(temperature=0), [5, 3]) == Chosen([5, 3], 2)
    assert one(rows_for([5, 3, 7]), sampler(temperature=0), [5, 6]) == Chosen([5, 3], 1)


def test_ignore_eos_bans_the_end_token():
    rows = rows_for([5, 3, 7])
    rows[:, 6] = 4.0
    assert one(rows, sampler(temperature=0, ignore_eos=True), [5, 6]) == Chosen([5, 6, 7], 2)


@pytest.mark.parametrize("bad", [-1, N_VOCAB, 2**50, -(2**50)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_is_no_token_is_refused_and_never_an_index(bad, temperature):
    who = sampler(temperature=temperature, presence_penalty=0.1, dry_multiplier=0.5)
    found = one(rows_for([5, 6, 7, 8]) * 9, who, [5, bad, 7])
    assert found == Chosen([5, 6], 1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "changes", [{"temperature": 0.0}, {}, PLAIN, {"presence_penalty": 1.0}, {**PLAIN, "typical_p": 0.5}]
)
def test_a_broken_row_is_an_error_of_its_slot_only(value, changes):
    logits = rows_for([5, 6, 7, 8]) * 9
    logits[1, 11] = value
    good, bad = sampler(**changes), sampler(**changes)
    spans = [Span(good, 0, 1), Span(bad, 1, 1), Span(good, 2, 2, Drafts([7]))]
    found = choose(logits, spans)
    assert [c.tokens for c in found] == [[5], [], [7, 8]]
    assert [c.error is None for c in found] == [True, False, True]
    assert "position 2" in str(found[1].error)


def test_a_broken_row_behind_a_refused_draft_does_no_harm():
    logits = rows_for([5, 6, 7])
    logits[2] = math.nan
    assert one(logits, sampler(temperature=0), [5, 9]) == Chosen([5, 6], 1)
    assert one(logits, sampler(temperature=0), [5, 6]).error is not None


def test_banning_every_token_is_an_error_not_a_token():
    everything = tuple((i, -math.inf) for i in range(N_VOCAB))
    for temperature in 0.0, 1.0:
        found = one(rows_for([5]), sampler(temperature=temperature, logit_bias=everything))
        assert "every logit is -inf" in str(found.error)


def test_the_largest_logits_alone_give_the_same_greedy_verdicts():
    """With `best` a round reads nothing else: drafts, bans that hit, bans of everything, broken rows, other kinds."""
    gen = torch.Generator().manual_seed(5)
    logits = torch.randint(0, 4, (14, N_VOCAB), generator=gen).float()  # many ties
    logits[11, 3], logits[13] = math.nan, -math.inf
    everything = tuple((token, -math.inf) for token in range(N_VOCAB))
    best = logits.argmax(-1).tolist()
    changes = [{}, {"ignore_eos": True}, {"logit_bias": ((best[4], -9.0), (best[5], -0.5))}, {"logit_bias": everything}]  # fmt: skip
    spans = [
        Span(sampler(temperature=0.0, **c), 3 * i, 3, Drafts(best[3 * i : 3 * i + 2]))
        for i, c in enumerate(changes)
    ]
    spans += [Span(sampler(temperature=0.0), 12, 1), Span(sampler(temperature=0.0), 13, 1)]
    mixed = choose(logits, [*spans, Span(sampler(temperature=1.0, seed=3), 0, 1)])  # reads the rows
    for best_of in (None, top(logits)):
        for a, b in zip(mixed, choose(logits, spans, best=best_of), strict=False):
            assert (a.tokens, a.n_accepted, str(a.error)) == (b.tokens, b.n_accepted, str(b.error))


def test_logits_are_left_as_they_were():
    logits = rows_for([5, 6])
    before = logits.clone()
    one(logits, sampler(presence_penalty=2.0, logit_bias=((5, -9.0),), logprobs=2), [5])
    assert torch.equal(logits, before)


def test_logprobs_are_the_targets_own_for_accepted_drafts_too():
    logits = torch.randn(3, N_VOCAB, generator=torch.Generator().manual_seed(1)) * 4
    best = logits.argmax(-1).tolist()
    who = sampler(temperature=0, logprobs=4, logit_bias=((best[0], 0.3),), repeat_penalty=1.01)
    other = sampler(temperature=0)
    found, plain = choose(logits, [Span(who, 0, 3, Drafts(best[:2])), Span(other, 0, 1)])
    assert plain.logprobs is None
    exact = logits.log_softmax(-1)
    assert found.tokens == best and len(found.logprobs) == 3
    for i, entry in enumerate(found.logprobs):
        assert entry.token == best[i]
        assert entry.logprob == pytest.approx(exact[i, best[i]].item(), abs=1e-6)
        values, ids = exact[i].topk(4)
        assert [id_ for id_, _ in entry.top] == ids.tolist()
        assert [v for _, v in entry.top] == pytest.approx(values.tolist(), abs=1e-6)


def test_logprobs_zero_gives_the_chosen_token_only():
    entry = one(rows_for([5]), sampler(temperature=0, logprobs=0)).logprobs[0]
    assert entry.token == 5 and entry.top == () and entry.logprob < 0


def test_logprob_alternatives_are_ordered_by_id_among_equals():
    found = one(torch.zeros(1, 500), sampler(temperature=0, n_vocab=500, logprobs=3))
    assert [id_ for id_, _ in found.logprobs[0].top] == [0, 1, 2]


def test_many_ties_at_the_edge_of_top_k_still_keep_the_lowest_ids():
    logits = torch.zeros(40, 4096)
    logits[:, 2222] = 0.1
    spans = [
        Span(sampler(n_vocab=4096, seed=i, temperature=1.0, top_k=4, top_p=1.0, min_p=0.0), i, 1)
        for i in range(40)
    ]
    assert {c.tokens[0] for c in choose(logits, spans)} == {0, 1, 2, 2222}


def test_a_large_vocabulary_gives_what_a_full_sort_gives():
    """top-k by torch.topk on candidates against the same cut as top-p = 1, top_k too large for the short way."""
    logits = (
        torch.randn(8, 5000, generator=torch.Generator().manual_seed(3)).mul(4).bfloat16().float()
    )  # with ties
    for seed in range(20):
        narrow = sampler(n_vocab=5000, seed=seed, top_k=1024, top_p=0.9)
        full = sampler(n_vocab=5000, seed=seed, top_k=1025, top_p=0.9)
        assert one(logits[:1], narrow).tokens == one(logits[:1], full).tokens


@pytest.mark.parametrize(
    "changes", [{"top_p": 0.9}, {"min_p": 0.01}, {"top_p": 0.5, "min_keep": 3}, {"top_p": 0.999}]
)
@pytest.mark.parametrize("sharpness", [0.1, 1.5, 4.0])
def test_cuts_on_the_best_candidates_are_those_on_all(changes, sharpness):
    """Without top-k only 1024 candidates are looked at first; top-k of almost everything takes the long way."""
    logits = (
        torch.randn(40, 5000, generator=torch.Generator().manual_seed(4))
        .mul(sharpness)
        .bfloat16()
        .float()
    )
    short = [sampler(n_vocab=5000, seed=i, **{**PLAIN, **changes}) for i in range(40)]
    full = [sampler(n_vocab=5000, seed=i, **{**PLAIN, **changes, "top_k": 5000}) for i in range(40)]
    found = choose(logits, [Span(s, i, 1) for i, s in enumerate(short)])
    assert found == choose(logits, [Span(s, i, 1) for i, s in enumerate(full)])
    assert len({c.tokens[0] for c in found}) > 5


def test_a_choice_of_no_rows_is_empty():
    assert choose(torch.zeros(0, N_VOCAB), []) == []


def test_settings_without_meaning_are_refused():
    for changes in (
        {"temperature": math.nan},
        {"repeat_penalty": 0.0},
        {"logit_bias": ((N_VOCAB, 1.0),)},
        {"logit_bias": ((1, math.inf),)},
    ):
        with pytest.raises(RequestError):
            sampler(**changes)
    with pytest.raises(OutOfBounds):
        sampler(prompt=(1, N_VOCAB))


def test_a_seed_of_minus_one_is_replaced_by_a_drawn_one():
    assert resolve_seed(7) == 7
    assert len({resolve_seed(-1) for _ in range(20)}) > 15


def test_history_grows_by_commits_only():
    who = sampler(prompt=[1] * 300)
    one(rows_for([5, 6]), who, [5])
    assert who.history == [1] * 300
    who.commit([5, 6])
    assert who.history == [1] * 300 + [5, 6]
