"""Measure `pyspec server` on this machine as clients see it.

    python tools/bench_http.py MODEL.gguf PART... [--options] -- [options of pyspec server]

    start   seconds until the server is ready, and until the first answer; always printed. PYSPEC_CACHE=/tmp/empty for a bare machine
    first   milliseconds to the first token of a prompt of 300 on an idle server, without and with cache_prompt
    prompts tokens a second of prompts alone (--read 32000 130000)
    joins   streams of requests one after the other, all at once at first (--streams 8 32 --each 1 3): tokens over the wall clock,
            and as a share of as many streams in lockstep without prompts
    beside  eight streams beside the reading of a long prompt (--long 130000), for --seconds at most, as a share of their rate alone
    table   requests as public tables have them (--prompt 8192 --answer 1024, --streams 1 8 16 32 64, --each 1 of each stream): rates by
            their two definitions, times to the first token and of an output token, tokens a round
    agents  so many agents at once (--streams): conversations that grow by tools' results over a common header (--header 4000 --turns 12
            --result 500 --call 120 --pause 0, medians): times to the whole answer

--golden NAME (of tools/golden.toml) with --drafts N has the server simulate the acceptance of a public table.
--peer PATH: a llama-server in place of pyspec's; the options behind -- are its own. --free GIB: another process holds the rest of the GPU's
memory, as if the card were smaller.
Prompts are random ids, and answers end by length. The server must have no other clients meanwhile.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from statistics import fmean, median
from typing import Any

from agent_trace import Agents, quantile, trace
from golden import GOLDEN, flags

REST_S = 0.05  # between connecting and asking: the server is idle by then
LOCKSTEP = 256  # tokens of each stream while the rate without prompts is taken


class Stream:
    """One streamed answer: when each of its tokens came, and its last object."""

    def __init__(
        self, port: int, n_prompt: int, n_predict: int, how: argparse.Namespace, **more: Any
    ) -> None:
        body = {
            "prompt": [random.randrange(3, how.vocab) for _ in range(n_prompt)],
            "n_predict": n_predict,
        }
        body |= {"temperature": 0, "ignore_eos": True, "stream": True, "cache_prompt": False}
        body |= {"return_tokens": True} | more
        self.body = json.dumps(body)
        self.came: list[float] = []
        self.tokens: list[int] = []
        self.ended = 0.0
        self.n_read, self.last = 0, dict[str, Any]()
        self.asked = 0.0
        self._connection = HTTPConnection("127.0.0.1", port, timeout=600)

    def connect(self) -> None:
        self._connection.connect()

    def read(self) -> Stream:
        """Ask, and wait for the end."""
        self.asked = time.perf_counter()
        self._connection.request("POST", "/completion", self.body, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        if answer.status != 200:
            raise HTTPException(f"status {answer.status}: {answer.read(300).decode('utf-8', 'replace')}")
        with suppress(ValueError, AttributeError):  # closed meanwhile
            while line := answer.readline():
                if line.startswith(b"data: {"):
                    self._take(time.perf_counter(), json.loads(line[6:]))
        self.ended = time.perf_counter()
        self._connection.close()
        return self

    def _take(self, now: float, value: dict[str, Any]) -> None:
        self.tokens += value.get("tokens", ())
        self.came += [now] * len(value.get("tokens", ()))
        self.n_read = value.get("prompt_progress", {}).get("processed", self.n_read)
        self.last = value

    @property
    def first_ms(self) -> float:
        return 1e3 * (self.came[0] - self.asked)

    @property
    def token_ms(self) -> float:
        """Milliseconds of an output token behind the first one."""
        return 1e3 * (self.came[-1] - self.came[0]) / max(1, len(self.came) - 1)

    @property
    def counts(self) -> dict[str, Any]:
        """The engine's timings of this request."""
        return dict(self.last.get("timings", {}))

    def close(self) -> None:
        """Leave, although more is to come."""
        if (sock := self._connection.sock) is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def side_by_side(works: Sequence[Callable[[], Any]]) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    return threads


