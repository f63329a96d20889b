"""The base of chained heads runs with any block: another head is a module, drafts as well ahead, and has places for all rows of a verify."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from types import SimpleNamespace

import mapped_mtp
import pytest
import torch
from engine_rig import DEMO, Rig, rig
from known_texts import demo_prompts
from plans import fix_lengths
from torch import Tensor

from pyspec import registry
from pyspec.draft.chain import Chain
from pyspec.draft.drafter import NO_DRAFTER
from pyspec.engine.loop import pending_round
from pyspec.models.target import Out
from pyspec.sample.choose import Chosen, Span, choose
from pyspec.slots.batch import Batch, Seq, lay_out
from pyspec.slots.table import SlotTable


def overwrite_taps(r: Rig) -> None:
    """As a graph does: results of the last forward are gone when the next one runs."""
    forward, last = r.loop.worker.forward, list[Tensor]()

    def run(batch: Batch) -> Out:
        with torch.inference_mode():
            for taps in last:
                taps.fill_(float("nan"))
        out: Out = forward(batch)
        last[:] = [out.taps] if out.taps is not None else []
        return out

    r.loop.worker.forward = run  # type: ignore[assignment]


@pytest.mark.slow
@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_second_chained_head_drafts_what_mtp_drafts_from_the_same_states(
    is_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.DRAFTERS, "tapped", "tapped_mtp")
    found, known = {}, demo_prompts()[:4]
    for kind in ("mtp", "tapped"):
        r = rig(DEMO, np=2, spec_type=kind, n_draft_max=3, n_draft_fixed=True)
        overwrite_taps(r)
        r.loop.lookahead.on = is_ahead
        rounds = count()  # three without drafts, three with: states wait, and are caught up on
        fix_lengths(
            r.loop,
            lambda caps, rounds=rounds: [cap * (n // 3 % 2) for n in (next(rounds),) for _, cap in caps],
        )
        heard = [r.submit(prompt, len(answer)) for prompt, answer in known]
        r.run()
        assert r.info.drafter == kind and [h.tokens for h in heard] == [answer for _, answer in known]
        found[kind] = [(h.timings.draft_n, h.timings.accepted_per_pos) for h in heard]
    assert found["tapped"] == found["mtp"]
    assert all(sum(accepted) > n // 2 > 0 for n, accepted in found["mtp"][:2]), (
        "drafts of states that are gone would be refused"
    )


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("p_min", [0.0, 0.3])
def test_a_block_with_a_vocabulary_of_its_own_drafts_tokens_of_the_target(
    p_min: float, is_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the target's tokens in another order: MTP's drafts. A third of them: no other token, and the same text."""
    monkeypatch.setitem(registry.DRAFTERS, "mapped", "mapped_mtp")
    found, known = {}, demo_prompts()[:2]
    for kind, every in (("mtp", 1), ("mapped", 1), ("mapped", 3)):
        monkeypatch.setattr(mapped_mtp, "EVERY", every)
        r = rig(DEMO, np=2, spec_type=kind, n_draft_max=3, n_draft_fixed=True, draft_p_min=p_min)
        r.loop.lookahead.on = is_ahead
        drafted = watch_drafts(r, monkeypatch)
        heard = [r.submit(prompt, len(answer)) for prompt, answer in known]
        r.run()
        assert [h.tokens for h in heard] == [answer for _, answer in known]
        assert drafted and all(token % every == 0 for token in drafted)
        found[kind, every] = [(h.timings.draft_n, h.timings.accepted_per_pos) for h in heard]
    assert found["mapped", 1] == found["mtp", 1] != found["mapped", 3]


def watch_drafts(r: Rig, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every token that is drafted from now on, by the host or ahead."""
    found: list[int] = []

    def seen(logits: Tensor, spans: Sequence[Span], **more: object) -> list[Chosen]:
        found.extend(token for span in spans for token in span.drafts.tokens)
        return choose(logits, spans, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(pending_round, "choose", seen)
    return found


@pytest.mark.parametrize("width", [3, 4])
def test_a_verify_of_more_rows_is_not_drafted_behind_unread(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = SlotTable(3, 12, 16)
    chain = object.__new__(Chain)
    chain.table, chain.p_min, chain.device, chain.arenas = table, 0.0, torch.device("cpu"), [None] * 3
    chain.hidden, chain.plan, chain.states = torch.zeros(9, 4), NO_DRAFTER, [None] * 3
    for slot in table.slots:
        table.acquire(slot, 40)
    monkeypatch.setattr(
        chain, "_state", lambda slot: SimpleNamespace(n_row=slot.n_past + 1, n_fold=0), raising=False
    )
    batch = lay_out(table, [Seq(i, 0, [1] * width, n_out=width) for i in range(3)], chain.device)

    def follow(*_: object) -> None:
        raise InterruptedError  # it goes on to lay out the first pass

    chain.ahead = SimpleNamespace(follow=follow)
    if width * 3 <= 9:
        with pytest.raises(InterruptedError):
            chain.draft_ahead(batch, None, None, 1)  # type: ignore[arg-type]
    else:
        assert chain.draft_ahead(batch, None, None, 1) is None  # type: ignore[arg-type]
