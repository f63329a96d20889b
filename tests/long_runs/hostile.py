"""Many hostile clients at once against a server of the demo pair, beside patient clients that want their answers.

    python tests/long_runs/hostile.py --minutes 5          (or: make hostile)

The clients are those of tests/long_runs/hostile_clients.py. Patient ones ask for greedy texts that are known from an engine with one slot and
without a drafter. Checked: each of those answers is right and comes within --answer-s; no status above 499 (except 501 and 505 for
requests that are not HTTP); no hostile client without an answer for two minutes; no traceback in the log; no process that ends or is replaced;
and after all have left: free slots, and memory, file descriptors and threads as after the first minute. Exit status 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from hostile_clients import ATTACKS, OFTEN, Client
from soak import Known, known_texts

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from served_command import Served

ROOT = Path(__file__).resolve().parents[2]
NO_HTTP = (501, 505)  # HTTP's answers to an unknown transfer coding or version
N_ASKED = 24  # tokens of an answer that is compared
SETTLE_S = 90.0  # for the remains of hostile clients to end
GROWTH = (
    256 << 20
)  # bytes of resident memory that may come and stay after the first part: a body of 8 MB takes as much


class Server(Served):
    """`pyspec server demo` in its own process, as seen from outside."""

    def __init__(self, args: Sequence[str], preexec: str = "") -> None:
        command = [
            sys.executable,
            "-m",
            "pyspec",
            "server",
            "demo",
            "--port",
            "0",
            "--log-format",
            "json",
            *args,
        ]
        if preexec:
            command = ["sh", "-c", f'{preexec}; exec "$@"', "sh", *command]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        super().__init__(command, env=env, wait_s=300)

    def pids(self) -> list[int]:
        """Its processes: the server, the engine, the sandboxes."""
        parents = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                name, _, rest = stat.read_text().rpartition(")")
                parents[int(name.split()[0])] = int(rest.split()[1])
            except OSError:
                continue
        mine = [self.process.pid]
        for pid in mine:
            mine += [child for child, parent in parents.items() if parent == pid]
        return mine

    def held(self) -> Held:
        """The resources of all its processes now."""
        held = Held()
        for pid in self.pids():
            try:
                before = held.rss
                status = dict(
                    line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
                )
                held.rss += int(status["VmRSS"].split()[0]) << 10
                held.threads += int(status["Threads"])
                held.fds += len(os.listdir(f"/proc/{pid}/fd"))
                held.parts.append((held.rss - before) >> 20)
            except (OSError, KeyError):
                continue
        return held

    def settled(self) -> str:
        """Wait until nothing runs, waits or is connected; return the remains if it does not end."""
        end, left = time.monotonic() + SETTLE_S, ""
        while time.monotonic() < end:
            try:
                rows = httpx.get(f"{self.url}/slots", timeout=20).json()
                ready = httpx.get(f"{self.url}/ready", timeout=20).json()
            except (httpx.HTTPError, ValueError) as e:
                left = f"{type(e).__name__}: {e}"
                continue
            n_busy, n_queued = sum(row["is_processing"] for row in rows), ready.get("requests_queued", 0)
            left = f"{n_busy} slots busy, {n_queued} requests queued" if n_busy or n_queued else ""
            if not left:
                time.sleep(1.0)
                return ""
            time.sleep(0.2)
        return left


@dataclass
class Held:
    """Memory in bytes, file descriptors and threads."""

    rss: int = 0
    fds: int = 0
    threads: int = 0
    parts: list[int] = field(default_factory=list)  # MiB of each process

    def __str__(self) -> str:
        return f"{self.rss >> 20} MiB ({' + '.join(map(str, self.parts))}), {self.fds} file descriptors, {self.threads} threads"


@dataclass
class Tally:
    """The events of all threads."""

    statuses: dict[str, Counter[str]] = field(
        default_factory=lambda: {attack.__name__: Counter() for attack in ATTACKS}
    )
    wrong: list[str] = field(default_factory=list)
    answers_s: list[float] = field(default_factory=list)
    n_refused: int = 0  # patient clients' retries
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, attack: str, status: str) -> None:
        with self._lock:
            self.statuses[attack][status] += 1

    def fail(self, what: str) -> None:
        with self._lock:
            self.wrong.append(what)

    @property
    def n_hostile(self) -> int:
        return sum(counts.total() for counts in self.statuses.values())


def attack(client: Client, end: float, tally: Tally, number: int = 1 << 60) -> None:
    """Be one nuisance after the other."""
    drawn = ATTACKS + OFTEN * 2
    while time.monotonic() < end and number > 0:
        number -= 1
        kind = client.rng.choice(drawn)
        try:
            status = kind(client)
        except ConnectionError:
            status = 0
        except TimeoutError:
            tally.fail(f"{kind.__name__}: no answer in time")
            status = None
        name = "left" if status is None else str(status) if status else "closed"
        tally.add(kind.__name__, name)
        if status is not None and status >= 500 and status not in NO_HTTP:
            tally.fail(f"{kind.__name__}: status {status}")


def ask(
    server: Server, known: Sequence[Known], number: int, end: float, tally: Tally, answer_s: float
) -> None:
    """Ask for known texts, one after the other, from an address of one's own."""
    rng = random.Random(number)
    while time.monotonic() < end:
        one, began = rng.choice(known), time.monotonic()
        try:
            said = answer(server, one, f"127.0.1.{number + 1}", is_stream=rng.random() < 0.5)
            while (
                isinstance(said, str)
                and said.startswith("status 429")
                and time.monotonic() - began < answer_s
            ):
                tally.n_refused += 1
                time.sleep(1.0)  # as the answer says
                said = answer(server, one, f"127.0.1.{number + 1}", is_stream=False)
        except (OSError, ValueError, http.client.HTTPException) as e:
            said = f"{type(e).__name__}: {e}"
        took = time.monotonic() - began
        tally.answers_s.append(took)
        want = list(one.tokens[:N_ASKED])
        if said != want:
            tally.fail(f"an answer is {said}, not {want}")
        if took > answer_s:
            tally.fail(f"an answer took {took:.1f} s")
        time.sleep(0.05)


