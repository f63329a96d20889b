"""One call per round: from the verified rows of every slot to the tokens each slot keeps.

Sample-and-compare: every row's token is chosen as in plain decoding, and drafts count while they equal those choices. Choices depend on
(logits, history, seed, position) alone, so the text is the same with any drafts. Drafts with probabilities (`Drafts.q`) have a rule of
their own (`rejection`), which keeps the text's distribution but not the text. All slots share one pass per kind of work and one copy to
the host. A second copy is needed for logprobs, or if the candidates do not decide a row: over 32 ties at the edge of top-k, over 1024 tokens
inside top-p or min-p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from pyspec.cuda.ops.best.op import best as best_token
from pyspec.cuda.ops.best.ref import BestSpec, argmax
from pyspec.errors import NoTokenLeft, SlotError
from pyspec.request import SamplingParams, TokenLogprob
from pyspec.sample import chain, edits, stepwise
from pyspec.sample import mask as masks
from pyspec.sample.mask import SpanMask
from pyspec.sample.rejection import DrawnSpan, verdicts
from pyspec.sample.sampler import SlotSampler
from pyspec.sample.synth import SynthAcceptance
from pyspec.slots.drafts import NO_DRAFTS, Drafts

_MAX_NARROW = 1024  # candidates that are found without sorting the vocabulary
_MAX_DRAWN = 64  # rows whose drawn drafts are judged at once: that needs much memory


@dataclass(frozen=True, slots=True)
class Span:
    """The verified rows of one slot: row first_row + i follows the committed tokens and drafts[:i].

    mask  the tokens that its grammar allows
    """

    sampler: SlotSampler
    first_row: int
    width: int  # drafted tokens and one
    drafts: Drafts = NO_DRAFTS
    mask: SpanMask | None = None


@dataclass(frozen=True, slots=True)
class Chosen:
    """A slot's gain: accepted drafts and one token of the target's, which is missing after an accepted end token.

    With `error` set there are no tokens; other slots of the round are not affected.
    """

    tokens: list[int]
    n_accepted: int
    logprobs: list[TokenLogprob] | None = None
    error: SlotError | None = None


@dataclass(frozen=True, slots=True)
class _Work:
    """A span with values derived from it once per round."""

    span: Span
    drafts: list[int]  # up to the first invalid token id

    @property
    def n_row(self) -> int:
        return len(self.drafts) + 1

    @property
    def checks(self) -> bool:
        """Its grammar checks the choices, and a mask is made if it refuses one. Else the mask comes first."""
        return self.kind == "greedy"

    @property
    def kind(self) -> str:
        sampler = self.span.sampler
        if sampler.params.is_stepwise:
            return "stepwise"
        is_drawn = sampler.races and self.span.drafts.q is not None
        if is_drawn and self.drafts and not sampler.params.greedy:
            return "drawn"
        if sampler.params.greedy:
            return "edited" if sampler.edits_logits and not sampler.only_bans else "greedy"
        return _sampling_kind(sampler.params)


def _sampling_kind(params: SamplingParams) -> str:
    """narrow: top-k leaves few. short: other cuts by order probably leave few. full: any token may be drawn."""
    if 0 < params.top_k <= _MAX_NARROW:
        return "narrow"
    cuts = params.top_p < 1 or params.min_p > 0
    return "short" if params.top_k <= 0 and params.typical_p >= 1 and cuts else "full"


Picked = tuple[list[int], list[float]]
"""Tokens chosen for the rows of a span, and the largest logit of each row."""


@dataclass(frozen=True, slots=True)
class _Picks:
    """One entry per row: the chosen token, the row's largest logit, and whether the choice is unsure and has to be repeated."""

    tokens: Tensor  # int64
    peaks: Tensor  # f32
    unsure: Tensor  # bool


def top(logits: Tensor) -> Tensor:
    """[2, row] f64: the token of each row's largest logit, the lowest on ties, and its value. Ids are exact in f64."""
    return best_token.bind(BestSpec(logits.device)).pairs(logits)


