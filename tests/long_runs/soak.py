"""Hours of traffic in minutes: random requests with random cancels, in-process and over HTTP, on the packaged demo pair.

    python tests/long_runs/soak.py --minutes 30 --np 8 [--isolated]

A third of it are requests with known greedy texts: each has to equal the text of a single slot without a drafter. The rest is of all kinds
(soak_mixed.py). Also checked: no request fails, slots and pages are free at the end, and the engine's process grows by less than 5 %
after the first five minutes, checkpoints included (soak_memory.py: a line a minute). Exit status 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

import httpx
from soak_memory import MIB, SHORT, Watch, accounted, resident
from soak_mixed import Seat, Tally, mixed

from pyspec.engine.api import Engine
from pyspec.errors import PyspecError
from pyspec.request import Delta, Request, SamplingParams

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "server")]

from server_live import serving

N_TEXT = 64  # tokens known of each text
CANCELLED = 0.2  # share of requests
MIXED = 0.67  # share of requests without a known text
WARM_S = 300.0  # of the beginning: caches fill, threads get their arenas
TIMEOUT_S = 600.0
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Known:
    """A prompt with the text that one slot without a drafter gives."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    ended: bool  # by its end token, within N_TEXT


def known_texts(n: int) -> list[Known]:
    """Plain single-slot texts of `n` demo prompts, near ties left out: those may fall either way in another batch."""
    lines = (files("pyspec") / "demo" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["min_logit_margin"] >= 0.1]
    with Engine.load("demo", draft=None, np=1) as plain:
        found = []
        for row in rows[:: max(1, len(rows) // n)][:n]:
            prompt = tuple(row["prompt_ids"])
            r = plain.run(Request(prompt=prompt, params=GREEDY, max_tokens=N_TEXT))
            found.append(Known(prompt, r.tokens, r.text, r.finish == "eos"))
        return found


def random_request(rng: random.Random, known: Known) -> Request:
    """Greedy requests mostly, with all that may change speed but not text; some sampled ones beside them."""
    request = Request(
        prompt=known.prompt,
        params=GREEDY,
        max_tokens=rng.choice((1, 5, 17, N_TEXT)),
        cache_prompt=rng.random() < 0.7,
        n_draft_max=rng.choice((None, None, None, 0, 1, 3)),
    )
    if rng.random() < 0.3:
        params = SamplingParams(
            temperature=rng.uniform(0.2, 1.5),
            top_k=rng.choice((0, 1, 40)),
            repeat_penalty=rng.choice((1.0, 1.2)),
            dry_multiplier=rng.choice((0.0, 0.8)),
            logprobs=rng.choice((None, 0, 3)),
            ignore_eos=rng.random() < 0.3,
        )
        request = replace(request, params=params, stop=rng.choice(((), ("the", "xyz"))))
    return request


def verdict(request: Request, known: Known, text: str, finish: str) -> str | None:
    """The fault of a finished text."""
    if not request.params.greedy:
        return None
    if request.max_tokens >= N_TEXT or (known.ended and request.max_tokens > len(known.tokens)):
        return None if text == known.text else f"{text!r} is not {known.text!r}"
    if finish != "length" or not known.text.startswith(text.rstrip("\ufffd")):
        return f"{text!r} ({finish}) is not the beginning of {known.text!r}"
    return None


def in_process(engine: Engine, rng: random.Random, known: Known, tally: Tally) -> None:
    """One request by the Python interface, left early or read to its end."""
    request, leave = random_request(rng, known), rng.random() < CANCELLED
    stay = rng.randint(0, 12)
    text, tokens, finish = "", [], ""
    stream = engine.run_stream(request)
    for n_read, event in enumerate(stream):
        if leave and n_read >= stay:
            stream.close()  # type: ignore[attr-defined]
            tally.add("cancelled")
            return
        if isinstance(event, Delta):
            text += event.text
            tokens += event.tokens
        else:
            finish = event.finish
    if request.params.greedy and tuple(tokens) != known.tokens[: request.max_tokens]:
        tally.fail(f"tokens {tokens} are not {known.tokens[: request.max_tokens]}")
    if (wrong := verdict(request, known, text, finish)) is not None:
        tally.fail(wrong)
    tally.add("finished")


def over_http(client: httpx.Client, rng: random.Random, known: Known, tally: Tally) -> None:
    """One streamed /completion, disconnected early or read to its end."""
    request, leave = random_request(rng, known), rng.random() < CANCELLED
    p = request.params
    body = {
        "prompt": list(request.prompt),
        "stream": True,
        "n_predict": request.max_tokens,
        "cache_prompt": request.cache_prompt,
        "temperature": p.temperature,
        "top_k": p.top_k,
        "repeat_penalty": p.repeat_penalty,
        "dry_multiplier": p.dry_multiplier,
        "n_probs": p.logprobs or 0,
        "ignore_eos": p.ignore_eos,
        "stop": list(request.stop),
    }
    text, finish, n_read, stay = "", "", 0, rng.randint(0, 8)
    with client.stream("POST", "/completion", json=body) as response:
        if response.status_code != 200:
            tally.fail(f"status {response.status_code}: {response.read()[:200]!r}")
            return
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            n_read += 1
            if leave and n_read > stay:
                tally.add("disconnected")
                return
            event = json.loads(line[6:])
            if "error" in event:
                tally.fail(str(event["error"]))
                return
            text += event["content"]
            if event.get("stop"):
                finish = {"limit": "length"}.get(event["stop_type"], event["stop_type"])
    if not finish:
        tally.fail("a stream ended without its last event")
    elif (wrong := verdict(request, known, text, finish)) is not None:
        tally.fail(wrong)
    tally.add("finished over HTTP")


def not_cached(engine: Engine) -> int:
    """Resident bytes of this process without those of kept states, which have budgets. Nothing is collected or trimmed for it, because
    memory that waits for that is missing to the system."""
    return resident(os.getpid()) - accounted(engine)


def process_of(engine: Engine, isolated: bool) -> int:
    """The number of the process that the engine runs in."""
    if not isolated:
        return os.getpid()
    found = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if b"pyspec.engine.process.engine_main" in _read(path)
        and f"\nPPid:\t{os.getpid()}\n".encode() in _read(path.parent / "status")
    ]
    assert len(found) == 1, f"there are {len(found)} engine processes"
    return found[0]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended
        return b""


class Span:
    """How long traffic goes on: for a time, or for a number of requests, however long a busy machine takes for them."""

    def __init__(self, seconds: float, n_request: int = 0) -> None:
        self.began, self.seconds, self.n_request = time.monotonic(), seconds, n_request
        self._taken, self._lock = 0, threading.Lock()

    def take(self) -> bool:
        """Whether one more request is to be made."""
        with self._lock:
            self._taken += 1
            return self.share < 1.0

    @property
    def share(self) -> float:
        """How much of it is over."""
        if self.n_request:
            return (self._taken - 1) / self.n_request
        return (time.monotonic() - self.began) / self.seconds

    def wait(self, share: float, threads: list[threading.Thread]) -> None:
        """Wait until this share is over, or no thread is at work."""
        while self.share < share and any(t.is_alive() for t in threads):
            time.sleep(0.01)


def traffic(
    engine: Engine, url: str, seed: int, span: Span, known: list[Known], tally: Tally, folder: Path
) -> None:
    """One client after another; odd ones speak HTTP where texts are known."""
    rng = random.Random(seed)
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
        seat = Seat(engine, client, folder, rng, tally)
        while not tally.wrong and span.take():
            if rng.random() < MIXED:
                mixed(seat)
                continue
            pick = rng.choice(known)
            try:
                if seed % 2:
                    over_http(client, rng, pick, tally)
                else:
                    in_process(engine, rng, pick, tally)
            except (PyspecError, httpx.HTTPError) as e:
                tally.fail(f"{type(e).__name__}: {e}")


def wait_idle(engine: Engine) -> bool:
    """False if a slot is still busy long after the last request."""
    deadline = time.monotonic() + 10
    while any(s.is_processing for s in engine.slots()) or engine.metrics().requests_queued:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def inspect_counts(engine: Engine, tally: Tally) -> None:
    """Inspect an engine's own counts after the last request."""
    if not wait_idle(engine):
        tally.fail("a slot is still busy after the last request")
    m = engine.metrics()
    if m.requests_failed or m.guard_trips or m.pages_used or m.restarts or not engine.alive():
        tally.fail(
            f"{m.requests_failed} requests failed, {m.guard_trips} guards tripped, {m.pages_used} pages used, {m.restarts} restarts"
        )


def inspect_idle(engine: Engine, tally: Tally) -> None:
    """Inspect its content: every page is accounted for, and free once the caches are dropped."""
    inspect_counts(engine, tally)
    table, cache = engine.loop.table, engine.loop.cache
    cache.check(now=True)
    for slot in table.slots:
        if slot.reserved or slot.busy:
            tally.fail(f"slot {slot.index} has {slot.reserved} pages reserved")
    table.clear()
    cache.check(now=True)
    if table.n_page_used or table.n_page_cached or len(cache.states):
        tally.fail(
            f"{table.n_page_used} + {table.n_page_cached} pages and {len(cache.states)} states are lost"
        )


def grown(readings: Sequence[int]) -> str:
    """The fault of resident bytes early and late, in a run too short for a reading a minute."""
    early, late = readings
    more = late - early
    return f"memory grew by {more >> 20} MiB from {early >> 20} MiB" if more > SHORT * early else ""


def soak(
    seconds: float,
    np: int,
    seed: int,
    n_prompt: int = 24,
    draft: str = "auto",
    n_request: int = 0,
    isolated: bool = False,
) -> tuple[bool, str]:
    """Run it, for so many requests if that is given; (all well, summary line)."""
    known, tally = known_texts(n_prompt), Tally()
    n_client = np + max(2, np // 2)  # more than fit, so that some wait
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine = stack.enter_context(
            Engine.load("demo", draft, np=np, queue=4 * n_client, isolated=isolated)
        )
        url = stack.enter_context(serving(engine))
        watch = Watch(engine, process_of(engine, isolated), every_s=60.0, warm_s=WARM_S)
        span = Span(seconds, n_request)
        args = [(engine, url, seed * 1000 + i, span, known, tally, folder) for i in range(n_client)]
        threads = [threading.Thread(target=traffic, args=a) for a in args]
        for t in [*threads, watcher := threading.Thread(target=watch.run)]:
            t.start()
        span.wait(0.4, threads)  # threads get their arenas
        early_all = resident(watch.pid)
        early = early_all - accounted(engine)
        for t in threads:
            t.join()
        late_all, took = resident(watch.pid), time.monotonic() - span.began
        late = late_all - accounted(engine)
        watch.stop()
        watcher.join()
        (inspect_counts if isolated else inspect_idle)(engine, tally)
        m = engine.metrics()
    # what checkpoints give back may stay with the C library: the rest seems to grow then, and the process does not
    flaw = grown((early_all, late_all)) and grown((early, late))
    if flaw := watch.flaw() if len(watch.readings) > WARM_S / 60 + 1 else flaw:
        tally.fail(flaw)
    counts = ", ".join(f"{n} {what}" for what, n in sorted(tally.counts.items()))
    accepted = m.accepted_tokens / m.draft_tokens if m.draft_tokens else 0.0
    line = (
        f"{'FAILED' if tally.wrong else 'ok'}: {took:.0f} s, np {np}: {counts}; {m.predicted_tokens} tokens, "
        f"{m.predicted_tokens / took:.0f} tok/s, {accepted:.0%} of {m.draft_tokens} drafted accepted; "
        f"beside checkpoints {late >> 20} MiB ({(late - early) / MIB:+.1f})"
    )
    return not tally.wrong, "\n".join([line, *(f"  {w[:500]}" for w in tally.wrong[:5])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--np", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--draft", default="auto", help="auto (DFlash), mtp or ngram; not of conversations"
    )
    parser.add_argument(
        "--isolated", action="store_true", help="the engine in a process of its own, as a server has it"
    )
    parser.add_argument(
        "--chats", action="store_true", help="conversations over the prefix cache (soak_chats.py)"
    )
    parser.add_argument(
        "--model", default=None, help="of the conversations: any file with an MTP block, or demo"
    )
    parser.add_argument("--device", default="cpu", help="of the conversations")
    parser.add_argument("--ctx", type=int, default=768, help="tokens a conversation may have")
    parser.add_argument(
        "--later", action="store_true", help="compare conversations at the end: one engine at a time"
    )
    parser.add_argument(
        "--ahead",
        action="store_true",
        help="conversations that often do not draft: rounds launched ahead",
    )
    arguments = parser.parse_args()
    if arguments.chats:
        from soak_chats import soak_chats

        a = arguments
        well, line = soak_chats(60 * a.minutes, a.np, a.seed, a.model, a.ahead, a.device, a.ctx, a.later)
    else:
        a = arguments
        well, line = soak(60 * a.minutes, a.np, a.seed, draft=a.draft, isolated=a.isolated)
    print(line)
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
