"""Conversations that share and fork their beginnings, with drafts and cancels, over a prefix cache that is always too small.

    python tests/long_runs/soak.py --chats --minutes 20
    python tests/long_runs/soak.py --chats --minutes 5 --device cuda --ctx 24576 --ahead --model demo [--later]

Checked: every text, cancelled ones included, equals the text of one slot without drafter and cache; no request fails; every page and
state is accounted for at the end and has the right content (soak_audit.py); memory does not grow. A GPU rounds rows to f16 and sums
them in an order that depends on the cut of a prompt. There only tokens count that are clearly better than the next allowed one. Such a
difference may change the choice of experts, so texts of models with experts are counted where they part, not judged.
"""

from __future__ import annotations

import json
import math
import random
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

import torch
import torch.nn.functional as F
from soak import Span, Tally, grown, inspect_idle, not_cached, wait_idle
from soak_audit import audit
from torch import Tensor

from pyspec import synth
from pyspec.cuda.ops.ahead.ref import Kept
from pyspec.cuda.ops.moe.ref import Route, Routes, RouteSpec
from pyspec.engine.api import Engine, Result
from pyspec.engine.loop.pending_round import PendingRound
from pyspec.errors import PyspecError
from pyspec.models.target import Out
from pyspec.request import Delta, Request, SamplingParams
from pyspec.slots.batch import Batch
from pyspec.slots.drafts import DraftRequest, Drafts, DraftsAhead

N_CHAT, CTX = 8, 768  # tokens a conversation may have; of a longer one all pieces are longer
AGAIN, CANCELLED, FORKED = (
    0.8,
    0.2,
    0.15,
)  # shares: continue a text; are left early; continue from its middle
# A token that is no better than the next one by more may fall either way in another batch
TIE = {"cpu": 2e-3, "cuda": 0.1}
MOST_DOUBTS = 20
CLOSE = 5e-6  # so may a choice of experts: scores differ by up to 3e-6 with the cut of a prompt
N_TOP = 8  # logits known of a place: the two best that may be said are among them, as end tokens are few
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=N_TOP)


@dataclass(frozen=True)
class Words:
    """The users' texts: random tokens, or pieces of the demo's questions and answers, of which its model is sure."""

    lines: Sequence[Sequence[int]] = ()
    scale: int = 1  # of all lengths
    ctx: int = CTX

    def some(self, rng: random.Random, n: int) -> list[int]:
        text: list[int] = []
        while self.lines and len(text) < n:
            text += rng.choice(self.lines)
        return text[:n] or [rng.randrange(250) for _ in range(n)]

    def openings(self, rng: random.Random) -> list[list[int]]:
        """The beginnings that several conversations share."""
        return [self.some(rng, n * self.scale) for n in (20, 75, 130, 200)]


def demo_lines() -> list[list[int]]:
    asked = files("pyspec.demo").joinpath("prompts.jsonl").read_text().splitlines()
    return [[*line["prompt_ids"], *line["answer_ids"]] for line in map(json.loads, asked)]


class Prompter:
    """Drafts like the block of a trained model: right for a while. A random one never is, and nothing would be accepted."""

    def __init__(self, engine: Engine, seed: int) -> None:
        drafter = engine.loop.drafter
        assert drafter is not None
        self.own, self.rng, self.scripts = drafter.draft, random.Random(seed), dict[int, list[int]]()
        self.loop, self.own_ahead = engine.loop, drafter.draft_ahead  # type: ignore[attr-defined]
        drafter.draft, drafter.draft_ahead = self.draft, self.draft_ahead  # type: ignore[attr-defined, method-assign]

    def draft(self, asks: Sequence[DraftRequest]) -> list[Drafts]:
        return [
            Drafts(self.mixed(ask, list(draft.tokens)))
            for ask, draft in zip(asks, self.own(asks), strict=True)
        ]

    def draft_ahead(self, batch: Batch, out: Out, kept: Kept, n_draft: int) -> DraftsAhead | None:
        """The same behind rows that are kept; on a CPU they can be read."""
        drafts = self.own_ahead(batch, out, kept, n_draft)
        if drafts is None:
            return None
        n, tokens, mixed = kept.n.tolist(), batch.tokens.tolist(), []
        for s, (seq, first) in enumerate(zip(batch.seqs, batch.starts, strict=False)):
            text = [
                *self.loop.table.slots[seq.slot].tokens,
                *tokens[first : first + n[s]],
                int(kept.tokens[kept.last[s]]),
            ]
            mixed.append(self.right_for_a_while(text, drafts.tokens[s].tolist()))
        return DraftsAhead(torch.tensor(mixed, device=drafts.tokens.device))

    def mixed(self, ask: DraftRequest, draft: list[int]) -> list[int]:
        return self.right_for_a_while([*ask.slot.tokens, ask.anchor], draft)

    def right_for_a_while(self, text: list[int], draft: list[int]) -> list[int]:
        right = next((s[len(text) :] for s in list(self.scripts.values()) if s[: len(text)] == text), [])
        n = min(self.rng.randint(0, len(draft)), len(right))
        return [*right[:n], *draft[n:]]


