"""Measure the cost of HTTP for an engine's thread: a made-up engine in process and through the server, in turns. No GPU, no model.

A round is some milliseconds of work on the GIL, then a wait as for a device, then one Delta a stream. With `--isolated` the served
engine has its own process; the compared one stays in this process.
`python tools/bench_server.py --host-ms 2 --device-ms 10 --streams 1 8 32 --isolated`
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from pyspec.bench.measure import Turn, measure
from pyspec.bench.over_http import Clients, measure_http
from pyspec.cli.chats import served
from pyspec.config import EngineSettings
from pyspec.engine.api import Engine
from pyspec.engine.process.supervisor import Supervisor

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS / "bench"))
from clockwork import WIDTH, Clockwork  # noqa: E402

Served = Clockwork | Engine


def server_cpu() -> float:
    """CPU seconds of the server's thread so far."""
    thread = next(t for t in threading.enumerate() if t.name.endswith("-server"))
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def compare(
    engine: Clockwork, through: Served, clients: Clients, n_stream: int, n_round: int, turns: int
) -> str:
    """The effect of HTTP on the two parts of a round in which the engine needs the GIL, and the server's CPU a chunk.

    Medians over rounds, then over turns: the rate is left to `pyspec bench --http`, because a shared machine's sleep is
    no clock.
    """
    prompts = [(1, 2, 3)] * n_stream
    alone, added = [], []
    cpu = 0.0
    for turn in range(turns):
        how = Turn(mode="plain", turn=turn, n_predict=n_round * WIDTH, ignore_eos=True)
        direct = clocked(
            engine, lambda how=how: measure(engine.submit, engine.cancel, engine.metrics, prompts, how)
        )
        cpu -= server_cpu()
        over_http = clocked(
            through, lambda how=how: measure_http(clients, through.metrics, prompts, how)
        )
        cpu += server_cpu()
        alone.append(direct)
        added.append([b - a for a, b in zip(direct, over_http, strict=True)])
    (work, hand), (more_work, more_hand) = (
        map(median, zip(*pairs, strict=True)) for pairs in (alone, added)
    )
    return (
        f"{n_stream} streams: work {work:.2f} {more_work:+.3f} ms, hand-over {hand:.3f} {more_hand:+.3f} ms; "
        f"in all {more_work + more_hand:+.3f} ({min(map(sum, added)):+.3f}..{max(map(sum, added)):+.3f}); "
        f"server {1e6 * cpu / turns / n_round / n_stream:.0f} us CPU a chunk"
    )


def clocked(engine: Served, turn: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of a turn's median round: work, and handing over."""
    if isinstance(engine, Engine):
        turn()
        counted = engine.metrics()
        return counted.host_ms, counted.sample_ms
    engine.host.clear()
    engine.handing.clear()
    turn()
    return 1e3 * median(engine.host), 1e3 * median(engine.handing)


def chew(stop: threading.Event) -> None:
    """A thread that never lets go of the GIL by itself, as tokenising a long prompt does not."""
    while not stop.is_set():
        sum(i & 3 for i in range(10000))


def isolated(args: argparse.Namespace) -> Engine:
    """The same clock in a process of its own. The file is for its tokenizer only."""
    clock = (max(args.streams), args.host_ms, args.device_ms, int(args.defer))
    command = (sys.executable, str(TESTS / "bench" / "clockwork_engine.py"), *map(str, clock))
    supervisor = Supervisor(
        TESTS / "fixtures" / "qwen35.gguf", EngineSettings(queue=1000), command=command
    )
    supervisor.wait()
    return Engine(supervisor, supervisor.tokenizer, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host-ms", type=float, default=2.0)
    parser.add_argument("--device-ms", type=float, default=10.0)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--defer", action="store_true", help="hand tokens over when the next round's waiting begins"
    )
    parser.add_argument(
        "--switch-ms", type=float, default=0.0, help="sys.setswitchinterval; 0: as the server has it"
    )
    parser.add_argument(
        "--isolated", action="store_true", help="serve an engine in a process of its own"
    )
    parser.add_argument(
        "--busy", action="store_true", help="with a thread that holds the GIL whenever it can"
    )
    args = parser.parse_args()
    engine = Clockwork(
        max(args.streams), host_ms=args.host_ms, device_ms=args.device_ms, is_deferring=args.defer
    )
    stop = threading.Event()
    through: Served = isolated(args) if args.isolated else engine
    with served(through) as port, Clients(port) as clients:
        if args.switch_ms:
            sys.setswitchinterval(args.switch_ms / 1e3)
        if args.busy:
            threading.Thread(target=chew, args=(stop,)).start()
        for n in args.streams:
            print(compare(engine, through, clients, n, args.rounds, args.turns), flush=True)
        stop.set()
    through.close()
    engine.close()


if __name__ == "__main__":
    main()
