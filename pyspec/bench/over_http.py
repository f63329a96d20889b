"""The same turn through HTTP: sent and timed by a separate process, evaluated by the same rule.

The engine's milliseconds by part are sampled meanwhile and interpolated to the window's ends.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from bisect import bisect
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any

from pyspec.bench.measure import Run, Turn, Watch, summarise
from pyspec.engine.children import child_environment
from pyspec.errors import PyspecError
from pyspec.request import Delta, Done, Finish, Metrics, Timings

SAMPLE_S = 0.05  # between samples of the engine's counters; each takes the GIL for microseconds
COUNTED = ("rounds", "draft_ms", "verify_ms", "sample_ms", "host_ms")


class Clients:
    """The child process that plays all clients of a server on this machine. Use as a context manager."""

    def __init__(self, port: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pyspec.bench.client", str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(),
            start_new_session=True,  # the parent handles Ctrl-C
        )
        self._pool = ThreadPoolExecutor(1, "pyspec-bench")

    def start(self, bodies: Sequence[dict[str, Any]]) -> Future[dict[str, Any]]:
        """Send one turn's requests; the future holds the client's answer."""
        return self._pool.submit(self._exchange, json.dumps(bodies).encode() + b"\n")

    def _exchange(self, line: bytes) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(line)
            stdin.flush()
            answer = stdout.readline()
        except OSError as e:
            raise PyspecError(f"the benchmark's client cannot be reached: {e}") from e
        if not answer:
            raise PyspecError("the benchmark's client ended; its messages are above")
        value: dict[str, Any] = json.loads(answer)
        return value

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._pool.shutdown()  # its thread now reads the end of the pipe
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._process.wait()


@dataclass
class Samples:
    """Counters of the engine over time, and their values at any moment between two samples."""

    metrics: Callable[[], Metrics]
    times: list[float] = field(default_factory=list)
    values: list[Metrics] = field(default_factory=list)

    def take(self) -> None:
        self.times.append(time.perf_counter())
        self.values.append(self.metrics())

    def at(self, now: float) -> Metrics:
        """The counters interpolated between the two samples around `now`."""
        i = min(max(bisect(self.times, now), 1), len(self.times) - 1)
        (t0, t1), (a, b) = self.times[i - 1 : i + 1], self.values[i - 1 : i + 1]
        share = min(max((now - t0) / (t1 - t0), 0.0), 1.0) if t1 > t0 else 1.0
        ends = [(name, getattr(a, name), getattr(b, name)) for name in COUNTED]
        between = {name: first + share * (last - first) for name, first, last in ends}
        return replace(b, **{**between, "rounds": round(between["rounds"])})


def body_of(prompt: Sequence[int], how: Turn) -> dict[str, Any]:
    """The streaming request equivalent to the one that `measure` sends to the engine."""
    body: dict[str, Any] = {
        "prompt": list(prompt),
        "n_predict": how.n_predict,
        "temperature": how.temperature,
        "seed": how.turn + 1,
        "ignore_eos": how.ignore_eos,
        "cache_prompt": False,
        "stream": True,
    }
    return body | {"speculative": False} if how.mode == "plain" else body


def measure_http(
    clients: Clients,
    metrics: Callable[[], Metrics],
    prompts: Sequence[tuple[int, ...]],
    how: Turn,
) -> Run:
    """Run one stream per prompt concurrently through the server and time them in the clients."""
    samples = Samples(metrics)
    samples.take()
    answer = clients.start([body_of(p, how) for p in prompts])
    while not answer.done():
        with contextlib.suppress(TimeoutError):
            answer.exception(SAMPLE_S)
        samples.take()
    watch = replay(answer.result(), samples)
    if watch.error is not None:
        raise watch.error
    return replace(summarise(watch, how, sum(map(len, prompts))), via="http")


def replay(answer: dict[str, Any], samples: Samples) -> Watch:
    """The clients' events, evaluated as if the engine had sent them at these times."""
    now = [answer["began"]]
    streams = answer["streams"]
    watch = Watch(len(streams), lambda: samples.at(now[0]), began=answer["began"], clock=lambda: now[0])
    sinks = [watch.sink(i) for i in range(len(streams))]
    came = chain.from_iterable(((t, i, n) for t, n in s["events"]) for i, s in enumerate(streams))
    ended = ((s["ended"], i, 0) for i, s in enumerate(streams))
    for t, i, n in sorted([*came, *ended], key=lambda e: (e[0], e[2] == 0)):
        now[0] = t
        if n:
            sinks[i](Delta("", (0,) * n, ""))
        elif "error" in streams[i]["last"]:
            why = streams[i]["last"]["error"]["message"]
            watch.error = watch.error or PyspecError(f"stream {i}: {why}")
            sinks[i](_done({}))
        else:
            sinks[i](_done(streams[i]["last"]))
    return watch


def _done(final: dict[str, Any]) -> Done:
    """The end of a request from the final object of `/completion`."""
    given = final.get("timings", {})
    known: dict[str, Any] = {}
    for name in (f.name for f in fields(Timings) if f.name in given):
        known[name] = tuple(given[name]) if isinstance(given[name], list) else given[name]
    timings = Timings(**known)
    timings = replace(timings, n_rounds=sum(timings.n_draft_used))
    finish: Finish = {"eos": "eos", "word": "stop"}.get(final.get("stop_type", ""), "length")  # type: ignore[assignment]
    n_prompt, n_predicted = final.get("tokens_evaluated", 0), final.get("tokens_predicted", 0)
    return Done("", finish, n_prompt, n_predicted, timings)