def answer(server: Server, one: Known, address: str, is_stream: bool) -> list[int] | str:
    """The tokens of an answer; words if there is none."""
    body = {"prompt": list(one.prompt), "n_predict": N_ASKED, "temperature": 0, "return_tokens": True, "stream": is_stream}  # fmt: skip
    connection = http.client.HTTPConnection(
        "127.0.0.1", server.port, timeout=600, source_address=(address, 0)
    )
    try:
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        raw = response.read()
    finally:
        connection.close()
    if response.status != 200:
        return f"status {response.status}: {raw[:200]!r}"
    if not is_stream:
        return json.loads(raw)["tokens"]
    pieces = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith(b"data: ")]
    return [token for piece in pieces if not piece.get("stop") for token in piece["tokens"]]


def assault(
    server: Server,
    known: Sequence[Known],
    seconds: float,
    options: argparse.Namespace,
    tally: Tally,
    seed: int,
) -> None:
    """All clients at once, for so long."""
    end = time.monotonic() + seconds
    threads = [
        threading.Thread(target=ask, args=(server, known, i, end, tally, options.answer_s))
        for i in range(options.patient)
    ]
    for i in range(options.clients):
        client = Client(
            server.port,
            random.Random(seed * 1000 + i),
            f"127.0.2.{i % options.addresses + 1}",
            options.timid,
        )
        threads.append(threading.Thread(target=attack, args=(client, end, tally)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def judge(server: Server, first: Held, last: Held, tally: Tally) -> None:
    """The server's faults at the end."""
    if last.rss > first.rss + GROWTH:
        tally.fail(f"memory has grown from {first.rss >> 20} to {last.rss >> 20} MiB")
    if last.fds > first.fds + 8 or last.threads > first.threads + 8:
        tally.fail(f"{last} are held, before {first}")
    if server.process.poll() is not None:
        tally.fail(f"the server has ended with status {server.process.returncode}")
    for word in ("Traceback", '"event": "engine_replaced"', '"level": "error"'):
        for line in [line for line in server.log if word in line][:5]:
            tally.fail(f"the log says: {line.strip()[:300]}")


def hostile(options: argparse.Namespace) -> Tally:
    """Run a first part, count the server's resources, and run the rest."""
    known, tally = known_texts(24), Tally()
    server = Server(
        ["-np", str(options.np), "--cache-ram", "32", *options.server]
    )  # a cache that grows is no leak
    try:
        idle = Tally()
        ask(server, known, 0, time.monotonic() + 3, idle, options.answer_s)
        tally.wrong += idle.wrong
        seconds = 60 * options.minutes
        held = [server.held()]
        for part, share in enumerate((0.3, 0.7)):
            assault(server, known, share * seconds, options, tally, options.seed + part)
            if left := server.settled():
                tally.fail(f"{SETTLE_S:g} s after all have left: {left}")
            held.append(server.held())
            print(f"part {part + 1}: {held[-1]}", flush=True)
        judge(server, held[1], held[2], tally)
        again = Tally()
        ask(server, known, 0, time.monotonic() + 3, again, options.answer_s)
        tally.wrong += again.wrong
        report(idle, tally, held, server)
    finally:
        status = server.end()
    if status:
        tally.fail(f"the server ended with status {status}")
    return tally


def report(idle: Tally, tally: Tally, held: Sequence[Held], server: Server) -> None:
    for name, counts in tally.statuses.items():
        print(f"{name:15} " + ", ".join(f"{what} {n}" for what, n in sorted(counts.items())))
    alone, beside = sorted(idle.answers_s), sorted(tally.answers_s)
    print(f"answers alone: median {alone[len(alone) // 2]:.2f} s; beside {tally.n_hostile} hostile requests: "
          f"{len(beside)}, median {beside[len(beside) // 2]:.2f}, 99 of 100 within {beside[len(beside) * 99 // 100]:.2f}, at most {beside[-1]:.2f} s; told {tally.n_refused} times to come again")  # fmt: skip
    print(
        f"held: at first {held[0]}; after the first part {held[1]}; in the end {held[2]}; {len(server.log)} lines of log"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=24, help="hostile ones")
    parser.add_argument(
        "--addresses", type=int, default=4, help="that the hostile ones come from; at most 250"
    )
    parser.add_argument("--patient", type=int, default=2, help="those who want answers")
    parser.add_argument("--np", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--answer-s", type=float, default=30.0, help="within which an answer has to be there"
    )
    parser.add_argument("--timid", action="store_true", help="smaller bodies and shorter waits")
    parser.add_argument("server", nargs="*", help="further arguments of `pyspec server demo`")
    tally = hostile(parser.parse_args())
    for what, n in Counter(tally.wrong).most_common(20):
        print(f"WRONG {n}x {what}")
    n_5xx = sum(
        n
        for counts in tally.statuses.values()
        for status, n in counts.items()
        if status.startswith("5") and int(status) not in NO_HTTP
    )
    print(
        f"{tally.n_hostile} hostile requests, {len(tally.answers_s)} answers compared, {n_5xx} statuses above 499, {len(tally.wrong)} wrong"
    )
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
