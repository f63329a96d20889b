"""Logits of several ranks: each finds the best of its own columns, and all columns are gathered only if they are read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from engine_rig import DEMO, DEMO_DRAFT, FIXTURES, GREEDY, Heard, Rig, rig
from known_texts import demo_prompts
from rank_bench import CPU, together
from rank_threads import RankRig
from sampling import slow
from torch import Tensor

from pyspec.cuda.collective import Collective
from pyspec.cuda.ops.best.cuda import hostile
from pyspec.cuda.ops.best.ref import TorchBest
from pyspec.device.follow import Call, Follower
from pyspec.engine.loop import round as rounds
from pyspec.engine.loop.round import Work
from pyspec.models.gathered import Gathered
from pyspec.models.target import Out
from pyspec.request import Delta, Grammar, PromptLogprobs, SamplingParams, TokenLogprob
from pyspec.sample.choose import Span, choose
from pyspec.sample.sampler import SlotSampler
from pyspec.slots.batch import Seq, SeqMode, lay_out
from pyspec.slots.drafts import Drafts
from pyspec.slots.round import LogitsNeed, Round

N = 24
MTP: dict[str, object] = {"spec_type": "mtp", "n_draft_max": 3}
DFLASH: dict[str, object] = {"draft_path": DEMO_DRAFT}
PLAIN = replace(GREEDY, ignore_eos=False)
ASKED: dict[str, tuple[SamplingParams, Grammar | None]] = {
    "greedy": (PLAIN, None),
    "sampled": (SamplingParams(temperature=0.9, seed=5), None),
    "grammar": (PLAIN, Grammar(kind="regex", source="[a-z ]{8,30}[.]")),
    "logprobs": (replace(PLAIN, logprobs=3), None),
    "bans": (GREEDY, None),
    "biases": (replace(PLAIN, logit_bias=((7, 2.5), (11, -4.0))), None),
    "penalties": (replace(PLAIN, repeat_penalty=1.3), None),
    "stepwise": (SamplingParams(temperature=0.9, seed=6, xtc_probability=0.5), None),
}


def bits(pairs: Tensor) -> Tensor:
    """NaNs may have any bits."""
    return pairs.masked_fill(pairs.isnan(), 0.5).view(torch.int64)


def at_borders(n_vocab: int, borders: tuple[int, ...]) -> Tensor:
    """Rows whose decisive values stand on both sides of a border of ranks."""
    rows = []
    for border in borders:
        for left, right in (
            (9.0, 9.0),
            (torch.nan, torch.nan),
            (torch.inf, torch.nan),
            (9.0, torch.nan),
            (0.0, -0.0),
        ):
            for a, b in ((left, right), (right, left)):
                row = torch.full((n_vocab,), -1.0)
                row[border - 1], row[border] = a, b
                rows.append(row)
    return torch.stack([*rows, torch.full((n_vocab,), -torch.inf), torch.full((n_vocab,), torch.nan)])


@pytest.mark.parametrize("widths", [(150, 151), (76, 76, 76, 73), (1, 1, 299)], ids=str)
def test_the_best_of_ranks_is_the_best_of_all_columns(widths: tuple[int, ...]) -> None:
    n_vocab = sum(widths)
    borders = tuple(sum(widths[:i]) for i in range(1, len(widths)))
    logits = torch.cat(
        [hostile(24, n_vocab, torch.Generator().manual_seed(1)), at_borders(n_vocab, borders)]
    )
    parts = logits.split(widths, -1)

    def find(ranks: Collective) -> tuple[Tensor, Tensor]:
        head = Gathered(lambda x, prep=None, residual=None: x, ranks, widths)
        own = parts[ranks.rank.index]
        return head.best(own), head.best(own[:0])

    want = TorchBest().pairs(logits)
    for found, none in together(len(widths), find):
        assert torch.equal(bits(found), bits(want)) and none.shape == (2, 0)


def test_who_reads_what_was_left_out_fails() -> None:
    def left_out(ranks: Collective) -> Out:
        head = Gathered(lambda x, prep=None, residual=None: x, ranks, (3, 2))
        own = torch.randn(4, 3 - ranks.rank.index)
        return Out(own, torch.zeros(4, 8), None, head.best(own), head.whole).whole(
            LogitsNeed(logits=False)
        )

    for out in together(2, left_out):
        assert out.logits.shape == (4, 5) and out.logits.dtype == torch.float32 and out.head is None
        greedy = Span(SlotSampler(replace(PLAIN), 5, (), (1,)), 0, 4, Drafts((1, 2, 3)))
        assert choose(out.logits, [greedy], best=out.best)[0].error is None
        for params in (SamplingParams(temperature=1.0), replace(PLAIN, logprobs=2)):
            span = Span(SlotSampler(params, 5, (), (1,)), 0, 4, Drafts((1, 2, 3)))
            with pytest.raises(NotImplementedError, match="meta"):
                choose(out.logits, [span], best=out.best)


class Watch:
    """The rounds that other ranks run, and the number of gathered logits on the first one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[Round] = []
        self.n_gathered = 0
        obey, bring = Follower.obey, Gathered.together

        def watch(follower: Follower, call: Call) -> None:
            if call[0].startswith("launch") and follower.ranks.rank.index == 1:
                self.told += [arg for arg in call[1] if isinstance(arg, Round)]
            obey(follower, call)

        def count(head: Gathered, columns: Tensor) -> Tensor:
            self.n_gathered += head.ranks.rank.leads
            return bring(head, columns)

        monkeypatch.setattr(Follower, "obey", watch)
        monkeypatch.setattr(Gathered, "together", count)

    def take(self, r: RankRig) -> tuple[list[Round], int]:
        """Since the last call."""
        r.ranks.settle()
        found, self.told, self.n_gathered = (self.told, self.n_gathered), [], 0
        return found


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def of_prompts(round_: Round) -> bool:
    return any(seq.keep and seq.width > 1 and seq.n_out for seq in round_.seqs)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("padded", [False, True], ids=["one by one", "ahead"])