class Choices:
    """How close the closest choice of experts is that an engine makes on its way through a text."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.closest = engine, math.inf
        blocks = engine.loop.target.blocks
        feeds = [
            (block.run.__globals__, own, spec)
            for block in blocks
            for (op, spec), own in block.sources.launches.items()
            if op == "moe_route"
        ]
        self.on_gpu, self.has_experts = engine.loop.target.device.type == "cuda", bool(feeds)
        for names, own, spec in () if self.on_gpu else feeds:
            (name,) = (name for name, value in names.items() if value is own)
            names[name] = self.watched(own, spec)

    def watched(self, route: Route, spec: RouteSpec) -> Callable[..., Routes]:
        def run(
            x: Tensor, norm: Tensor, matrix: Tensor, bias: Tensor | None, *named: None, **beside: Tensor
        ) -> Routes:
            logits = (F.rms_norm(x, norm.shape, norm, spec.eps) @ matrix.T)[:, : spec.n_expert]
            scores = (
                (logits if bias is None else logits.sigmoid() + bias).sort(-1, descending=True).values
            )
            self.closest = min(
                self.closest, float((scores[:, spec.n_used - 1] - scores[:, spec.n_used]).min())
            )
            return route(x, norm, matrix, bias, *named, **beside)

        return run

    def along(self, text: Sequence[int]) -> float:
        self.closest = math.inf
        if self.on_gpu or not self.has_experts:
            return 0.0 if self.has_experts else math.inf
        self.engine.run(Request(prompt=tuple(text), params=GREEDY, max_tokens=1, cache_prompt=False))
        return self.closest


@dataclass(frozen=True)
class Wrong:
    """A text that leaves the right one: right up to `until`."""

    until: list[int]
    what: str


def verdict(
    prompt: list[int], tokens: list[int], want: Result, tie: float, banned: frozenset[int]
) -> Wrong | None:
    """The fault of `tokens` after `prompt`; near ties end the comparison. An end token is banned, so the choice is among the others,
    even if it leads."""
    for i, (a, b) in enumerate(zip(tokens, want.tokens, strict=False)):
        if a != b:
            best, second = [p for token, p in want.logprobs[i].top if token not in banned][:2]
            near = slice(max(0, i - 2), i + 3)  # a token may be lost, or there twice
            what = f"after {len(prompt)} tokens, token {i} is {a} and should be {b}, better by {best - second:.2g}"
            what += f" ({tokens[near]}, should be {list(want.tokens[near])})"
            return None if best - second < tie else Wrong([*prompt, *tokens[:i]], what)
    return None


class Beside:
    """Compares texts as they come with another engine's, which also gives the drafts."""

    def __init__(self, cold: Engine, prompter: Prompter) -> None:
        self.cold, self.prompter, self.doubts = cold, prompter, list[Wrong]()
        self.device = cold.loop.target.device.type
        self.want: dict[int, Result] = {}

    def goes_on(self) -> bool:
        return self.device == "cuda" or len(self.doubts) < MOST_DOUBTS

    def ask(self, seed: int, request: Request) -> None:
        want = self.want[seed] = self.cold.run(replace(request, n_draft_max=None))
        self.prompter.scripts[seed] = [*request.prompt, *want.tokens]

    def hear(self, seed: int, request: Request, tokens: list[int]) -> None:
        banned = self.cold.tokenizer.eog
        wrong = verdict(list(request.prompt), tokens, self.want[seed], TIE[self.device], banned)
        if wrong is not None:
            self.doubts.append(replace(wrong, what=f"{wrong.what} (n_draft {request.n_draft_max})"))