def choose(
    logits: Tensor,
    spans: Sequence[Span],
    synth: SynthAcceptance | None = None,
    best: Tensor | None = None,
) -> list[Chosen]:
    """Decide every slot's round. `logits` is not changed, nothing is committed.

    logits  [row, vocab]  f32  rows outside all spans are ignored
    best    top(logits), if it is known, on the host or not: greedy rounds then read nothing else

    A row with NaN, +inf or only -inf fails its span if acceptance reaches it.
    """
    if not spans:
        return []
    n_row, n_vocab = logits.shape
    work = [_prepare(span, n_row, n_vocab) for span in spans]
    if best is None and logits.device.type == "cpu" and all(w.kind == "greedy" for w in work):
        best = top(logits)  # reads each logit once, and bans then need no copy of a row
    picks = _greedy(logits, work, best) if best is not None else None
    picks = _pick_all(logits, work) if picks is None else picks
    if any(w.span.mask is not None for w in work):
        picks = _mend(logits, work, picks, synth)
    chosen = [_accept(*_forced(w, *picks[i]), synth) for i, w in enumerate(work)]
    return _with_logprobs(logits, spans, chosen)


def _prepare(span: Span, n_row: int, n_vocab: int) -> _Work:
    assert span.width == len(span.drafts.tokens) + 1, "a span's width is its drafts and one"
    assert 0 <= span.first_row <= n_row - span.width, "a span's rows are rows of the batch"
    assert span.sampler.n_vocab == n_vocab, "a sampler is made for the target's vocabulary"
    return _Work(span, span.sampler.usable(span.drafts.tokens))


def _greedy(logits: Tensor, work: list[_Work], best: Tensor) -> list[Picked] | None:
    """The verdict of a round of greedy spans from the largest logits alone; None if that does not suffice."""
    if any(w.kind != "greedy" for w in work):
        return None
    tokens, peaks = best.tolist()
    out = []
    for w in work:
        rows, banned = slice(w.span.first_row, w.span.first_row + w.n_row), w.span.sampler.bias_ids
        found, values = list(map(int, tokens[rows])), peaks[rows]
        # Bans only lower logits, so they matter only for the best token
        if banned and not banned.isdisjoint(found):
            picks = _pick("greedy", _rows(logits, [w]), [w])
            found, values = picks.tokens.tolist(), picks.peaks.tolist()
        out.append((found, values))
    return out


def _mend(
    logits: Tensor, work: list[_Work], picks: list[Picked], synth: SynthAcceptance | None
) -> list[Picked]:
    """Choose again, under their masks, for greedy spans with a choice that their grammar refuses."""
    wrong = []
    for i, w in enumerate(work):
        if w.span.mask is not None and w.checks:
            is_refused = synth is not None or _is_refused(w, w.span.mask, *picks[i])
            w.span.mask.constraint.record_best(is_refused)
            wrong += [i] * is_refused
    if not wrong:
        return picks
    if unknown := [work[i] for i in wrong if _choice(work[i]) is None]:
        fill_masked([w.span for w in unknown], _masked(logits, unknown))
    out = list(picks)
    for i in wrong:
        found = _choice(work[i])
        assert found is not None
        out[i] = found
    return out


def _choice(work: _Work) -> Picked | None:
    return None if work.span.mask is None else work.span.mask.choice


def _masked(logits: Tensor, work: list[_Work]) -> Tensor:
    """[2, row] f64: as `top`, of these spans' rows under their masks."""
    found = _pick("greedy", _rows(logits, work, is_masked=True), work)
    return torch.stack([found.tokens.double(), found.peaks.double()])


def best_masked(logits: Tensor, spans: Sequence[Span]) -> tuple[list[Span], Tensor | None]:
    """The spans whose grammars refused choices recently, and the best tokens of their rows under their masks, computed on the device before the
    unmasked ones are read. Call `fill_masked` once the host can read them."""
    found = [_prepare(s, *logits.shape) for s in spans if wants_mask(s)]
    found = [w for w in found if w.checks]
    return [w.span for w in found], (_masked(logits, found) if found else None)


