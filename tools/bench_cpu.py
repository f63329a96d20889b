"""Time pyspec and llama.cpp on the same cores and file, in alternating turns of one run.

    python tools/bench_cpu.py MODEL.gguf --peer PYTHON                   PYTHON has xllamacpp (llama.cpp as a wheel)
    ... --draft mtp|dflash|FILE                                          pyspec drafts, too; llama.cpp decodes plainly
    ... -t 16 --peer-threads 8 16                                        numbers of threads that llama.cpp runs with
    ... -t 2 --streams 1 8 --prompts 256 512 --turns 3 -n 64

Both run as servers and get the same requests: random tokens, greedy, no end. A row is the best of the turns, in tokens a second by the
client's clock: `decode` of all streams together, `prompt` of one request or of eight at once. llama.cpp runs with each number of threads
up to `-t`, and its best counts. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

PORT = 18300
START_S = 300
PEER = """
import sys, time, xllamacpp
path, n_slot, n_ctx, n_thread, port = sys.argv[1], *map(int, sys.argv[2:])
wanted = xllamacpp.CommonParams()
wanted.model.path, wanted.n_ctx, wanted.n_parallel, wanted.n_gpu_layers = path, n_ctx * n_slot, n_slot, 0
wanted.cpuparams.n_threads = wanted.cpuparams_batch.n_threads = n_thread
wanted.port = port
server = xllamacpp.Server(wanted)
time.sleep(1e6)
"""


@dataclass(frozen=True)
class Side:
    """A running server."""

    name: str
    port: int

    def ask(self, prompt: Sequence[int], n: int) -> int:
        """Tokens of one answer."""
        body = {
            "prompt": list(prompt),
            "n_predict": n,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)["tokens_predicted"]


@dataclass(frozen=True)
class Load:
    """`streams` requests at once, of `prompt` tokens with answers of `n`."""

    kind: str
    streams: int
    prompt: int
    n: int

    def rate(self, side: Side, n_vocab: int, seed: int) -> float:
        """Tokens a second: those of the answers, or of the prompts where answers have one token."""
        draw = random.Random(seed)
        prompts = [
            [draw.randrange(100, n_vocab) for _ in range(self.prompt)] for _ in range(self.streams)
        ]
        began = time.perf_counter()
        with ThreadPoolExecutor(self.streams) as pool:
            made = list(pool.map(lambda p: side.ask(p, self.n), prompts))
        seconds = time.perf_counter() - began
        assert made == [self.n] * self.streams, f"{side.name} answered with {made} tokens"
        return (self.streams * self.prompt if self.n == 1 else sum(made)) / seconds


@contextmanager
def running(name: str, command: list[str], port: int) -> Iterator[Side]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline, began = time.monotonic() + START_S, time.monotonic()
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                    if answer.status == 200:
                        break
            except OSError:
                pass
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{name} does not start: {' '.join(command)}")
            time.sleep(0.05)
        resident = next(
            int(line.split()[1]) >> 10
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
            if line.startswith("VmRSS")
        )
        print(
            f"{name}: ready in {time.monotonic() - began:.1f} s, {resident} MiB (its own process)",
            flush=True,
        )
        yield Side(name, port)
    finally:
        process.terminate()
        process.wait()


def sides_of(options: argparse.Namespace, stack: ExitStack) -> list[Side]:
    n_slot, n_ctx = max(*options.streams, 8), max(options.prompts) + options.n + 64
    own = [sys.executable, "-m", "pyspec", "server", options.model, "-np", str(n_slot), "-c", str(n_ctx)]
    own += ["-t", str(options.threads), "--device", "cpu"]
    ways = {"pyspec": [*own, "--spec-type", "none"]}
    if options.draft:
        chosen = (
            ["--spec-type", options.draft]
            if options.draft in ("mtp", "ngram")
            else ["-md", options.draft]
        )
        ways[f"pyspec, {Path(options.draft).name}"] = [*own, *chosen]
    if options.peer:
        for n in options.peer_threads or range(1, options.threads + 1):
            ways[f"llama.cpp, -t {n}"] = [
                options.peer,
                "-c",
                PEER,
                options.model,
                str(n_slot),
                str(n_ctx),
                str(n),
            ]
    sides = []
    for i, (name, command) in enumerate(ways.items()):
        port = PORT + i
        sides.append(
            stack.enter_context(
                running(name, [*command, *([] if "-c" in command[1:2] else ["--port"]), str(port)], port)
            )
        )
    return sides


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--draft", default="")
    parser.add_argument("--peer", default="", help="a Python that has xllamacpp")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument(
        "--peer-threads", type=int, nargs="+", default=[], help="llama.cpp's; 1 to -t if not given"
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompts", type=int, nargs="+", default=[256, 512])
    parser.add_argument("-n", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=1000, help="random tokens are below this")
    options = parser.parse_args()
    loads = [Load("decode", s, 16, options.n) for s in options.streams]
    loads += [Load("prompt", s, p, 1) for p in options.prompts for s in (1, 8)]
    best: dict[tuple[Load, str], float] = {}
    with ExitStack() as stack:
        sides = sides_of(options, stack)
        for turn in range(options.turns + 1):  # the first one warms up
            for load in loads:
                for side in sides:
                    rate = load.rate(side, options.vocab, 1000 * turn + load.streams)
                    if turn:
                        best[load, side.name] = max(best.get((load, side.name), 0.0), rate)
    names = [side.name for side in sides]
    print("| | " + " | ".join(names) + " | over llama.cpp |\n| --- |" + " ---: |" * (len(names) + 1))
    for load in loads:
        rates = [best[load, name] for name in names]
        peers = [rate for name, rate in zip(names, rates, strict=True) if name.startswith("llama")]
        own = [rate for name, rate in zip(names, rates, strict=True) if not name.startswith("llama")]
        what = f"{load.kind}, {load.streams} stream{'s' * (load.streams > 1)}" + (
            f" of {load.prompt}" if load.n == 1 else ""
        )
        ratio = ", ".join(f"{rate / max(peers):.2f}" for rate in own) if peers else "-"
        print(f"| {what} | " + " | ".join(f"{rate:,.1f}" for rate in rates) + f" | {ratio} |")


if __name__ == "__main__":
    main()