class Later:
    """Texts are compared when all have been said, so that no other engine runs beside; drafts are the model's own."""

    def __init__(self) -> None:
        self.said: list[tuple[Request, list[int]]] = []

    def goes_on(self) -> bool:
        return True

    def ask(self, seed: int, request: Request) -> None:
        pass

    def hear(self, seed: int, request: Request, tokens: list[int]) -> None:
        self.said.append((request, tokens))

    def doubts(self, engine: Engine, cold: Engine) -> list[Wrong]:
        """Faults, and each engine's text for the same prompt when it runs once more, alone."""
        found, tie, banned = [], TIE[cold.loop.target.device.type], cold.tokenizer.eog
        for request, tokens in self.said:
            if len(found) >= MOST_DOUBTS:
                break
            prompt, n = list(request.prompt), max(1, len(tokens))
            again = replace(request, max_tokens=n, cache_prompt=False)
            if (wrong := verdict(prompt, tokens, cold.run(again), tie, banned)) is not None:
                i = len(wrong.until) - len(prompt)
                said = [e.run(again).tokens[i : i + 1] for e in (engine, cold)]
                found.append(
                    replace(wrong, what=f"{wrong.what}; asked again {said[0]}, the other {said[1]}")
                )
        return found


def chat(
    engine: Engine,
    seed: int,
    span: Span,
    tally: Tally,
    ahead: bool,
    words: Words,
    checks: Beside | Later,
) -> None:
    """Run one user after another. A fault is in doubt until `judge` has looked at the choices of experts."""
    rng, common = random.Random(seed), words.openings(random.Random(0))
    text: list[int] = []
    while not tally.wrong and checks.goes_on() and span.take():
        if not text or rng.random() > AGAIN or len(text) > words.ctx - 60 - 60 * words.scale:
            text = list(rng.choice(common))
        elif rng.random() < FORKED:
            text = text[: rng.randint(1, len(text))]
        prompt = [*text, *words.some(rng, rng.randint(1, 40 * words.scale))]
        n_draft, leave, stay = rng.randint(1, 3), rng.random() < CANCELLED, rng.randint(0, 12)
        n_draft *= not ahead or int(9 * span.share) % 3 == 0  # no slot drafts for a while
        request = Request(
            prompt=tuple(prompt), params=GREEDY, max_tokens=rng.randint(1, 60), n_draft_max=n_draft
        )
        tokens: list[int] = []
        try:
            checks.ask(seed, request)
            stream = engine.run_stream(
                replace(request, params=replace(GREEDY, logprobs=None if ahead else N_TOP))
            )
            for n_read, event in enumerate(stream):
                if isinstance(event, Delta):
                    tokens += event.tokens
                if leave and n_read >= stay:
                    stream.close()  # type: ignore[attr-defined]
                    break
            tally.add("cancelled" if leave else "finished")
            checks.hear(seed, request, tokens)
            if not leave and len(tokens) != request.max_tokens:
                tally.fail(f"{len(tokens)} tokens, should be {request.max_tokens} (n_draft {n_draft})")
        except PyspecError as e:
            tally.fail(f"{type(e).__name__}: {e}")
        text = [*prompt, *tokens]


def judge(doubts: Sequence[Wrong], choices: Choices, tally: Tally) -> None:
    """A wrong text is excused if experts were chosen on a knife's edge before it parted; one text in fifty comes so close."""
    for wrong in doubts:
        if (gap := choices.along(wrong.until)) < CLOSE:
            tally.add("parted where experts tie")
        else:
            tally.fail(f"{wrong.what}; closest choice of experts {gap:.2g}")


