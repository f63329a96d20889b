"""The measurement: plain and speculative decoding of the same prompts, alternately, through one engine.

A rate covers only the time in which every stream decodes: the rounds after the last stream's first token, until the first
stream ends. Prompts, the start and the thinning out at the end are left out, for both kinds alike.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pyspec.engine.process.metrics_sum import sums
from pyspec.errors import PyspecError
from pyspec.request import Delta, Done, Event, Failed, Metrics, Request, SamplingParams, Timings

Mode = Literal["plain", "spec"]
Via = Literal["engine", "http"]
MOST_POINTS = 100  # of lengths over rounds
PARTS = ("draft", "verify", "sample", "host")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One turn: `np` concurrent streams, once.

    prompt_rate  prompt tokens per second, all streams, from the first submit to the last first token
    rate         tokens per second of all streams in the steady window; 0 if the window has no round
    window_s     length of the window
    window_n     tokens committed in the window
    total_rate   tokens per second over the whole turn, prompts and tail included
    ms           milliseconds of one round in the window, by part
    round_ms     wall milliseconds of one round in the window
    rounds       rounds in the window
    drafted, accepted  per draft position, whole turn
    n_draft      slot rounds by number of drafts, whole turn
    mean_len     tokens per slot and round, whole turn
    note         reason for a missing rate, or for answers longer than requested
    is_cut       the first stream to end did so by itself
    lengths      mean drafts of a stream over the turn's rounds, of which there are all_rounds; only in process
    via          "engine": in process, timed at the hand-over of tokens; "http": through the server, timed by its clients
    case         other parameters that vary between runs of one report
    hit_rate     of the window's experts in host memory, the share that had a place on the GPU
    """

    np: int
    mode: Mode
    turn: int
    n_prompt: int
    n_predicted: int
    prompt_rate: float
    rate: float
    window_s: float
    window_n: int
    total_rate: float
    ms: dict[str, float]
    round_ms: float
    rounds: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    n_draft: tuple[int, ...]
    mean_len: float
    synthetic: bool = False
    via: Via = "engine"
    case: str = ""
    note: str = ""
    is_cut: bool = False
    lengths: tuple[float, ...] = ()
    all_rounds: int = 0
    hit_rate: float = 0.0

    @property
    def result_text(self) -> str:
        """The result, as the rest of a line after the run's name."""
        way = " through HTTP" if self.via == "http" else ""
        return (
            f"{way}: {f'{self.rate:.1f} tokens/s' if self.rate else 'no rate'}"
            + (f" ({self.note})" if self.note else "")
            + (f", {self.hit_rate:.0%} of experts on the GPU" if self.hit_rate else "")
        )


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The parameters of one turn."""

    mode: Mode
    turn: int
    n_predict: int
    ignore_eos: bool
    temperature: float = 0.0


@dataclass
class StreamRound:
    """One round's tokens of the streams, their verified drafts, and the time of the last token."""

    n: int = 0
    n_draft: int = 0
    ended: float = 0.0
    streams: set[int] = field(default_factory=set)


