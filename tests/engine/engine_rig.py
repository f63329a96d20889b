"""A loop without a thread: submit requests, step by hand, look at everything in between."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import torch
from draft_fakes import N_VOCAB, FakeTarget
from torch import Tensor

from pyspec.config import EngineSettings
from pyspec.constrain.constraint import Constraint
from pyspec.constrain.grammar import compile_text
from pyspec.constrain.phrases import Phrasebooks
from pyspec.constrain.trie import TokenTrie
from pyspec.device.worker import Worker
from pyspec.draft.chain import Chain
from pyspec.draft.dflash import DFlash
from pyspec.draft.drafter import Drafter
from pyspec.engine.api import Engine
from pyspec.engine.load.load import Loaded, load
from pyspec.engine.loop.disk_tier import DiskTier
from pyspec.engine.loop.job import Job
from pyspec.engine.loop.loop import Loop
from pyspec.engine.loop.pending_round import PendingRound
from pyspec.engine.loop.round import RowLimits
from pyspec.engine.policy.controller import Controller
from pyspec.errors import PyspecError
from pyspec.gguf import open_gguf
from pyspec.models.target import Out
from pyspec.request import (
    Delta,
    Done,
    EngineInfo,
    Event,
    Failed,
    Request,
    SamplingParams,
    Started,
    Timings,
)
from pyspec.sample.budget import BudgetRule
from pyspec.sample.sampler import SlotSampler
from pyspec.slots.batch import Batch
from pyspec.slots.cache import PrefixCache
from pyspec.slots.states import StateStore
from pyspec.slots.table import SlotTable
from pyspec.text.stream import TextStream
from pyspec.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
DEMO = ROOT / "pyspec" / "demo" / "pyspec-demo.gguf"
DEMO_DRAFT = ROOT / "pyspec" / "demo" / "pyspec-demo-dflash.gguf"
DEVICE = os.environ.get("PYSPEC_TEST_DEVICE", "cpu")
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass
class Heard:
    """The events of one request."""

    request: Request
    job: Job
    events: list[Event] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [t for e in self.events if isinstance(e, Delta) for t in e.tokens]

    @property
    def text(self) -> str:
        return "".join(e.text for e in self.events if isinstance(e, Delta))

    @property
    def over(self) -> bool:
        return isinstance(self.events[-1], Done | Failed) if self.events else False

    @property
    def finish(self) -> str:
        assert isinstance(self.events[-1], Done), f"it did not end well: {self.events[-1]}"
        return self.events[-1].finish

    @property
    def done(self) -> Done:
        last = self.events[-1]
        assert isinstance(last, Done)
        return last

    @property
    def error(self) -> PyspecError | None:
        last = self.events[-1]
        return last.error if isinstance(last, Failed) else None

    @property
    def slot(self) -> int:
        return next(e.slot for e in self.events if isinstance(e, Started))

    @property
    def timings(self) -> Timings:
        return self.done.timings


_ON_RIG: list[Callable[[Rig], None]] = []


@contextmanager
def every_rig(do: Callable[[Rig], None]) -> Iterator[None]:
    """Call `do` with each rig that is made meanwhile, also in other tests' functions."""
    _ON_RIG.append(do)
    try:
        yield
    finally:
        _ON_RIG.remove(do)