def count_flights(engine: Engine, tally: Tally) -> None:
    """Let rounds be launched ahead on a CPU, too."""
    loop, fly = engine.loop, engine.loop.launch_next
    loop.lookahead.on = True

    def counted(flight: PendingRound) -> PendingRound | None:
        if (found := fly(flight)) is not None:
            tally.add("rounds launched ahead")
            if found.launched.tokens is not None:
                tally.add("of them with drafts")
        return found

    loop.launch_next = counted  # type: ignore[method-assign]


def in_use(engine: Engine) -> int:
    """Bytes that may not grow: of the GPU's allocator where there is one, else of the process."""
    return (
        torch.cuda.memory_reserved() if engine.loop.target.device.type == "cuda" else not_cached(engine)
    )


def soak_chats(
    seconds: float,
    np: int,
    seed: int,
    model: str | Path | None = None,
    ahead: bool = False,
    device: str = "cpu",
    ctx: int = CTX,
    later: bool = False,
    n_request: int = 0,
) -> tuple[bool, str]:
    """Run it; (all well, summary line). Without a model it is a tiny random one with Gated DeltaNet and MTP.

    later: compare texts at the end, by an engine that is loaded then. n_request: this number of requests, without a time limit.
    """
    tally, words = Tally(), Words(demo_lines() if model == "demo" else (), ctx // CTX, ctx)
    with ExitStack() as stack:
        if model is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            model = synth.write("qwen35", folder / "tiny.gguf", quant="f32", tiny=True)
        kv, on_gpu = ("f16", True) if device == "cuda" else ("f32", False)
        settings = {"kv_type": kv, "device": device, "warm_up": on_gpu, "page_size": 16, "ctx": ctx, "queue": 64}  # fmt: skip
        engine = stack.enter_context(
            Engine.load(
                model, "mtp", np=np, n_draft_max=3, n_draft_fixed=True, kv_pool=np * ctx // 2, cache_ram=4 * words.scale,
                ubatch=100 * min(words.scale, 5), checkpoint_every=160 * words.scale, **settings,
            )
        )  # fmt: skip

        def load_cold() -> Engine:
            return stack.enter_context(Engine.load(model, None, np=1, prefix_cache=False, **settings))

        checks: Beside | Later = Later() if later else Beside(load_cold(), Prompter(engine, seed))
        if ahead:
            count_flights(engine, tally)
        span = Span(seconds, n_request)
        args = [(engine, seed * 1000 + i, span, tally, ahead, words, checks) for i in range(N_CHAT)]
        threads = [threading.Thread(target=chat, args=a) for a in args]
        for t in threads:
            t.start()
        span.wait(0.4, threads)
        early = in_use(engine)
        for t in threads:
            t.join()
        late, took, m = in_use(engine), time.monotonic() - span.began, engine.metrics()
        cold = checks.cold if isinstance(checks, Beside) else load_cold()
        doubts = checks.doubts if isinstance(checks, Beside) else checks.doubts(engine, cold)
        kept = ""
        if wait_idle(engine):
            other = Engine.load(model, None, np=1, kv_pool=2 * ctx, checkpoint_every=0, **settings)
            found = audit(engine, stack.enter_context(other))
            doubts, kept = [*doubts, *(Wrong(*wrong) for wrong in found.wrong)], str(found)
        judge(doubts, Choices(cold), tally)
        inspect_idle(engine, tally)
    if seconds >= 60 and (flaw := grown((early, late))):  # before that threads still get their arenas
        tally.fail(flaw)
    counts = ", ".join(f"{n} {what}" for what, n in sorted(tally.counts.items()))
    line = (
        f"{'FAILED' if tally.wrong else 'ok'}: {took:.0f} s, np {np}: {counts}; "
        f"{m.prompt_tokens_cached / max(1, m.prompt_tokens_seen):.0%} of {m.prompt_tokens_seen} prompt tokens cached; "
        f"{m.accepted_tokens / max(1, m.draft_tokens):.0%} of {m.draft_tokens} drafted accepted; "
        f"{m.states} states, {m.pages_cached} of {m.pages_total} pages filed; "
        f"memory {early >> 20} MiB ({(late - early) / (1 << 20):+.1f}); {kept}"
    )
    return not tally.wrong, "\n".join([line, *(f"  {w[:500]}" for w in tally.wrong[:5])])