def first(port: int, how: argparse.Namespace) -> None:
    for cached in (False, True):
        found = []
        for _ in range(how.requests + 2):
            stream = Stream(port, how.tokens, 2, how, cache_prompt=cached)
            stream.connect()
            time.sleep(REST_S)
            found.append(stream.read())
        took = [s.first_ms for s in found[2:]]
        inside = median(s.last["timings"]["prompt_ms"] for s in found[2:])
        span = f"{min(took):.1f}..{max(took):.1f}"
        print(
            f"{how.tokens} tokens, cache_prompt {cached}: first token {median(took):.1f} ms ({span}), engine {inside:.1f}"
        )


def prompts(port: int, how: argparse.Namespace) -> None:
    for n in how.read:
        took = [Stream(port, n, 1, how).read().first_ms for _ in range(2)]
        print(
            f"prompt of {n}: {', '.join(f'{1e3 * n / ms:.0f}' for ms in took)} tokens/s, the first and the second one"
        )


def lockstep(port: int, n_stream: int, how: argparse.Namespace) -> float:
    """Tokens a second while all of so many streams decode."""
    streams = [Stream(port, 20, LOCKSTEP, how) for _ in range(n_stream)]
    for thread in side_by_side([s.read for s in streams]):
        thread.join()
    begin, end = max(s.came[8] for s in streams), min(s.came[-1] for s in streams)
    return sum(begin <= t < end for s in streams for t in s.came) / (end - begin)


def joins(port: int, how: argparse.Namespace) -> None:
    for n_stream in how.streams:
        rate = lockstep(port, n_stream, how)
        for n_each in how.each:
            chains = [
                [Stream(port, how.tokens, how.predict, how) for _ in range(n_each)]
                for _ in range(n_stream)
            ]
            began = time.perf_counter()
            for thread in side_by_side([lambda c=chain: [s.read() for s in c] for chain in chains]):
                thread.join()
            took = time.perf_counter() - began
            made = n_stream * n_each * how.predict / took
            waits = median(s.first_ms for chain in chains for s in chain)
            print(
                f"{n_stream} streams, {n_each} requests each of {how.tokens} + {how.predict}: {made:.1f} tokens/s over {took:.2f} s, "
                f"lockstep {rate:.1f}: {made / rate:.3f}; first tokens {waits:.0f} ms in the median"
            )


def beside(port: int, how: argparse.Namespace) -> None:
    streams = [Stream(port, 20, 4_000, how) for _ in range(8)]
    reading = Stream(port, how.long, 1, how, return_progress=True)
    side_by_side([s.read for s in streams])

    def rate(seconds: float, until: threading.Thread | None = None) -> tuple[float, float]:
        """(tokens a second, seconds), for so long or until a thread ends."""
        began = time.perf_counter()
        if until is None:
            time.sleep(seconds)
        else:
            until.join(seconds)
        end = time.perf_counter()
        return sum(began <= t < end for s in streams for t in s.came) / (end - began), end - began

    time.sleep(1.5)
    alone, _ = rate(2.0)
    (thread,) = side_by_side([reading.read])
    during, took = rate(how.seconds, thread)
    print(
        f"8 streams {alone:.0f} tokens/s alone, {during:.0f} ({during / alone:.3f}) beside a prompt of {how.long}, "
        f"of which {reading.n_read if thread.is_alive() else how.long} tokens are read in {took:.2f} s"
    )
    for stream in (*streams, reading):
        stream.close()