@dataclass
class Watch:
    """Collects the events of one turn, sorted into rounds.

    A stream has at most one Delta per round, so a second Delta of a stream starts the next round. The window consists of the
    rounds after the one in which the last stream started and before the one in which the first stream ended.
    """

    n_stream: int
    metrics: Callable[[], Metrics]
    began: float = 0.0
    first: float = 0.0  # time of the last stream's first token
    rounds: list[StreamRound] = field(default_factory=lambda: [StreamRound()])
    started: set[int] = field(default_factory=set)
    opened: tuple[int, Metrics] | None = None  # (first round of the window, counters before it)
    closed: tuple[int, Metrics] | None = None  # (round in which a stream ended, counters before it)
    done: list[Done] = field(default_factory=list)
    error: PyspecError | None = None
    over: threading.Event = field(default_factory=threading.Event)
    n_over: int = 0
    n_begun: int = 0  # streams that had a token when the first one ended
    clock: Callable[[], float] = lambda: time.perf_counter()

    def sink(self, stream: int) -> Callable[[Event], None]:
        return lambda event: self._take(stream, event)

    def _take(self, stream: int, event: Event) -> None:
        if isinstance(event, Delta) and event.tokens:
            self._tokens(stream, len(event.tokens), event.n_draft)
        elif isinstance(event, Done | Failed):
            if isinstance(event, Done):
                self.done.append(event)
            else:
                self.error = self.error or event.error
            if self.closed is None:
                self.closed = (len(self.rounds) - 1, self.metrics())
                self.n_begun = len(self.started)
            self.n_over += 1
            if self.n_over == self.n_stream:
                self.over.set()

    def _tokens(self, stream: int, n: int, n_draft: int) -> None:
        if stream in self.rounds[-1].streams:
            self.rounds.append(StreamRound())
            if self.opened is None and len(self.started) == self.n_stream:
                self.opened = len(self.rounds) - 1, self.metrics()
        now = self.rounds[-1]
        now.n, now.ended = now.n + n, self.clock()
        now.n_draft += n_draft
        now.streams.add(stream)
        if stream not in self.started:
            self.started.add(stream)
            self.first = now.ended

    @property
    def window(self) -> tuple[int, float]:
        """(tokens, seconds) of the rounds in which all streams decode; (0, 0) if there are none."""
        if self.opened is None or self.closed is None or self.closed[0] <= self.opened[0]:
            return 0, 0.0
        start, end = self.opened[0], self.closed[0]
        seconds = self.rounds[end - 1].ended - self.rounds[start - 1].ended
        return sum(r.n for r in self.rounds[start:end]), seconds

    @property
    def thinned(self) -> str:
        """The reason why no round had all streams."""
        n = self.done[0].n_predicted if self.done else 0
        begun = f"{self.n_begun} of {self.n_stream} streams had begun"
        return f"{begun} when the first one ended, after {n} tokens"

    @property
    def lengths(self) -> tuple[float, ...]:
        """Mean drafts of a stream per round over the turn, as at most MOST_POINTS averages of equally many rounds."""
        every = -(-len(self.rounds) // MOST_POINTS)
        runs = [self.rounds[i : i + every] for i in range(0, len(self.rounds), every)]
        streams = [max(sum(len(r.streams) for r in run), 1) for run in runs]
        return tuple(sum(r.n_draft for r in run) / n for run, n in zip(runs, streams, strict=True))


Submit = Callable[[Request, Callable[[Event], None]], str]


def measure(
    submit: Submit,
    cancel: Callable[[str], None],
    metrics: Callable[[], Metrics],
    prompts: Sequence[tuple[int, ...]],
    how: Turn,
) -> Run:
    """Run one stream per prompt concurrently and time them. Raises the engine's error if a request fails."""
    watch = Watch(len(prompts), metrics)
    watch.began = time.perf_counter()
    ids: list[str] = []
    try:
        ids += submit_all(submit, prompts, how, watch)
        while not watch.over.wait(0.1):  # in steps, so that Ctrl-C is noticed
            pass
    finally:
        for name in ids:
            cancel(name)
    if watch.error is not None:
        raise watch.error
    run = summarise(watch, how, sum(map(len, prompts)))
    if how.mode == "plain":
        return run
    return replace(run, lengths=watch.lengths, all_rounds=len(watch.rounds))


def submit_all(
    submit: Submit, prompts: Sequence[tuple[int, ...]], how: Turn, watch: Watch
) -> Iterator[str]:
    """Submit a turn's requests one after the other with `watch` as listener; yields their ids."""
    seed, temperature = how.turn + 1, how.temperature
    params = SamplingParams(temperature=temperature, seed=seed, ignore_eos=how.ignore_eos)
    for i, prompt in enumerate(prompts):
        request = Request(
            prompt=prompt,
            params=params,
            max_tokens=how.n_predict,
            cache_prompt=False,
            n_draft_max=0 if how.mode == "plain" else None,
        )
        yield submit(request, watch.sink(i))


def with_rate(measured: Callable[[Turn], Run], how: Turn, most: int) -> Run:
    """A turn that has a rate: repeated with answers twice as long while the first stream ends before the last one starts.

    most  answer tokens for which all streams have room concurrently
    """
    run, asked = measured(how), how
    while not run.rate and not run.is_cut and how.n_predict < most:
        how = replace(how, n_predict=min(2 * how.n_predict, most))
        run, why = measured(how), run.note
        if run.rate:
            return replace(run, note=f"answers of {how.n_predict} tokens: of {asked.n_predict}, {why}")
    if run.rate:
        return run
    advice = (
        "--ignore-eos continues after an end of text"
        if run.is_cut
        else "a larger -c or --kv-pool allows longer answers"
    )
    return replace(run, note=f"{run.note}; {advice}")


def summarise(watch: Watch, how: Turn, n_prompt: int) -> Run:
    """The figures of a finished turn."""
    timings = [d.timings for d in watch.done]
    n_predicted = sum(d.n_predicted for d in watch.done)
    assert watch.closed is not None, "no stream ended"
    n, seconds = watch.window
    after = watch.closed[1]
    before = watch.opened[1] if watch.opened is not None else after
    rounds = after.rounds - before.rounds
    took = {p: getattr(after, f"{p}_ms") - getattr(before, f"{p}_ms") for p in PARTS}
    parts = {p: ms / rounds if rounds > 0 else 0.0 for p, ms in took.items()}
    hits, misses = after.expert_hits - before.expert_hits, after.expert_misses - before.expert_misses
    prompt_s, whole_s = watch.first - watch.began, watch.rounds[-1].ended - watch.began
    return Run(
        np=watch.n_stream,
        mode=how.mode,
        turn=how.turn,
        n_prompt=n_prompt,
        n_predicted=n_predicted,
        prompt_rate=n_prompt / prompt_s if prompt_s > 0 else 0.0,
        rate=n / seconds if seconds > 0 else 0.0,
        window_s=seconds,
        window_n=n,
        total_rate=n_predicted / whole_s if whole_s > 0 else 0.0,
        ms=parts,
        round_ms=1e3 * seconds / rounds if rounds > 0 else 0.0,
        rounds=rounds,
        drafted=sums([t.drafted_per_pos for t in timings]),
        accepted=sums([t.accepted_per_pos for t in timings]),
        n_draft=sums([t.n_draft_used for t in timings]),
        mean_len=_mean_len(timings),
        synthetic=any(t.synthetic for t in timings),
        note="" if seconds > 0 else watch.thinned,
        is_cut=watch.done[0].finish in ("eos", "stop"),
        hit_rate=hits / (hits + misses) if hits + misses else 0.0,
    )


def _mean_len(timings: Sequence[Timings]) -> float:
    rounds = sum(t.n_rounds for t in timings)
    return 1.0 + sum(t.draft_n_accepted for t in timings) / rounds if rounds else 1.0
