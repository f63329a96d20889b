"""Kills, stops and poisons the engine process of a server under streams, and holds every text against an undisturbed run.

`python tests/long_runs/chaos.py MODEL --trials kill stop abort endless illegal kernel -- -md DRAFTER -np 8 -c 4096`
Arguments behind `--` go to `pyspec server`. Any model file works, on CPUs and GPUs. Exit status 1 if anything was lost.

kill, stop       SIGKILL, SIGSTOP
abort, endless   the process aborts, or a round never ends
illegal, kernel  an illegal access, and a kernel that never ends, on the GPU
poison           a request that aborts the engine whenever it has generated some tokens: it alone fails
broken:MODULE    launches of this module fail, e.g. broken:pyspec.cuda.ops.best.cuda: the module is found and left out
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from served_command import Served

HERE = Path(__file__).resolve().parent
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
PLANTS = ("abort", "endless", "illegal", "kernel")
PROMPTS = (
    "Count from 1 to 40.", "Write a short story about a dog.", "List the days of the week, twice.", "Explain rain.",
    "Repeat after me: one two three four five.", "Name ten animals.", "What is the capital of France?", "Tell me a joke.",
)  # fmt: skip


@dataclass
class Stream:
    """One answer as it comes."""

    number: int
    body: dict[str, object]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    error: str = ""
    gap: float = 0.0  # the longest silence between two pieces
    final: dict[str, object] = field(default_factory=dict)

    def read(self, port: int) -> None:
        """Run to the end and keep the faults."""
        connection = HTTPConnection("127.0.0.1", port, timeout=900)
        try:
            connection.request(
                "POST", "/completion", json.dumps(self.body), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            if answer.status != 200:
                raise OSError(f"status {answer.status}: {answer.read(300)!r}")
            last = 0.0
            for line in answer:
                if line.startswith(b"data: "):
                    now = time.perf_counter()
                    self.gap, last = max(self.gap, now - last if last else 0.0), now
                    self.take(json.loads(line[6:]))
            if not self.error and not self.final:
                self.error = "the stream ended without a last piece"
        except (OSError, ValueError) as e:
            self.error = f"{type(e).__name__}: {e}"
        finally:
            connection.close()

    def take(self, piece: dict) -> None:
        if "error" in piece:
            self.error = str(piece["error"].get("message"))
        elif piece["stop"]:
            self.final = piece
        else:
            self.tokens += piece["tokens"]
            self.text += piece["content"]

    def differs(self, other: Stream) -> str:
        """Where it differs from an undisturbed answer; "" if nowhere."""
        if self.error:
            return f"failed: {self.error}"
        n = next(
            (i for i, (a, b) in enumerate(zip(self.tokens, other.tokens, strict=False)) if a != b), -1
        )
        if n >= 0:
            return f"token {n} of {len(other.tokens)} is {self.tokens[n]}, undisturbed {other.tokens[n]}"
        for what in ("tokens_predicted", "tokens_evaluated", "stop_type", "stopping_word"):
            if self.final[what] != other.final[what]:
                return f"{what} is {self.final[what]}, undisturbed {other.final[what]}"
        if self.text != other.text:
            return f"the text has {len(self.text)} characters, undisturbed {len(other.text)}, or others"
        return (
            ""
            if self.tokens == other.tokens
            else f"{len(self.tokens)} tokens, undisturbed {len(other.tokens)}"
        )


class Server(Served):
    """`pyspec server` with an engine process that can be made to suffer."""

    def __init__(self, folder: Path, args: Sequence[str]) -> None:
        self.folder = folder
        command = [sys.executable, __file__, "--serve", str(folder), *args, "--port", "0"]
        super().__init__(command, wait_s=900)

    @property
    def pid(self) -> int:
        return int((self.folder / "pid").read_text())

    def plant(self, name: str, text: str) -> None:
        new = self.folder / f"{name}.new"
        new.write_text(text)
        new.rename(self.folder / name)

    def get(self, path: str) -> str:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path)
        text = connection.getresponse().read().decode()
        connection.close()
        return text

    def counted(self, name: str) -> int:
        found = [
            line
            for line in self.get("/metrics").splitlines()
            if line.startswith(f"pyspec_{name}_total ")
        ]
        return int(float(found[0].split()[1]))


def bodies(n: int, n_predict: int) -> list[dict[str, object]]:
    """Greedy and sampled in turns, every fourth with penalties; nothing is taken from or left in the prefix cache."""
    made = []
    for i in range(n):
        body: dict[str, object] = {
            "prompt": f"{PROMPTS[i % len(PROMPTS)]} ({i})", "n_predict": n_predict, "ignore_eos": True, "stream": True,
            "return_tokens": True, "cache_prompt": False, "temperature": 0.8 * (i % 2), "seed": i,
        }  # fmt: skip
        made.append(body | ({"repeat_penalty": 1.1} if i % 4 == 3 else {}))
    return made


def run(
    server: Server, asked: Sequence[dict[str, object]], strike: str = "", after: float = 0.0
) -> list[Stream]:
    """All streams side by side, struck `after` seconds."""
    streams = [Stream(i, body) for i, body in enumerate(asked)]
    threads = [threading.Thread(target=s.read, args=(server.port,)) for s in streams]
    for t in threads:
        t.start()
    if strike:
        time.sleep(after)
        if strike in SIGNALS:
            os.kill(server.pid, SIGNALS[strike])
        else:
            server.plant("round", strike)
    for t in threads:
        t.join()
    return streams


def trial(
    server: Server, undisturbed: Sequence[Stream], asked: Sequence[dict], strike: str, after: float
) -> bool:
    """Strike once and print the outcome. True if nothing was lost."""
    before = server.counted("engine_restarts")
    streams = run(server, asked, strike, after)
    flaws = [
        f"stream {s.number}: {flaw}"
        for s, u in zip(streams, undisturbed, strict=True)
        if (flaw := s.differs(u))
    ]
    restarts = server.counted("engine_restarts") - before
    if restarts == 0:
        flaws.append("the engine was not replaced: struck too late, or it did not hurt")
    pause = max(s.gap for s in streams)
    failed = sum(bool(s.error) for s in streams)
    print(
        f"{strike:8} after {after:5.2f} s: pause {pause:6.2f} s, {restarts} restart, {failed} failed, "
        f"{len(flaws)} flaws{''.join(f'{chr(10)}    {flaw}' for flaw in flaws)}",
        flush=True,
    )
    return not flaws


def poison(server: Server, undisturbed: Sequence[Stream], asked: Sequence[dict]) -> bool:
    """The last stream's prompt gets a token that no other has."""
    used = {t for b in asked for t in json.loads(tokenize(server, str(b["prompt"])))["tokens"]}
    token = next(t for t in range(300, 100, -1) if t not in used)
    server.plant("poison", f"{token} 10")
    streams = run(server, [*asked[:-1], asked[-1] | {"prompt": [token] * 4}])
    (server.folder / "poison").unlink()
    flaws = [flaw for s, u in zip(streams[:-1], undisturbed[:-1], strict=True) if (flaw := s.differs(u))]
    if "3 times while this request ran" not in streams[-1].error:
        flaws.append(f"the poison did not fail as it should: {streams[-1].error or 'it did not fail'}")
    print(
        f"poison: pause {max(s.gap for s in streams[:-1]):.2f} s, {len(flaws)} flaws {flaws or ''}",
        flush=True,
    )
    return not flaws