def table(port: int, how: argparse.Namespace) -> None:
    """Public tables give streams / time of an output token (SGLang), or all tokens over the wall clock, prompts included ("e2e")."""
    print(
        f"requests of {how.prompt} + {how.answer} tokens\n\n"
        "| streams | streams / TPOT | e2e tokens/s | TPOT ms | first token s, P50 | P90 | tokens a round |\n"
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    )
    for n_stream in how.streams:
        chains = [
            [Stream(port, how.prompt, how.answer, how) for _ in range(how.each[0])]
            for _ in range(n_stream)
        ]
        began = time.perf_counter()
        for thread in side_by_side([lambda c=chain: [s.read() for s in c] for chain in chains]):
            thread.join()
        took = time.perf_counter() - began
        streams = [s for chain in chains for s in chain]
        token_ms = fmean(s.token_ms for s in streams)
        firsts = [s.first_ms / 1e3 for s in streams]
        made = sum(len(s.tokens) for s in streams)
        print(
            f"| {n_stream} | {1e3 * n_stream / token_ms:.1f} | {made / took:.1f} | {token_ms:.2f} "
            f"| {quantile(firsts, 0.5):.3f} | {quantile(firsts, 0.9):.3f} | {_tokens_a_round(streams):.2f} |",
            flush=True,
        )


def _tokens_a_round(streams: Sequence[Stream]) -> float:
    """Of rounds that decode: each yields the target's own token and the drafts that it kept."""
    n_round = sum(sum(s.counts.get("n_draft_used", ())) for s in streams)
    n_kept = sum(s.counts.get("draft_n_accepted", 0) for s in streams)
    return 1 + n_kept / n_round if n_round else 1.0


def agents(port: int, how: argparse.Namespace) -> None:
    kind = Agents(
        n_header=how.header,
        n_turn=how.turns,
        new=how.result,
        answer=how.call,
        pause_s=how.pause,
        n_ctx=how.agent_ctx,
    )
    print(
        f"agents: header of {how.header}, {how.turns} turns of about {how.result} + {how.call} tokens\n\n"
        "| agents | answers | time to answer s, P50 | P90 | first token s, P50 | P90 "
        "| tokens/s of an answer, slowest tenth | e2e tokens/s | prompts from the cache | tokens a round |\n"
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    )
    header = [random.randrange(3, how.vocab) for _ in range(how.header)]
    for n_agent in how.streams:
        found: list[Stream] = []
        began = time.perf_counter()
        play = partial(_be_agent, port, how, kind, header, found)
        for thread in side_by_side([partial(play, i) for i in range(n_agent)]):
            thread.join()
        took = time.perf_counter() - began
        waits = [s.ended - s.asked for s in found]
        firsts = [s.first_ms / 1e3 for s in found]
        paces = [len(s.tokens) / (s.ended - s.asked) for s in found]
        n_cached = sum(s.counts["cache_n"] for s in found)
        n_prompt = n_cached + sum(s.counts["prompt_n"] for s in found)
        print(
            f"| {n_agent} | {len(found)} | {quantile(waits, 0.5):.3f} | {quantile(waits, 0.9):.3f} "
            f"| {quantile(firsts, 0.5):.3f} | {quantile(firsts, 0.9):.3f} | {quantile(paces, 0.1):.1f} "
            f"| {sum(len(s.tokens) for s in found) / took:.1f} | {n_cached / max(1, n_prompt):.3f} "
            f"| {_tokens_a_round(found):.2f} |",
            flush=True,
        )


def _be_agent(
    port: int,
    how: argparse.Namespace,
    kind: Agents,
    header: Sequence[int],
    found: list[Stream],
    seed: int,
) -> None:
    """Each prompt is the one before, its answer, and what is new."""
    draw, prompt = random.Random(seed), list(header)
    for step in trace(kind, seed):
        prompt += [draw.randrange(3, how.vocab) for _ in range(step.n_new)]
        time.sleep(step.pause_s)
        stream = Stream(port, 0, step.n_answer, how, prompt=prompt, cache_prompt=True).read()
        found.append(stream)
        prompt += stream.tokens


PARTS: dict[str, Callable[[int, argparse.Namespace], None]] = {
    "first": first,
    "prompts": prompts,
    "joins": joins,
    "beside": beside,
    "table": table,
    "agents": agents,
}


def ready(port: int) -> bool:
    try:
        connection = HTTPConnection("127.0.0.1", port, timeout=2)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False