class Rig:
    """A loaded model with its loop."""

    def __init__(self, loaded: Loaded) -> None:
        self.loop, self.info, self.tokenizer = loaded.loop, loaded.info, loaded.tokenizer
        self._ids = itertools.count()
        self.trie, self.books = TokenTrie(self.tokenizer, self.info.n_vocab), Phrasebooks()
        for do in _ON_RIG:
            do(self)

    def use(self, drafter: Drafter) -> Rig:
        """Let `drafter` draft instead; the rig was made with room for its drafts."""
        self.loop.worker.use(drafter)
        return self

    def call_by_call(self) -> Rig:
        """Record no forward, so that every forward calls functions that a test has replaced."""
        self.loop.worker.arena = None
        drafter = self.loop.drafter
        if isinstance(drafter, Chain):
            drafter.arenas = [None] * len(drafter.arenas)
        elif isinstance(drafter, DFlash):
            drafter.arena = None
        return self

    def run_ahead(self, *, defers: bool = False) -> None:
        """Launch rounds before the last one is read, on a CPU, too. defers: also put off counts and events. A GPU whose forwards have no graphs
        runs references, which read lengths on the host: there rounds are never ahead."""
        worker = self.loop.worker
        self.loop.lookahead.on = worker.arena is not None or worker.device.type == "cpu"
        self.loop.committer.defers = self.loop.committer.defers or defers

    def overwrite_results(self) -> None:
        """Have each forward write its results over those of the last one of its shape, as graphs do (on a GPU these do it themselves)."""
        worker = self.loop.worker
        if worker.device.type == "cuda":
            return
        worker.run = overwriting(worker.run)  # type: ignore[method-assign]
        worker.use(worker.drafter)

    def watch_launches(self, found: list[PendingRound]) -> None:
        """Add each round that is launched ahead."""
        launch = self.loop.launch_next

        def watch(pending: PendingRound) -> PendingRound | None:
            ahead = launch(pending)
            found.extend([ahead] if ahead is not None else [])
            return ahead

        self.loop.launch_next = watch  # type: ignore[method-assign]

    def watch_reads(self, found: list[bool]) -> None:
        """Add, for each round that is read, whether the next one was launched."""
        read = self.loop.read

        def watch(pending: PendingRound, ahead: PendingRound | None) -> None:
            found.append(ahead is not None)
            read(pending, ahead)

        self.loop.read = watch  # type: ignore[method-assign]

    def submit(
        self, prompt: Sequence[int], n: int = 32, params: SamplingParams = GREEDY, **request: object
    ) -> Heard:
        """`eog`: tokens that end the request, in place of the vocabulary's."""
        eog: frozenset[int] = request.pop("eog", self.tokenizer.eog)  # type: ignore[assignment]
        r = Request(prompt=tuple(prompt), params=params, max_tokens=n)
        r = replace(r, **request)  # type: ignore[arg-type]
        info = self.info
        most = info.n_ctx if n < 0 else min(info.n_ctx, len(prompt) + n)
        events: list[Event] = []
        budget = r.think_budget and BudgetRule(r.think_budget, self.tokenizer.token_bytes)
        sampler = SlotSampler(params, info.n_vocab, eog, r.prompt, budget=budget)
        sampler.races = info.draft_sampling != "argmax"
        job = Job(
            id=f"t{next(self._ids)}",
            request=r,
            sink=events.append,
            stream=TextStream(self.tokenizer, r.stop, shown=r.shown),
            sampler=sampler,
            eog=eog,
            n_ctx=info.n_ctx,
            n_rows=most + info.n_overhang,
        )
        if r.grammar is not None:
            source = compile_text(r.grammar)
            constraint = Constraint(self.trie, replace(r.grammar, kind="compiled", source=source))
            job.constrain(constraint)
            constraint.book = self.books.of(r.client, source)
        self.loop.submit(job)
        return Heard(r, job, events)

    def steps(self, n: int) -> None:
        """So many rounds."""
        for _ in range(n):
            self.loop.step()

    def run(self, limit: int = 3000) -> None:
        """Step until nothing is left, checking the pages after every round."""
        for _ in range(limit):
            if self.loop.is_idle:
                return
            self.loop.step()
            self.loop.cache.check(now=True)
        raise AssertionError(f"still busy after {limit} rounds")

    def filed(self, tokens: Sequence[int]) -> list[int]:
        """Rows of the KV pools in which the prefix cache has the beginning of these tokens."""
        table = self.loop.table
        nodes, n = table.tree.path(tokens)
        pages = [node.page for node in nodes]
        return [pages[i // table.page_size] * table.page_size + i % table.page_size for i in range(n)]

    def generate(
        self, prompt: Sequence[int], n: int = 32, params: SamplingParams = GREEDY, **request: object
    ) -> Heard:
        heard = self.submit(prompt, n, params, **request)
        self.run()
        return heard

    def all(
        self,
        prompts: Iterable[Sequence[int]],
        n: int = 32,
        params: SamplingParams = GREEDY,
        **request: object,
    ) -> list[Heard]:
        """Requests side by side, to their ends."""
        heard = [self.submit(prompt, n, params, **request) for prompt in prompts]
        self.run()
        return heard

    def strike(self, how: Callable[[Batch, Callable[[], Out]], Out | None]) -> None:
        """Call `how(batch, forward)` in place of each of the target's forwards, until it once raises or returns a result of its own."""
        self.call_by_call()
        target, run = self.loop.target, self.loop.target.run

        def struck(batch: Batch, taps: Sequence[int] = ()) -> Out:
            target.run = run  # type: ignore[method-assign]
            out = how(batch, partial(run, batch, taps))
            if out is not None:
                return out
            target.run = struck  # type: ignore[method-assign]
            return run(batch, taps)

        target.run = struck  # type: ignore[method-assign]


def overwriting(run: Callable[[Batch], Out]) -> Callable[[Batch], Out]:
    """A forward whose results stand where the last ones of their shape stood."""
    places: dict[tuple[int, ...], list[Tensor]] = {}

    def forward(batch: Batch) -> Out:
        out = run(batch)
        found = [t for t in (out.logits, out.hidden, out.taps) if t is not None]
        here = places.setdefault(
            tuple(n for t in found for n in t.shape), [torch.empty(t.shape) for t in found]
        )
        for place, t in zip(here, found, strict=True):
            place.copy_(t)
        return Out(here[0], here[1], here[2] if len(here) > 2 else None)

    return forward


def rig(path: Path, **settings: object) -> Rig:
    """Load a model, with f32 caches and without warm-up, so that a text depends on the weights only. PYSPEC_TEST_DEVICE=cuda: on a GPU."""
    values: dict[str, object] = {"np": 1, "ctx": 256, "kv_type": "f32", "warm_up": False, "device": DEVICE}  # fmt: skip
    return Rig(load(path, EngineSettings(**(values | settings))))  # type: ignore[arg-type]


def beyond(path: Path) -> dict[str, object]:
    """Settings that allow contexts beyond the trained length, with the same text: the file's own base of rope as a flag."""
    with open_gguf(path) as file:
        return {"rope_freq_base": file.hparams.number("rope.freq_base")}


def plain_rig(path: Path, **settings: object) -> Rig:
    """One slot, no drafter: the reference of every text."""
    return rig(path, spec_type="none", **settings)


def rig_for(path: Path, drafter: Drafter, **settings: object) -> Rig:
    """A rig whose drafter is `drafter`; planned as for n-grams, which need no file, with room for its drafts."""
    n = drafter.plan.n_draft
    return rig(path, **({"spec_type": "ngram", "n_draft_max": n, "n_draft_fixed": True} | settings)).use(
        drafter
    )


def fake_rig(
    np: int = 1,
    drafter: Drafter | None = None,
    *,
    ctx: int = 256,
    page_size: int = 16,
    n_page: int = 0,
    ubatch: int = 512,
) -> Rig:
    """A rig over a FakeTarget."""
    extra = 9
    table = SlotTable(np, n_page or -(-(ctx + extra) // page_size) * np, page_size)
    target = FakeTarget(table)
    n_draft = drafter.plan.n_draft if drafter is not None else 0
    cache = PrefixCache(table, target.memory, StateStore(1 << 62, 0, 1 << 62))
    worker = Worker(target, target.memory, table, drafter, None)
    loop = Loop(worker, Controller(np, n_draft, fixed=True), cache, RowLimits(ubatch, ubatch), 64)
    info = EngineInfo(
        model_name="fake", model_path="", arch="fake", n_vocab=N_VOCAB, n_ctx=ctx, n_ctx_train=ctx, n_slot=np, n_embd=8,
        n_params=0, n_bytes=0, file_type="", device="cpu", drafter="none", n_overhang=extra,
    )  # fmt: skip
    return Rig(Loaded(loop, fixture_tokenizer(), None, info))


@cache
def fixture_tokenizer() -> Tokenizer:
    """300 tokens: bytes, merges, fillers and specials."""
    return Tokenizer.from_metadata(open_gguf(FIXTURES / "qwen35.gguf").metadata)


def settled(e: Engine) -> None:
    """All texts that requests have left are written, on all ranks."""
    tier: DiskTier = e.loop.disk
    done = threading.Event()
    while tier._wants or tier._copying is not None or tier._in_flight or not done.is_set():
        done.clear()
        tier._tasks.put(done.set)
        assert done.wait(60)
