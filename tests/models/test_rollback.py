"""Deferred commit: whatever was drafted and refused leaves no trace in logits, state or neighbours."""

import itertools

import numpy as np
import pytest
import torch
from harness import FIXTURES, Bench

MODEL = FIXTURES / "qwen35.gguf"
TOKENS = np.load(FIXTURES / "qwen35.npz")["tokens"].tolist()


@pytest.mark.parametrize(
    ("width", "kept"), [(w, k) for w in (1, 2, 3, 8, 17) for k in {1, 2, w // 2, w} if 0 < k <= w]
)
def test_refused_rows_leave_no_trace(width: int, kept: int) -> None:
    plain, spec = Bench(MODEL), Bench(MODEL)
    for b in (plain, spec):
        b.feed(0, TOKENS[:20])
    wrong = [(t + 7) % 300 for t in TOKENS[20 + kept : 20 + width]]
    seq = spec.seq(0, TOKENS[20 : 20 + kept] + wrong, keep=False)
    spec.forward(seq)
    spec.commit(seq, kept)
    for t in TOKENS[20 : 20 + kept]:
        plain.feed(0, [t])
    for at in range(20 + kept, 20 + kept + 5):
        want, got = plain.feed(0, TOKENS[at : at + 1]), spec.feed(0, TOKENS[at : at + 1])
        assert torch.allclose(want, got, atol=1e-4)


def test_state_is_bit_equal_whether_tokens_came_singly_or_in_a_verify() -> None:
    """The recurrence takes tokens in one order; only matrix products may round by the number of rows."""
    from pyspec.cuda.ops.gdn import ref as gdn_ref
    from pyspec.cuda.ops.gdn.shape import GdnShape
    from pyspec.slots.batch import Seq, SeqMode, lay_out
    from pyspec.slots.recurrent import StateLayer
    from pyspec.slots.table import SlotTable

    shape = GdnShape(2, 4, 32, 4, 8 * 32)
    g = torch.Generator().manual_seed(0)
    n, cpu = 12, torch.device("cpu")
    m = torch.randn(n, shape.n_channel, generator=g)
    conv_w = torch.randn(shape.n_channel, 4, generator=g)
    alpha, beta = torch.randn(n, 4, generator=g), torch.randn(n, 4, generator=g)
    a, dt_bias = -torch.rand(4, generator=g), torch.randn(4, generator=g)
    run = gdn_ref.bind(gdn_ref.GdnSpec(cpu, shape, 1e-6))
    outs = {}
    for widths in ((12,), (1,) * 12, (5, 1, 6), (2, 8, 2)):
        table, layer = SlotTable(1, 4, 16), StateLayer(shape, 1, 12, cpu)
        table.acquire(table.slots[0], 32)
        at, fold, rows = 0, 0, []
        for w in widths:
            part = slice(at, at + w)
            batch = lay_out(table, [Seq(0, at, [0] * w, SeqMode.VERIFY, 0, fold)], cpu)
            rows.append(run(m[part], alpha[part], beta[part], a, dt_bias, conv_w, layer, batch))
            at, fold = at + w, w
        gdn_ref.flush(layer, 0, fold)
        outs[widths] = (torch.cat(rows), layer.state.clone(), layer.conv[:, :3].clone())
    first = outs.pop((12,))
    for widths, other in outs.items():
        for name, a, b in zip(("output", "state", "conv"), first, other, strict=True):
            assert torch.equal(a, b), f"{name} of {widths} differs from one block"


@pytest.mark.parametrize(
    ("name", "end"),
    [("qwen35", 110), ("kimi-linear", 28), ("bailingmoe3", 28), ("qwen4exp", 38), ("glm5-next", 38)],
)
def test_random_walk_of_prefill_verify_and_reject_follows_the_plain_path(name: str, end: int) -> None:
    rng, found = np.random.default_rng(3), np.load(FIXTURES / f"{name}.npz")
    tokens, want = found["tokens"].tolist(), torch.from_numpy(found["logits"])
    bench, at = Bench(FIXTURES / f"{name}.gguf"), 0
    while at < end:
        kind = rng.integers(3)
        if kind == 0:
            n = int(rng.integers(1, end // 3))
            n = min(n, end - at)
            rows, kept = bench.feed(0, tokens[at : at + n]), n
        else:
            width = int(rng.integers(1, 12))
            kept = int(rng.integers(1, width + 1))
            tail = rng.integers(0, 280, width - kept).tolist()
            seq = bench.seq(0, tokens[at : at + kept] + tail, keep=False)
            rows = bench.forward(seq).logits[:kept].cpu()
            bench.commit(seq, kept)
        assert (rows - want[at : at + kept]).abs().max() < 1e-3, f"at {at}"
        at += kept


def test_eight_ragged_slots_do_not_touch_each_other() -> None:
    """Idle slots and free pages are NaN; busy ones verify different widths in one forward."""
    alone, together = Bench(MODEL, n_slot=8), Bench(MODEL, n_slot=8)
    for pool in together.memory.kv.values():
        pool.k.fill_(float("nan"))
        pool.v.fill_(float("nan"))
    for layer in together.memory.states.values():
        for t in layer.tensors():
            t[5:].fill_(float("nan"))
        for t in (layer.k, layer.v, layer.g, layer.beta):
            t.fill_(float("nan"))
    busy = range(5)
    seqs = [together.seq(s, TOKENS[s : s + 4 + s]) for s in busy]
    together.forward(*seqs)
    for s, seq in zip(busy, seqs, strict=True):
        together.commit(seq, seq.width)
        alone.feed(s, list(seq.tokens))
    for rnd, order in enumerate(itertools.islice(itertools.permutations(busy), 0, 120, 17)):
        seqs = [together.seq(s, TOKENS[30 + s + rnd : 31 + 2 * s + rnd], keep=s == 0) for s in order]
        logits = together.forward(*seqs).logits
        at = 0
        for seq in seqs:
            rows = logits[at : at + seq.width]
            at += seq.width
            single = alone.seq(seq.slot, list(seq.tokens), keep=seq.keep)
            assert torch.allclose(rows, alone.forward(single).logits, atol=1e-4), (
                f"slot {seq.slot}, round {rnd}"
            )
            kept = seq.width if seq.keep else 1 + rnd % seq.width
            together.commit(seq, kept)
            alone.commit(single, kept)
    for layer in together.memory.states.values():
        assert torch.isnan(layer.state[5:]).all(), "an idle slot was written"