@pytest.mark.parametrize("drafter", [MTP, DFLASH], ids=["mtp", "dflash"])
def test_greedy_rounds_bring_no_logits_together(
    drafter: dict[str, object], padded: bool, watched: Watch
) -> None:
    with RankRig(DEMO, 2, np=4, padded=padded, **drafter) as r:
        heard = [r.submit(prompt, N, PLAIN) for prompt, _ in demo_prompts()[:4]]
        r.run()
        assert [h.tokens for h in heard] == [text[:N] for _, text in demo_prompts()[:4]]
        told, n_gathered = watched.take(r)
        assert all(round_.reads.logits == of_prompts(round_) for round_ in told)
        assert n_gathered == sum(map(of_prompts, told)) < 5 < len(told)

        r.generate(demo_prompts()[5][0], 8, SamplingParams(temperature=0.9, seed=1))
        told, n_gathered = watched.take(r)
        assert all(round_.reads.logits for round_ in told) and n_gathered == len(told) > 2


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True], ids=["one by one", "ahead"])
@pytest.mark.parametrize("drafter", [MTP, DFLASH], ids=["mtp", "dflash"])
def test_bans_that_rows_have_in_common_bring_no_logits_together(
    drafter: dict[str, object], padded: bool, watched: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bans of the best tokens: each text continues with the best of the others, as on one rank."""
    prompts = demo_prompts()[:3]
    bans = {token for _, text in prompts for token in text[2:8:3]}
    banned = replace(PLAIN, logit_bias=tuple((token, -math.inf) for token in sorted(bans)))
    alone = rig(DEMO, np=3, **drafter)
    want = [alone.generate(prompt, N, banned).tokens for prompt, _ in prompts]
    assert all(w != text[:N] for w, (_, text) in zip(want, prompts, strict=True)), "they hit somebody"
    with RankRig(DEMO, 2, np=3, padded=padded, **drafter) as r:
        heard = [r.submit(prompt, N, banned) for prompt, _ in prompts]
        r.run()
        assert [h.tokens for h in heard] == want
        told, n_gathered = watched.take(r)
        assert n_gathered == sum(map(of_prompts, told)) < 4 < len(told)

        heard = [r.submit(prompts[0][0], N, banned), r.submit(prompts[1][0], N, PLAIN)]
        r.run()
        assert [h.tokens for h in heard] == [want[0], prompts[1][1][:N]]
        told, n_gathered = watched.take(r)
        both = [round_ for round_ in told if len(round_.seqs) == 2]
        assert both and all(round_.reads.logits for round_ in both)

        monkeypatch.setattr(rounds, "MOST_BANS", len(bans) - 1)
        assert r.generate(prompts[0][0], N, banned).tokens == want[0]
        told, _ = watched.take(r)
        assert told and all(round_.reads.logits for round_ in told), "more than go with a round"


def mixed(r: Rig) -> list[Heard]:
    """Requests of every kind beside each other, which join and leave at other times."""
    heard, prompts = [], [prompt for prompt, _ in demo_prompts()]
    for turn in range(2):
        for i, (params, grammar) in enumerate(ASKED.values()):
            more = {} if grammar is None else {"grammar": grammar}
            heard.append(r.submit(prompts[(i + turn) % 8], 6 + 5 * (i % 3), params, **more))
            for _ in range(1 + i % 3):
                r.loop.step()
    heard.append(r.submit(prompts[0], 8, PLAIN, prompt_logprobs=2))
    heard += [r.submit(prompt, N, PLAIN) for prompt in prompts[:3]]
    r.run()
    return heard


def likeliest(heard: list[Heard]) -> list[object]:
    """Tokens that were reported beside the chosen ones. Their probabilities depend a little on the rows of a round."""
    entries = [
        [x for e in h.events if isinstance(e, Delta | PromptLogprobs) for x in listed(e)] for h in heard
    ]
    return [[(x.token, [token for token, _ in x.top]) for x in own] for own in entries]


def listed(event: Delta | PromptLogprobs) -> Sequence[TokenLogprob]:
    return event.logprobs if isinstance(event, Delta) else event.entries


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    return [h.tokens for h in mixed(rig(DEMO, np=3, **MTP))]


CASES = [slow(False, MTP), (True, MTP), slow(True, DFLASH)]


@pytest.mark.parametrize(("padded", "drafter"), CASES, ids=["one by one", "ahead", "ahead dflash"])
def test_requests_that_read_logits_and_others_say_the_same_beside_each_other(
    padded: bool,
    drafter: dict[str, object],
    alone: list[list[int]],
    watched: Watch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with RankRig(DEMO, 2, np=3, padded=padded, **drafter) as r:
        found = mixed(r)
        told, _ = watched.take(r)
        assert {round_.reads.logits for round_ in told if not of_prompts(round_)} == {True, False}
    monkeypatch.setattr(Work, "reads_logits", True)
    with RankRig(DEMO, 2, np=3, padded=padded, **drafter) as r:
        brought = mixed(r)
        told, n_gathered = watched.take(r)
        assert n_gathered == len(told)
    assert [h.tokens for h in found] == [h.tokens for h in brought] == alone
    assert likeliest(found) == likeliest(brought) and sum(map(bool, likeliest(found))) == 3


@pytest.mark.slow
def test_four_ranks_say_the_same_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    path, prompts = FIXTURES / "llama.gguf", [[1, 7, 3], list(range(5, 40)), [9] * 12]

    def run(r: Rig) -> list[list[int]]:
        heard = [
            r.submit(prompt, N, params) for prompt in prompts for params, _ in list(ASKED.values())[:2]
        ]
        r.run()
        return [h.tokens for h in heard]

    want = run(rig(path, np=2, spec_type="ngram"))
    with (
        RankRig(path, 4, np=2, spec_type="ngram") as once,
        RankRig(path, 4, np=2, spec_type="ngram", padded=True) as r,
    ):
        assert run(once) == run(r) == want


def test_a_plan_that_is_wrong_of_who_reads_ends_who_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails, and gives no wrong numbers."""
    with RankRig(DEMO, 2, np=2, **MTP) as r:
        prompt = demo_prompts()[0][0]
        first, other = r.submit(prompt, N, SamplingParams(temperature=0.9)), r.submit(prompt, 4, PLAIN)
        while not first.tokens:
            r.loop.step()
        monkeypatch.setattr(Work, "reads_logits", False)
        r.run()
        assert first.error is not None and "meta" in str(first.error)
        assert other.tokens == demo_prompts()[0][1][:4]


def test_a_forward_that_nobody_plans_has_its_logits() -> None:
    with RankRig(DEMO, 2, np=1, spec_type="none") as r:
        loop = r.loop
        slot = loop.table.slots[0]
        loop.table.acquire(slot, 8)
        out = loop.target.forward(lay_out(loop.table, [Seq(0, 0, [1, 2, 3], SeqMode.KEEP, 2)], CPU))
        assert out.logits.shape == (2, loop.target.n_vocab) and out.head is None and out.best is not None
        assert torch.equal(bits(out.best), bits(TorchBest().pairs(out.logits)))
        loop.table.release(slot)
