"""Block verification beside the rule written out slowly, one span at a time."""

from __future__ import annotations

import torch

from pyspec.request import SamplingParams
from pyspec.sample.rejection import DrawnSpan, verdicts
from pyspec.sample.sampler import SlotSampler
from pyspec.slots.race import winners

N = 20


def slow(span: DrawnSpan, rows: torch.Tensor) -> list[int]:
    """The accepted drafts and the token behind them."""
    p, q = rows.double().softmax(-1), span.q.double()
    coins, noise = span.sampler.accepts(span.n + 1), torch.from_numpy(span.sampler.noise(span.n_row))
    kept, n, left = 1.0, 0, []
    for i in range(span.n + 1):
        if i == span.n:
            chance, rest = kept, p[i]
        else:
            rest = (kept * p[i] - q[i]).clamp(min=0)
            lost = float(rest.sum()) + 1 - kept
            chance = float(rest.sum()) / lost if lost > 0 else 1.0
            token = span.drafts[i]
        left.append(rest)
        n = i if coins[i] < chance else n
        kept = kept if i == span.n else min(1.0, kept * float(p[i, token] / q[i, token]))
    last = winners(left[n].log()[None], noise[n][None, None], torch.arange(N)[None])
    found = [*span.drafts[:n], int(last)]
    if n == span.n and len(span.drafts) > n:  # a draft behind those that were drawn
        own = winners(p[n:].log(), noise[n:, None], torch.arange(N)[None]).tolist()
        found = [*span.drafts[:n], *own[: 1 + (own[0] == span.drafts[n])]]
    return found


def spans_of(seed: int) -> tuple[list[DrawnSpan], torch.Tensor]:
    """Of several lengths; one has a draft behind those that were drawn."""
    rng = torch.Generator().manual_seed(seed)
    spans, rows = [], []
    for i, (n, more) in enumerate([(3, 0), (1, 0), (5, 1), (2, 0)]):
        sampler = SlotSampler(
            SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed + i), N, (), (1, 2)
        )
        sampler.races = True
        own = torch.randn(n + 1 + more, N, generator=rng)
        q = (own[:n] + 0.4 * torch.randn(n, N, generator=rng)).softmax(-1)
        drafts = [*q.multinomial(1, generator=rng)[:, 0].tolist(), *[4] * more]
        spans.append(DrawnSpan(sampler, drafts, q))
        rows.append(own)
    return spans, torch.cat(rows)


def test_verdicts_are_those_of_the_slow_rule_and_depend_on_no_other_span() -> None:
    counts = [0, 0]
    for seed in range(60):
        spans, rows = spans_of(10 * seed)
        together, first = verdicts(rows, spans).tolist(), 0
        for span in spans:
            own = rows[first : first + span.n_row]
            found, want = together[first : first + span.n_row], slow(span, own)
            assert found[: len(want)] == want
            assert verdicts(own, [span]).tolist() == found
            first += span.n_row
            counts[len(want) > span.n] += 1
    assert min(counts) > 30, "some are refused, some are not"
