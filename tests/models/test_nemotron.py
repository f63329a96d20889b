"""`nemotron_h`, `nemotron_h_moe`: states and the MTP block (logits: test_logits_of_experts.py).

Names S1..S8 are the guarantees that a design for recurrent state under speculation must give.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from harness import DEVICE, Bench
from llama_cases import (
    ATOL,
    bench_of,
    check_ragged_slots,
    expected,
)

from pyspec.cuda import faults
from pyspec.cuda.ops.norms.op import norms
from pyspec.cuda.ops.norms.ref import NormsSpec
from pyspec.draft.chain import Chain
from pyspec.errors import OutOfBounds
from pyspec.models.mtp_block import MtpBlock
from pyspec.slots.batch import Seq, SeqMode, lay_out

MODEL = "nemotron_latent"
pytestmark = pytest.mark.usefixtures("one_thread")


# -- state -----------------------------------------------------------------------------------------------------------


def test_s2_any_order_of_prompt_verify_full_accept_and_refusal_follows_the_plain_path() -> None:
    data, bench, rng = expected(MODEL), bench_of(MODEL), np.random.default_rng(3)
    tokens, want, at = data["tokens"].tolist(), torch.from_numpy(data["logits"]), 0
    while at < 110:
        kind = rng.integers(5)
        n = int(rng.integers(1, 40 if kind == 0 else 12))
        n = min(n, 118 - at)
        if kind == 0:
            rows, kept = bench.feed(0, tokens[at : at + n]), n
        else:
            kept = {1: 1, 2: n}.get(int(kind), int(rng.integers(1, n + 1)))
            seq = bench.seq(
                0, tokens[at : at + kept] + rng.integers(0, 300, n - kept).tolist(), keep=False
            )
            rows = bench.forward(seq).logits[:kept].cpu()
            bench.commit(seq, kept)
        assert (rows - want[at : at + kept]).abs().max() < ATOL, f"at {at}"
        at += kept


def test_s1_a_verify_leaves_the_stored_state_where_it_was() -> None:
    """State and window stand at the committed length before the fold, whatever lies in records."""
    data, bench = expected(MODEL), bench_of(MODEL)
    bench.feed(0, data["tokens"][:30].tolist())
    layers = bench.memory.states.values()
    before = [(x.state.clone(), x.conv[:, :3].clone()) for x in layers]
    bench.forward(bench.seq(0, data["tokens"][30:36].tolist(), keep=False))
    for layer, (state, window) in zip(layers, before, strict=True):
        assert torch.equal(layer.state, state) and torch.equal(layer.conv[:, :3], window)


def refused(bench: Bench, *seqs: Seq) -> tuple[OutOfBounds, slice]:
    """What is said of an index out of bounds, and of which slots nothing was written: the reference refuses a forward whole; a kernel reports
    the sequence, skips it and runs the others."""
    try:
        bench.forward(*seqs)
    except OutOfBounds as e:
        return e, slice(None)
    fault, starts = faults.read(DEVICE), [0, *itertools.accumulate(seq.width for seq in seqs)]
    assert fault is not None
    error = fault.error(fault.slot([seq.slot for seq in seqs], starts))
    assert error.slot is not None
    return error, slice(error.slot, error.slot + 1)


@pytest.mark.parametrize("n_fold", [-1, 10, 2**31 - 1])
def test_s3_a_wild_fold_count_names_its_slot_and_writes_nothing(n_fold: int) -> None:
    data, bench = expected(MODEL), bench_of(MODEL, n_slot=2, width=9)
    bench.feed(1, data["tokens"][:8].tolist())
    bench.forward(bench.seq(1, data["tokens"][8:14].tolist(), keep=False))
    before = [t.clone() for layer in bench.memory.states.values() for t in layer.tensors()]
    error, own = refused(bench, bench.seq(0, [5]), Seq(1, 8, [1, 2], SeqMode.VERIFY, 2, n_fold))
    assert error.slot == 1
    after = [t for layer in bench.memory.states.values() for t in layer.tensors()]
    assert all(torch.equal(a[own], b[own]) for a, b in zip(before, after, strict=True))


def test_s3_a_verify_wider_than_the_records_is_refused() -> None:
    bench = bench_of(MODEL, width=4)
    error, _ = refused(bench, bench.seq(0, [1] * 5, keep=False))
    assert error.slot == 0


def test_s5_a_slot_given_up_in_a_verify_serves_the_next_as_if_new() -> None:
    data = expected(MODEL)
    tokens, want, bench = data["tokens"].tolist(), torch.from_numpy(data["logits"]), bench_of(MODEL)
    bench.feed(0, [7] * 33)
    bench.forward(bench.seq(0, [9, 8, 7], keep=False))
    bench.table.slots[0].tokens.clear()
    bench.table.slots[0].n_fold = 0
    bench.memory.reset(0)
    got = torch.cat(
        [
            bench.feed(0, tokens[:31]),
            bench.feed(0, tokens[31:40], keep=False),
            bench.feed(0, tokens[40:90]),
        ]
    )
    assert (got - want[:90]).abs().max() < ATOL


def test_s7_ragged_slots_do_not_touch_each_other() -> None:
    """Idle slots, free pages, dead records are NaN."""
    bench = bench_of(MODEL, n_slot=8)
    for pool in bench.memory.kv.values():
        pool.k.fill_(float("nan"))
        pool.v.fill_(float("nan"))
    for layer in bench.memory.states.values():
        for t in layer.records():
            t.fill_(float("nan"))
        for t in layer.tensors():
            t[5:].fill_(float("nan"))
    check_ragged_slots(bench, MODEL)
    assert all(layer.state[5:].isnan().all() for layer in bench.memory.states.values()), (
        "an idle slot was written"
    )


def test_s8_a_verify_beside_a_long_prompt_still_rolls_back() -> None:
    data = expected(MODEL)
    tokens, want = data["tokens"].tolist(), torch.from_numpy(data["logits"])
    bench = bench_of(MODEL, n_slot=3)
    bench.feed(1, tokens[:10])
    verify = bench.seq(1, [*tokens[10:12], 5, 6, 7], keep=False)
    prompts = [bench.seq(0, tokens[:70]), bench.seq(2, tokens[:23])]
    logits = bench.forward(prompts[0], verify, prompts[1]).logits.cpu()
    assert (logits[:70] - want[:70]).abs().max() < ATOL and (
        logits[70:72] - want[10:12]
    ).abs().max() < ATOL
    for seq, n in ((prompts[0], 70), (verify, 2), (prompts[1], 23)):
        bench.commit(seq, n)
    follow = [
        bench.seq(1, tokens[12:50]),
        bench.seq(0, tokens[70:75], keep=False),
        bench.seq(2, tokens[23:24]),
    ]
    logits = bench.forward(*follow).logits.cpu()
    for got, at in zip(logits.split([38, 5, 1]), (12, 70, 23), strict=True):
        assert (got - want[at : at + len(got)]).abs().max() < ATOL


def test_a_checkpoint_taken_after_a_fold_serves_two_slots() -> None:
    """P2: the copy stands at exactly its tokens, and slots that go on from it do not change it."""
    data = expected(MODEL)
    tokens, want = data["tokens"].tolist(), torch.from_numpy(data["logits"])
    bench = bench_of(MODEL, n_slot=3)
    bench.feed(0, tokens[:32])
    seq = bench.seq(0, [*tokens[32:35], 1, 2], keep=False)
    bench.forward(seq)
    bench.commit(seq, 3)
    for layer in bench.memory.states.values():
        layer.fold(layer, 0, 3)
    bench.table.slots[0].n_fold = 0
    saved = bench.memory.checkpoint(0, 35)
    for slot in (1, 2, 1):
        bench.table.slots[slot].tokens.clear()
        bench.memory.reset(slot)
        bench.feed(slot, tokens[:35])  # keys and values; the state is spoilt next
        for layer in bench.memory.states.values():
            layer.state[slot].fill_(float("nan"))
        bench.memory.restore(slot, saved)
        got = torch.cat(
            [
                bench.feed(slot, tokens[35 : 40 + slot], keep=False),
                bench.feed(slot, tokens[40 + slot : 70]),
            ]
        )
        assert (got - want[35:70]).abs().max() < ATOL
    assert (bench.feed(0, tokens[35:60]) - want[35:60]).abs().max() < ATOL


# -- the MTP block ---------------------------------------------------------------------------------------------------


def mtp_of(name: str, *, layer_norm: bool) -> tuple[Bench, Chain]:
    """layer_norm: the block ends in LayerNorm, as llama.cpp has it."""
    bench = bench_of(name)
    drafter = bench.drafter("mtp", n_draft=4)
    assert isinstance(drafter, Chain) and isinstance(drafter.block, MtpBlock)
    if layer_norm:
        drafter.block.residual.last_norm = norms.bind(
            NormsSpec(DEVICE, bench.target.config.n_embd, bench.target.config.eps, layer=True)
        )
    return bench, drafter


def test_without_a_word_the_block_ends_in_rmsnorm() -> None:
    """Undo each norm's last step: both saw the same stream, one of them without its mean."""
    data = expected("nemotron_moe")
    rows = []
    for layer_norm in (True, False):
        bench, drafter = mtp_of("nemotron_moe", layer_norm=layer_norm)
        batch = lay_out(bench.table, [Seq(0, 0, data["tokens"].tolist())], DEVICE)
        rows.append(
            drafter.block.forward(batch, torch.from_numpy(data["hidden"]).to(DEVICE))
            / drafter.block.residual.norm
        )
    centred = rows[1] - rows[1].mean(-1, keepdim=True)
    assert torch.allclose(
        torch.nn.functional.layer_norm(centred, centred.shape[-1:]), rows[0], atol=1e-3
    )
    assert (rows[1].square().mean(-1) - 1).abs().max() < 1e-2 and rows[1].mean(-1).abs().max() > 0.05