def tokenize(server: Server, text: str) -> str:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/tokenize", json.dumps({"content": text}))
    answer = connection.getresponse().read().decode()
    connection.close()
    return answer


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        return serve(Path(sys.argv[2]), sys.argv[3:])
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="GGUF file or a name")
    parser.add_argument("--trials", nargs="+", default=["kill", "stop", "abort", "endless"])
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--predict", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(sys.argv[1:at])
    broken = next((t.partition(":")[2] for t in args.trials if t.startswith("broken:")), "")
    asked, good = bodies(args.streams, args.predict), True
    with tempfile.TemporaryDirectory(prefix="pyspec-chaos-") as name:
        server = Server(Path(name), [args.model, *sys.argv[at + 1 :]])
        try:
            run(server, asked)  # loaded at the first use
            began = time.perf_counter()
            undisturbed, draw = run(server, asked), random.Random(args.seed)
            took = time.perf_counter() - began
            again = [
                flaw
                for s, u in zip(run(server, asked), undisturbed, strict=True)
                if (flaw := s.differs(u))
            ]
            print(
                f"{args.streams} streams of {args.predict} tokens take {took:.2f} s; differ undisturbed: {len(again)} {again or ''}",
                flush=True,
            )
            for strike in [t for _ in range(args.repeat) for t in args.trials]:
                if strike == "poison":
                    good &= poison(server, undisturbed, asked)
                elif strike in SIGNALS or strike in PLANTS:
                    good &= trial(server, undisturbed, asked, strike, draw.uniform(0.1, 0.7) * took)
            if broken:
                server.plant("broken", broken)
                good &= trial(server, undisturbed, asked, "kill", 0.3 * took)
                print(
                    "    " + "    ".join(line for line in server.log if "not used any more" in line),
                    flush=True,
                )
            print(
                f"restarts {server.counted('engine_restarts')}, tokens replayed {server.counted('tokens_replayed')}"
            )
            print(f"health {server.get('/health')}")
        finally:
            server.end()
        if not good:
            print("".join(server.log[-60:]), file=sys.stderr)
    return 0 if good else 1


def serve(folder: Path, args: Sequence[str]) -> int:
    """`pyspec server`, with our child in place of its own."""
    from pyspec.cli import main as command
    from pyspec.engine.process import supervisor

    supervisor.COMMAND = (sys.executable, str(HERE / "chaos_engine.py"), str(folder))
    command(["server", *args], standalone_mode=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