def wants_mask(span: Span) -> bool:
    """Its mask will probably be needed."""
    return span.mask is not None and not (_Work(span, []).checks and span.mask.constraint.is_calm)


def fill_masked(spans: Sequence[Span], found: Tensor) -> None:
    """Fill in the result [2, row] f64 of `best_masked` for these spans."""
    (tokens, peaks), row = found.tolist(), 0
    for span in spans:
        assert span.mask is not None
        end = row + len(span.mask.drafts) + 1
        span.mask.choice = list(map(int, tokens[row:end])), peaks[row:end]
        row = end


def _is_refused(work: _Work, mask: SpanMask, tokens: list[int], peaks: list[float]) -> bool:
    """The grammar refuses a choice. Drafts are usable, so only the first choice that differs is checked, unless its row is an error."""
    n = next((i for i, draft in enumerate(work.drafts) if draft != tokens[i]), len(work.drafts))
    return math.isfinite(peaks[n]) and not mask.allows(n, tokens[n])


def _pick_all(logits: Tensor, work: list[_Work]) -> list[Picked]:
    """Chosen token and largest logit of every row, per span."""
    groups: dict[str, list[int]] = {}
    for i, w in enumerate(work):
        groups.setdefault(w.kind, []).append(i)
    stepwise, drawn = groups.pop("stepwise", []), groups.pop("drawn", [])
    out: list[Picked] = [([], [])] * len(work)
    for i in stepwise:
        out[i] = _stepwise(logits, work[i])
    for i, picked in zip(drawn, _drawn(logits, [work[i] for i in drawn]), strict=True):
        out[i] = picked
    if not groups:
        return out
    parts = {kind: [work[i] for i in members] for kind, members in groups.items()}
    batches = {kind: _rows(logits, part) for kind, part in parts.items()}
    found = [_pick(kind, batches[kind], part) for kind, part in parts.items()]
    columns = [(p.tokens.double(), p.peaks.double(), p.unsure.double()) for p in found]
    packed = torch.cat([torch.stack(three) for three in columns], dim=1)
    tokens, peaks, unsure = packed.tolist()  # ids are exact in f64
    row = 0
    for kind, members in groups.items():
        first = row
        for i in members:
            end = row + work[i].n_row
            found_tokens = [int(token) for token in tokens[row:end]]
            if any(unsure[row:end]):
                own = batches[kind][row - first : end - first]
                found_tokens = _pick("full", own, [work[i]]).tokens.tolist()
            out[i] = found_tokens, peaks[row:end]
            row = end
    return out


def _drawn(logits: Tensor, work: list[_Work]) -> list[Picked]:
    """Chosen tokens and largest logits of spans whose drafts were drawn from known distributions."""
    found, done = [], 0
    while done < len(work):
        part = _first_rows(work[done:])
        rows, done = _rows(logits, part), done + len(part)
        spans = [DrawnSpan.of(w.span.sampler, w.drafts, w.span.drafts) for w in part]
        found.append(torch.stack([verdicts(rows, spans).double(), rows.amax(-1).double()]))
    tokens, peaks = torch.cat(found, dim=1).tolist() if found else ([], [])
    ends = [0, *accumulate(w.n_row for w in work)]
    return [(list(map(int, tokens[a:b])), peaks[a:b]) for a, b in pairwise(ends)]


def _first_rows(work: list[_Work]) -> list[_Work]:
    """As many of the first spans as are judged at once, one at least."""
    ends = accumulate(w.n_row for w in work)
    n = sum(1 for end in ends if end <= _MAX_DRAWN)
    return work[: max(1, n)]


