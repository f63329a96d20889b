"""The reliability scorecard: pyspec's promises, each measured here or named with the command that measures it.

    python tools/scorecard.py              (or: make scorecard)      scorecard.md is written anew
    python tools/scorecard.py R7 R15       these rows anew, in the page that there is

A row is as good as the worst of its commands. Measurements that need a GPU, hours or foreign files are not run here. Their commands are in the table.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "long_runs"))

from hostile import Server

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "scorecard.md"
TIMEOUT_S = 900
TESTS = "python -m pytest -p no:cacheprovider -p no:benchmark"
CHAT = {
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "max_tokens": 200,
    "ignore_eos": True,
}


@dataclass(frozen=True)
class Found:
    """The result of a row. `ok` None: it was not run."""

    ok: bool | None
    text: str


Check = Callable[[], Found]


@dataclass(frozen=True)
class Entry:
    """A row of the page's table, and its findings."""

    row: str
    found: list[str]


@dataclass(frozen=True)
class Row:
    """One promise. `elsewhere`: the commands to run on another machine, or for longer, for the rest of it."""

    number: str
    measure: str
    target: str
    checks: tuple[Check, ...]
    elsewhere: str = ""


def run(command: str) -> tuple[int, str]:
    """Exit status and output, of this tree."""
    words = shlex.split(command)
    if words[0] == "python":
        words[0] = sys.executable
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    try:
        done = subprocess.run(
            words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return 124, f"not done after {TIMEOUT_S} s"
    return done.returncode, done.stdout + done.stderr


def told(command: str, pattern: str = "") -> Check:
    """A command whose exit status is the verdict, and whose last fitting line is the finding."""

    def check() -> Found:
        status, output = run(command)
        lines = [
            line.strip()
            for line in output.splitlines()
            if line.strip() and (not pattern or re.search(pattern, line))
        ]
        said = lines[-1] if lines else "nothing was said"
        return Found(status == 0, f"{said[:200]} (`{shown(command)}`)")

    return check


def tests(what: str) -> Check:
    return told(f"{TESTS} {what}", r"\d+ (passed|failed)")


def shown(command: str) -> str:
    return command.replace(TESTS, "pytest")


# -- measured here -------------------------------------------------------------------------------------------------------------------


def cancel_latency() -> Found:
    """From the end of a connection to the slot's."""
    server, times = Server(["-np", "4"]), []
    try:
        address, stop = ("127.0.0.1", server.port), 60
        raw = json.dumps(CHAT | {"stream": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
        for _ in range(stop):
            with socket.create_connection(address, 30) as sock:
                sock.sendall(head + raw)
                while b'"content"' not in sock.recv(65536):
                    pass
            left = time.monotonic()
            while any(row["is_processing"] for row in httpx.get(f"{server.url}/slots").json()):
                time.sleep(0.002)
            times.append(time.monotonic() - left)
        health = httpx.get(f"{server.url}/ready").json()
        status = server.end()
    finally:
        server.process.kill()
    slowest = sorted(times)[int(len(times) * 0.99)]
    text = f"{len(times)} cancelled streams: median {1e3 * statistics.median(times):.0f} ms, 99 of 100 within {1e3 * slowest:.0f} ms; then {health['status']}"
    return Found(slowest < 0.5 and status == 0, text + "; each holds at least one look at /slots")


def progress() -> Found:
    """The age of the last round while eight slots are busy."""
    server, ages = Server(["-np", "8"]), []
    try:
        threads = [
            threading.Thread(
                target=httpx.post,
                args=(f"{server.url}/v1/chat/completions",),
                kwargs={"json": CHAT, "timeout": 300},
            )
            for _ in range(16)
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            view = httpx.get(f"{server.url}/ready", timeout=30).json()
            ages.append(float(view.get("step_age_s") or 0.0))
            time.sleep(0.05)
        stuck = server.settled()
    finally:
        server.end()
    return Found(
        max(ages) < 2 and not stuck,
        f"16 requests in 8 slots, {len(ages)} looks: the last round at most {max(ages):.2f} s ago; {stuck or 'no slot stuck'}",
    )


def overload() -> Found:
    """Fifty times as many clients as slots, which retry at once."""
    server, statuses, waits = Server(["-np", "4"]), Counter(), []
    seconds, end = 20.0, 0.0
    body = {"messages": [{"role": "user", "content": "Say a word."}], "max_tokens": 4}

    def hammer() -> None:
        with httpx.Client(timeout=120) as client:
            while time.monotonic() < end:
                began = time.monotonic()
                try:
                    status = client.post(f"{server.url}/v1/chat/completions", json=body).status_code
                except httpx.HTTPError as e:
                    statuses[type(e).__name__] += 1
                    continue
                statuses[str(status)] += 1
                if status == 200:
                    waits.append(time.monotonic() - began)
                else:
                    time.sleep(0.2)

    try:
        end = time.monotonic() + seconds
        threads = [threading.Thread(target=hammer) for _ in range(200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        began = time.monotonic()
        after = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).status_code
        recovered = time.monotonic() - began
        status = server.end()
    finally:
        server.process.kill()
    bad = {what: n for what, n in statuses.items() if what not in ("200", "429")}
    counts = ", ".join(f"{what} {n}x" for what, n in sorted(statuses.items()))
    text = f"200 clients, 4 slots, {seconds:g} s: {counts}; accepted ones {statistics.median(waits):.1f} s in the middle, at most {max(waits):.1f} s; the next answer after it {recovered:.2f} s"
    return Found(not bad and after == 200 and recovered < 1 and status == 0, text)


def cold_start() -> Found:
    """Help, vocabulary, header, and the port."""

    def best(code: Sequence[str]) -> float:
        times = []
        for _ in range(5):
            began = time.monotonic()
            subprocess.run(
                [sys.executable, *code],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                capture_output=True,
                check=True,
            )
            times.append(time.monotonic() - began)
        return min(times)

    path = ROOT / "pyspec" / "demo" / "pyspec-demo.gguf"
    timed = f"import time; from pyspec.gguf import open_gguf; from pathlib import Path; from pyspec.text.tokenizer import Tokenizer; a = time.perf_counter(); f = open_gguf(Path({str(path)!r})); b = time.perf_counter(); Tokenizer.from_metadata(f.metadata).encode('x'); print(b - a, time.perf_counter() - b)"
    said = min(
        subprocess.run(
            [sys.executable, "-c", timed],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for _ in range(3)
    )
    header, vocabulary = map(float, said.split())
    bare, asked = best(["-c", "pass"]), best(["-m", "pyspec", "--help"])
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "pyspec", "server", "demo", "--port", "18977"],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        while True:
            try:
                status = httpx.get("http://127.0.0.1:18977/health", timeout=1).status_code
                break
            except httpx.HTTPError:
                if time.monotonic() - began > 60:
                    status = 0
                    break
                time.sleep(0.01)
        port = time.monotonic() - began
    finally:
        process.terminate()
        process.wait(60)
    text = f"--help {1e3 * asked:.0f} ms ({1e3 * bare:.0f} of them Python's start), the demo's header {1e3 * header:.0f} ms, its vocabulary {1e3 * vocabulary:.0f} ms, /health {status} after {port:.2f} s"
    return Found(asked - bare < 0.15 and vocabulary < 0.5 and header < 0.3 and port < 1, text)


ROWS = (
    Row("R1", "greedy texts with and without drafts", "equal, or a proven near tie",
        (told("python -m pyspec verify demo -n 48", "prompts|equal|texts"), tests("tests/engine/test_same_text_models.py tests/engine/test_same_text_fakes.py -m 'not slow'")),
        "`pyspec verify TARGET -md DRAFTER -np 8` for a pair of yours; every case: `make test-all`"),
    Row("R2", "the distribution of sampled texts", "chi-square p > 0.01, every sampler", (tests("tests/sample -m 'not slow'"),), "every combination: `make test-all`"),
    Row("R3", "the same text in any slot, beside any neighbours, cached or not", "100 %",
        (tests("tests/engine/test_prefix_reuse.py tests/engine/test_prompt_again.py tests/engine/test_short_among_long.py -m 'not slow'"),)),
    Row("R4", "soak: conversations, reuse, cancels", "no crash, no guard, no growth",
        (told("python tests/long_runs/soak.py --minutes 1 --np 8"),), "long contexts on a GPU: `python tests/long_runs/soak.py --chats --device cuda --ctx 24576 --minutes 1440`"),
    Row("R5", "guards, faults and lost processes end one request", "all green", (tests("tests/engine/test_faults.py tests/engine/test_replaced.py tests/engine/test_bad_kernels.py -m 'not slow'"),),
        "real shapes: `make check-gpu`"),
    Row("R6", "a client that leaves frees its slot", "a round + 50 ms; seen in /slots: 99 of 100 within 0.5 s", (cancel_latency, tests("tests/server/test_server_live.py -k leav")),),
    Row("R7", "the age of the last round under load", "< 2 s, no stuck slot", (progress,)),
    Row("R8", "fifty times the capacity", "200 or 429, recovers within 1 s", (overload,)),
    Row("R9", "interfaces", "clients of others work", (tests("tests/server/test_server_live.py tests/server/test_anthropic.py tests/server/test_responses.py -m 'not slow'"),),
        "llama.cpp's own server tests: `make peer LLAMA_CPP=PATH`; schemathesis: docs/evaluating.md"),
    Row("R10", "malformed input", "no status above 499, no hang, no crash",
        (told("python tests/long_runs/hostile.py --minutes 0.5 --timid --answer-s 90", "hostile requests"), told("python tests/long_runs/fuzz.py --number 300 --seed 4", "findings"), told("python tests/long_runs/fuzz_slots.py --number 200 --seed 4", "findings")),
        "`make hostile MINUTES=60`, `make fuzz NUMBER=100000`"),
    Row("R11", "texts under grammars with drafts", "valid, and equal to those without", (tests("tests/constrain tests/engine/test_constrained_text.py -m 'not slow'"),), "every case: `make test-all`"),
    Row("R12", "drafting never loses", ">= 0.98 of plain, every cell", (tests("tests/test_control.py -m 'not slow'"),), "on the GPU: `python tools/bench_acceptance.py TARGET`"),
    Row("R13", "the memory plan", "< 2 % off, nothing allocated after warm-up", (tests("tests/engine/test_fit.py -m 'not slow'"),), "on a GPU: `pytest tests/engine/test_on_gpu.py`"),
    Row("R14", "restarts and restored slots", "go on identically",
        (told("python tests/long_runs/chaos.py demo --trials kill --streams 4 --predict 100 -- -np 4 -c 1024", "kill|restart"), tests("tests/engine/test_slot_files.py -m 'not slow'"))),
    Row("R15", "cold start", "help 150 ms beyond Python's start, vocabulary 0.5 s, header 0.3 s, port 1 s", (cold_start,)),
    Row("R16", "compute-sanitizer", "clean, every kernel", (), "on a GPU: `make sanitize`"),
    Row("R17", "the docs are true", "every table and command that can be checked", (tests("tests/test_docs.py -m 'not slow'"),)),
)  # fmt: skip


def measured(row: Row) -> list[Found]:
    found = []
    for check in row.checks:
        began = time.monotonic()
        try:
            one = check()
        except Exception as e:  # noqa: BLE001 - a row that can not be measured has failed, and the others go on
            one = Found(False, f"{type(e).__name__}: {e}")
        print(f"{row.number} {one.ok} {time.monotonic() - began:.0f} s: {one.text}", flush=True)
        found.append(one)
    if row.elsewhere:
        found.append(Found(None, f"not run here: {row.elsewhere}"))
    return found


def entry(row: Row, ones: Sequence[Found]) -> Entry:
    """A row of the page and its findings. A verdict that may differ elsewhere is marked so."""
    ran = [one.ok for one in ones if one.ok is not None]
    verdict = (
        "not run here"
        if not ran
        else "FAILS"
        if not all(ran)
        else "holds here"
        if row.elsewhere
        else "holds"
    )
    return Entry(
        f"| {row.number} | {row.measure} | {row.target} | {verdict} |", [one.text for one in ones]
    )


def page(entries: dict[str, Entry]) -> str:
    """The table, and below it the findings by row."""
    when, python = datetime.now(UTC).strftime("%Y-%m-%d"), platform.python_version()
    head = (
        "# Reliability scorecard\n\n"
        f"Written by `make scorecard` on {when}: {os.cpu_count()} cores, no GPU, Python {python}. A row holds if all of its\n"
        "commands here do. Rows that need a GPU, hours or foreign files name their command.\n\n"
        "| | promise | target | verdict |\n| --- | --- | --- | --- |\n"
    )
    chosen = [(row.number, entries[row.number]) for row in ROWS]
    findings = "".join(
        f"\n### {number}\n\n" + "".join(f"* {x}\n" for x in each.found) for number, each in chosen
    )
    return head + "".join(f"{each.row}\n" for _, each in chosen) + "\n## Findings\n" + findings


def before() -> dict[str, Entry]:
    """The entries of the page as it is."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    table, _, findings = text.partition("\n## Findings\n")
    rows = {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("| R")}
    found: dict[str, list[str]] = {number: [] for number in rows}
    for part in findings.split("\n### ")[1:]:
        number, _, lines = part.partition("\n")
        found[number.strip()] = [line[2:] for line in lines.splitlines() if line.startswith("* ")]
    return {number: Entry(line, found[number]) for number, line in rows.items()}


def main() -> int:
    chosen = [row for row in ROWS if not sys.argv[1:] or row.number in sys.argv[1:]]
    found = {row.number: measured(row) for row in chosen}
    entries = before() | {row.number: entry(row, found[row.number]) for row in chosen}
    if len(entries) == len(ROWS):
        PAGE.write_text(page(entries), encoding="utf-8")
        print(f"written: {PAGE.relative_to(ROOT)}")
    return 1 if any(one.ok is False for ones in found.values() for one in ones) else 0


if __name__ == "__main__":
    sys.exit(main())