def golden_flags(how: argparse.Namespace) -> list[str]:
    """Flags of the server that simulate a public table's acceptance."""
    if not how.golden:
        return []
    print(f"acceptance of {GOLDEN[how.golden].of} ({GOLDEN[how.golden].source})")
    return flags(how.golden, how.drafts)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def measure(how: argparse.Namespace, more: Sequence[str]) -> None:
    how.port = how.port or free_port()
    program = [how.peer] if how.peer else [sys.executable, "-m", "pyspec", "server"]
    command = [*program, "-m", str(how.model), "--port", str(how.port), *golden_flags(how), *more]
    with (
        held(how.free) if how.free else nullcontext(),
        open(how.log, "w") if how.log else tempfile.NamedTemporaryFile("w") as log,
    ):
        began = time.perf_counter()
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        measure_server(server, began, log.name, how)


HOLDS = (
    "import sys, torch; free = torch.cuda.mem_get_info()[0]; "
    "held = torch.empty(free - int(float(sys.argv[1]) * 2**30), dtype=torch.uint8, device='cuda'); "
    "print(f'free: {torch.cuda.mem_get_info()[0] / 2**30:.2f} GiB', flush=True); sys.stdin.read()"
)


@contextmanager
def held(free: float) -> Iterator[None]:
    """A process holds all but so many GiB of the GPU's memory."""
    command = [sys.executable, "-c", HOLDS, str(free)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            print(process.stdout.readline().strip(), flush=True)
            yield
        finally:
            process.kill()


def measure_server(
    server: subprocess.Popen[bytes], began: float, log: str, how: argparse.Namespace
) -> None:
    try:
        while not ready(how.port):
            if server.poll() is not None or time.perf_counter() - began > 300:
                said = Path(log).read_text(errors="replace").splitlines()[-5:]
                raise SystemExit("\n".join(["the server does not come up:", *said]))
            time.sleep(0.1)
        at = time.perf_counter() - began
        Stream(how.port, how.tokens, 1, how).read()
        print(
            f"ready after {at:.1f} s, first answer after {time.perf_counter() - began:.1f} s", flush=True
        )
        for part in how.parts:
            if part != "start":
                PARTS[part](how.port, how)
                sys.stdout.flush()
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("parts", nargs="+", choices=["start", *PARTS])
    parser.add_argument("--tokens", type=int, default=300, help="of a prompt")
    parser.add_argument("--predict", type=int, default=192, help="tokens of an answer, of joins")
    parser.add_argument("--requests", type=int, default=10, help="that first tokens are measured with")
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--each", type=int, nargs="+", default=[1, 3], help="requests of each stream")
    parser.add_argument("--read", type=int, nargs="+", default=[32_000, 130_000])
    parser.add_argument("--long", type=int, default=130_000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--prompt", type=int, default=8192, help="tokens, of table")
    parser.add_argument("--answer", type=int, default=1024, help="tokens, of table")
    parser.add_argument("--header", type=int, default=4000, help="tokens that all agents share")
    parser.add_argument("--turns", type=int, default=12, help="of each agent")
    parser.add_argument("--result", type=int, default=500, help="new tokens before an answer, median")
    parser.add_argument("--call", type=int, default=120, help="tokens of an agent's answer, median")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of a tool's work, median")
    parser.add_argument("--agent-ctx", type=int, default=32_768, help="most tokens of a conversation")
    parser.add_argument("--golden", default="", choices=["", *GOLDEN], metavar="NAME")
    parser.add_argument("--drafts", type=int, default=0, help="drafted tokens, with --golden")
    parser.add_argument("--vocab", type=int, default=30_000, help="ids of prompts are below this")
    parser.add_argument("--peer", default="", help="llama-server in place of pyspec's")
    parser.add_argument("--free", type=float, default=0.0, help="GiB of the GPU's memory; 0: all")
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--log", default="", help="file for what the server says")
    return parser


def main() -> None:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    how = parser().parse_args(sys.argv[1:at])
    random.seed(1)
    measure(how, sys.argv[at + 1 :])


if __name__ == "__main__":
    main()
