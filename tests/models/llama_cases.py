"""What llama.cpp says of a fixture (FIXTURES/NAME.npz), and that a bench says the same, whichever way the rows came in."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from harness import DEVICE, FIXTURES, Bench

from pyspec.draft.chain import Chain
from pyspec.slots.batch import Batch, Seq, lay_out
from pyspec.slots.drafts import DraftRequest

ATOL = 3e-4  # CPUs round products of few rows differently: 1.0e-4 has been seen


def expected(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(FIXTURES / f"{name}.npz"))


def told(name: str, what: str = "logits") -> tuple[list[int], torch.Tensor]:
    """(tokens, llama.cpp's rows of them)."""
    data = expected(name)
    return data["tokens"].tolist(), torch.from_numpy(data[what])


def bench_of(name: str, **options: object) -> Bench:
    return Bench(FIXTURES / f"{name}.gguf", **options)  # type: ignore[arg-type]


def check_refused_rows(name: str, width: int, kept: int, n_after: int) -> None:
    """The first rows of a verify kept, then plain decoding: the logits are llama.cpp's of the kept text."""
    tokens, want = told(name)
    bench = bench_of(name)
    bench.feed(0, tokens[:20])
    wrong = [(t + 7) % 300 for t in tokens[20 + kept : 20 + width]]
    seq = bench.seq(0, tokens[20 : 20 + kept] + wrong, keep=False)
    bench.forward(seq)
    bench.commit(seq, kept)
    for at in range(20 + kept, 20 + n_after + kept):
        assert (bench.feed(0, [tokens[at]]) - want[at]).abs().max() < ATOL


def check_ragged_slots(bench: Bench, name: str) -> None:
    """Eight slots, five busy with widths from 1 to 9 in changing order."""
    tokens, want = told(name)
    at = [0] * 5
    for rnd, order in enumerate(itertools.islice(itertools.permutations(range(5)), 0, 120, 13)):
        seqs = [bench.seq(s, tokens[at[s] : at[s] + 1 + (2 * s + rnd) % 9], keep=s == 0) for s in order]
        logits, row = bench.forward(*seqs).logits.cpu(), 0
        for seq in seqs:
            first = at[seq.slot]
            assert (logits[row : row + seq.width] - want[first : first + seq.width]).abs().max() < ATOL
            row += seq.width
            kept = seq.width if seq.keep else 1 + rnd % seq.width
            bench.commit(seq, kept)
            at[seq.slot] += kept


def check_mtp_rows(bench: Bench, drafter: Chain, name: str) -> None:
    """The block alone: it is given llama.cpp's hidden states."""
    tokens, hidden = told(name, "hidden")
    hidden = hidden.to(DEVICE)
    before = torch.cat([torch.zeros_like(hidden[:1]), hidden[:-1]])
    got = drafter.block.forward(lay_out(bench.table, [Seq(0, 0, tokens)], DEVICE), before)
    assert (got.cpu() - told(name, "mtp_hidden")[1]).abs().max() < ATOL
    assert (drafter.block.head(got).cpu() - told(name, "mtp_logits")[1]).abs().max() < ATOL


def check_chained_steps(
    bench: Bench, drafter: Chain, name: str, chunk: int = 37, atol: float = 5 * ATOL
) -> None:
    """The prompt in chunks through the whole model, whose rounding the block adds its own to, then one draft: tokens, states and logits of
    every step."""
    tokens, want = told(name, "chain_hidden")
    chain, slot = expected(name)["chain_tokens"].tolist(), bench.table.slots[0]
    drafter.begin(slot, None)
    for i in range(0, len(tokens), chunk):
        seq = bench.seq(0, tokens[i : i + chunk])
        batch = lay_out(bench.table, [seq], DEVICE)
        drafter.observe(batch, [seq.width], bench.target.forward(batch))
        bench.commit(seq, seq.width)
    states: list[torch.Tensor] = []
    forward = drafter.block.forward

    def watch(batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        out = forward(batch, hidden)
        states.append(out[-1])
        return out

    drafter.block.forward = watch  # type: ignore[method-assign]
    assert drafter.draft([DraftRequest(slot, chain[0], 4)])[0].tokens[:3] == chain[1:]
    assert (torch.stack(states).cpu() - want).abs().max() < atol
    logits = drafter.block.head(torch.stack(states)).cpu()
    assert (logits - told(name, "chain_logits")[1]).abs().max() < atol
