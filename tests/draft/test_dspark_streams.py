"""DSpark over DeepSeek-V4's layers: drafts are those of a reference in numpy, the text is the target's, and misfits are refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from block_drafters import recorded_block
from engine_rig import Rig, rig
from known_texts import N_TEXT, known_texts, tiny
from rewrite import rewrite
from spark_streams import HEAD_MIX, StreamsReference, streams_drafter

from pyspec import draft
from pyspec.config import EngineSettings
from pyspec.draft.dflash import DFlash
from pyspec.draft.dspark_streams import StreamsNet
from pyspec.engine.plan.describe import describe
from pyspec.engine.plan.planned_bytes import plan_memory
from pyspec.gguf import open_gguf
from pyspec.slots.drafts import DraftRequest

KINDS = {"anchor": {}, "behind": {"from_anchor": False}, "unsure": {"sure": False}}


@cache
def drafter(kind: str = "anchor") -> Path:
    return streams_drafter(**KINDS[kind])


def drafted(kind: str = "anchor", **settings: object) -> Rig:
    settings = {"draft_path": drafter(kind), "n_draft_fixed": True} | settings
    return rig(tiny("deepseek4"), **settings)


def test_logits_and_drafts_are_those_of_llama_cpp() -> None:
    """Behind more tokens than the window has."""
    net, rows, batch, want = recorded_block("dspark_streams")
    assert isinstance(net, StreamsNet)
    tokens, _ = net.drafts(rows[None], len(rows), batch.tokens[:1], tells=False)
    assert tokens.tolist() == want["logits"].argmax(-1).tolist()
    given = net.token(torch.cat([batch.tokens[:1], tokens[:-1]]))
    logits = net.bias(given, residual=net.head(net._normed(rows)))
    assert np.abs(logits.numpy() - want["logits"]).max() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_how_sure_it_is(kind: str) -> None:
    prompt = max(known_texts(tiny("deepseek4")), key=len)
    reference, r = StreamsReference(drafter(kind)), drafted(kind)
    r.submit(prompt, 8)
    while not (jobs := [job for job in r.loop.jobs.values() if job.is_decoding]):
        r.loop.step()
    (slot, anchor), own = (jobs[0].slot, jobs[0].anchor), r.loop.drafter
    assert isinstance(own, DFlash) and isinstance(own.net, StreamsNet) and slot is not None
    (drafts,) = own.draft([DraftRequest(slot, anchor, 4, tells=True)])
    features = reference.features(slot.tokens)
    tokens, sure = reference.draft(anchor, features, 4, own.length.rows(1, 4))
    assert [*drafts.tokens] == tokens and np.abs(np.array(drafts.sure) - sure).max() < 1e-4


def test_one_key_a_token_is_planned_and_kept() -> None:
    settings = {"draft_path": drafter(), "np": 3, "ctx": 256, "kv_type": "f32", "device": "cpu"}
    r, plan = drafted(**settings), plan_memory(describe(tiny("deepseek4"), EngineSettings(**settings)))
    own = r.loop.drafter
    assert isinstance(own, DFlash)
    parts, dim = own.net.memory.parts, own.net.c.attention.head_dim
    assert sum(pool.k.numel() for pool in parts) == len(parts) * r.loop.table.n_alloc_row * dim  # type: ignore[attr-defined]
    assert own.net.memory.kv_bytes == pytest.approx(plan.draft_kv, rel=0.02)


def test_a_file_is_recognised_and_may_have_the_checkpoints_names(tmp_path: Path) -> None:
    assert draft.recognised(open_gguf(drafter())) == "dspark"
    names = {f"{HEAD_MIX}_{x}.weight": f"hc_head_{x}.weight" for x in ("fn", "base", "scale")}
    other = rewrite(drafter(), tmp_path / "d.gguf", rename=lambda name: names.get(name, name))
    prompt, text = next(iter(known_texts(tiny("deepseek4")).items()))
    assert drafted(draft_path=other).generate(prompt, N_TEXT).tokens == text