def _stepwise(logits: Tensor, work: _Work) -> Picked:
    """Chosen tokens and largest logits of a span that is chosen row by row. The sampler keeps the feedback for its next commit."""
    sampler, n_row = work.span.sampler, work.n_row
    edits_ = sampler.edits(work.drafts)
    rows = _take(logits, [work.span.first_row + i for i in range(n_row)]).clone()
    edits.bias(rows, [(0, sampler.params, edits_)])
    if work.span.mask is not None:
        masks.apply(rows, [(0, work.span.mask)])
    peaks = rows.amax(-1).tolist()
    n_finite = next((i for i, peak in enumerate(peaks) if not math.isfinite(peak)), n_row)
    choice = stepwise.choose_span(rows, sampler, work.drafts, edits_, n_finite)
    sampler.ahead = choice
    last = choice.tokens[-1] if choice.tokens else 0
    return choice.tokens + [last] * (n_row - len(choice.tokens)), peaks


def _rows(logits: Tensor, work: list[_Work], *, is_masked: bool = False) -> Tensor:
    """The group's rows one after the other; a copy if they must be edited or are scattered. is_masked: mask greedy ones, too."""
    out = _take(logits, [w.span.first_row + i for w in work for i in range(w.n_row)])
    changes, masked = [], []
    row = 0
    for w in work:
        if w.span.sampler.edits_logits:
            changes.append((row, w.span.sampler.params, w.span.sampler.edits(w.drafts)))
        if w.span.mask is not None and (is_masked or not w.checks):
            masked.append((row, w.span.mask))
        row += w.n_row
    if changes or masked:
        out = out.clone() if out.data_ptr() == logits[work[0].span.first_row].data_ptr() else out
    if changes:
        edits.apply(out, changes)
    if masked:
        masks.apply(out, masked)
    return out


def _take(logits: Tensor, rows: list[int]) -> Tensor:
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return logits[rows[0] : rows[0] + len(rows)]
    return logits.index_select(0, torch.tensor(rows, device=logits.device))


def _pick(kind: str, logits: Tensor, work: list[_Work]) -> _Picks:
    """Choose from edited rows. "narrow" and "short" may come back unsure."""
    if kind in ("greedy", "edited"):
        tokens = argmax(logits)
        peaks = logits.gather(1, tokens[:, None]).squeeze(1)
        return _Picks(tokens, peaks, torch.zeros_like(tokens, dtype=torch.bool))
    params = [w.span.sampler.params for w in work for _ in range(w.n_row)]
    noise = [u for w in work for u in w.span.sampler.noise(w.n_row).tolist()]
    settings = chain.Settings.stack(params, noise, logits.shape[1], logits.device)
    if work[0].span.sampler.races:  # all requests of an engine do
        settings = replace(settings, races=True)
    if kind == "full":
        tokens, unsure = chain.pick(logits, settings)
        return _Picks(tokens, logits.amax(-1), torch.zeros_like(unsure))
    k = max(p.top_k for p in params) if kind == "narrow" else _MAX_NARROW
    total = chain.mass(logits) if kind == "short" and any(p.top_p < 1 for p in params) else None
    ids, values = chain.best(logits, k)
    column, unsure = chain.pick(values, settings, total, ids)
    incomplete = values.shape[1] < logits.shape[1]
    return _Picks(ids.gather(1, column[:, None]).squeeze(1), values.amax(-1), unsure & incomplete)


def _forced(work: _Work, tokens: list[int], peaks: list[float]) -> tuple[_Work, list[int], list[float]]:
    """A span up to the first row with a forced token, and that token in it."""
    budget = work.span.sampler.budget
    found = None if budget is None else budget.forced(work.drafts)
    if found is None:
        return work, tokens, peaks
    row, token = found
    return replace(work, drafts=work.drafts[:row]), [*tokens[:row], token], peaks[: row + 1]


def _accept(work: _Work, tokens: list[int], peaks: list[float], synth: SynthAcceptance | None) -> Chosen:
    sampler, drafts = work.span.sampler, work.drafts
    if synth is None:
        n, is_end = 0, False
        while n < len(drafts) and drafts[n] == tokens[n] and not is_end:
            is_end = tokens[n] in sampler.ends
            n += 1
        kept = tokens[: n if is_end else n + 1]
    else:
        n = synth.n_accepted(sampler.fingerprint, sampler.n_history, len(drafts))
        n = next((i for i in range(n) if drafts[i] in sampler.eog_ids), n)
        kept = [*drafts[:n], tokens[n]]
    if not all(map(math.isfinite, peaks[: len(kept)])):
        i = next(i for i, peak in enumerate(peaks) if not math.isfinite(peak))
        is_masked = work.span.mask is not None
        return Chosen([], 0, error=_bad_row(sampler.n_history + i, peaks[i], is_masked=is_masked))
    return Chosen(kept, n)


def _bad_row(position: int, peak: float, *, is_masked: bool) -> SlotError:
    if peak == -math.inf and is_masked:
        return NoTokenLeft(
            f"the grammar came to a dead end at position {position}: no token is left that it allows"
            " (and logit_bias, ignore_eos and min_tokens do not ban)"
        )
    if peak == -math.inf:
        why = "every logit is -inf (see logit_bias)"
        return NoTokenLeft(f"no token is left at position {position}: {why}")
    found = "NaN" if math.isnan(peak) else "+inf"
    return SlotError(f"the target's logits at position {position} hold {found}")


def _with_logprobs(logits: Tensor, spans: Sequence[Span], chosen: list[Chosen]) -> list[Chosen]:
    """Add the log probabilities of the kept tokens under the target's own distribution, for the slots that ask for them."""
    after = [_after_sampling(spans[i].sampler, c) for i, c in enumerate(chosen)]
    pairs = zip(chosen, after, strict=True)
    chosen = [c if found is None else replace(c, logprobs=found) for c, found in pairs]
    wanted = [
        (i, n)
        for i, c in enumerate(chosen)
        if c.error is None and c.logprobs is None and (n := spans[i].sampler.params.logprobs) is not None
    ]
    if not wanted:
        return chosen
    rows = [spans[i].first_row + j for i, _ in wanted for j in range(len(chosen[i].tokens))]
    tokens = [token for i, _ in wanted for token in chosen[i].tokens]
    entries = iter(logprobs_of(_take(logits, rows), tokens, max(n for _, n in wanted)))
    out = list(chosen)
    for i, n in wanted:
        own = [next(entries) for _ in chosen[i].tokens]
        out[i] = replace(chosen[i], logprobs=[replace(entry, top=entry.top[:n]) for entry in own])
    return out


def _after_sampling(sampler: SlotSampler, chosen: Chosen) -> list[TokenLogprob] | None:
    """The distribution that was drawn from, if requested; for a greedy choice only the argmax."""
    params = sampler.params
    if not params.post_sampling or params.logprobs is None or chosen.error is not None:
        return None
    if params.is_stepwise:
        return sampler.ahead.logprobs[: len(chosen.tokens)]
    n = params.logprobs
    return [TokenLogprob(token, 0.0, ((token, 0.0),)[:n]) for token in chosen.tokens]


def logprobs_of(logits: Tensor, tokens: list[int], n_top: int) -> list[TokenLogprob]:
    """Log probabilities of given tokens, one per row, and the `n_top` best ones of the row."""
    norm = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None]) - norm
    if n_top == 0:
        pairs = zip(tokens, own.squeeze(1).tolist(), strict=True)
        return [TokenLogprob(token, value) for token, value in pairs]
    ids, values = chain.ranked(logits, min(n_top, logits.shape[1]))
    table = torch.cat([own.double(), (values - norm).double(), ids.double()], dim=1).tolist()
    n = ids.shape[1]
    return [
        TokenLogprob(
            token,
            row[0],
            tuple((int(id_), value) for id_, value in zip(row[1 + n :], row[1 : 1 + n], strict=True)),
        )
        for token, row in zip(tokens, table, strict=True)
    ]
