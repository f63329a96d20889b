"""What HTTP costs an engine: rounds of a made-up one in process and through the server, in turns. No GPU, no model.

A round is some milliseconds of work on the GIL, then some of waiting as for a device, then one Delta a stream.
`python tools/bench_server.py --host-ms 2 --device-ms 10 --streams 1 8`
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path
from statistics import median

from pyspec.bench.measure import Turn, measure
from pyspec.bench.over_http import Clients, measure_http
from pyspec.cli.chats import served

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "bench"))
from clockwork import WIDTH, Clockwork


def server_cpu() -> float:
    """CPU seconds of the server's thread so far."""
    thread = next(t for t in threading.enumerate() if t.name.endswith("-server"))
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def compare(engine: Clockwork, clients: Clients, n_stream: int, n_round: int, turns: int) -> str:
    """Milliseconds of a round and of its host part in process, what HTTP adds to each, and the server's CPU a chunk."""
    prompts = [(1, 2, 3)] * n_stream
    rounds, hosts = [], []
    cpu = 0.0
    for turn in range(turns):
        how = Turn(mode="plain", turn=turn, n_predict=n_round * WIDTH, ignore_eos=True)
        engine.host.clear()
        direct = measure(engine.submit, engine.cancel, engine.metrics, prompts, how)
        alone = 1e3 * median(engine.host)
        engine.host.clear()
        cpu -= server_cpu()
        through = measure_http(clients, engine.metrics, prompts, how)
        cpu += server_cpu()
        hosts.append((alone, 1e3 * median(engine.host) - alone))
        ms = [1e3 * WIDTH * n_stream / r.rate for r in (direct, through)]
        rounds.append((ms[0], ms[1] - ms[0]))
    (ms, more), (host, host_more) = (map(median, zip(*pairs, strict=True)) for pairs in (rounds, hosts))
    low, high = min(m for _, m in rounds), max(m for _, m in rounds)
    return (
        f"{n_stream} streams: round {ms:.2f} ms, HTTP adds {more:+.3f} ({low:+.3f}..{high:+.3f}), ratio {ms / (ms + more):.3f}; "
        f"host part {host:.2f} {host_more:+.3f} ms; server {1e6 * cpu / turns / n_round / n_stream:.0f} us CPU a chunk"
    )


def chew(stop: threading.Event) -> None:
    """A thread that never lets go of the GIL by itself, as tokenising a long prompt does not."""
    while not stop.is_set():
        sum(i & 3 for i in range(10000))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host-ms", type=float, default=2.0)
    parser.add_argument("--device-ms", type=float, default=10.0)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--defer", action="store_true", help="hand tokens over when the next round's waiting begins")
    parser.add_argument("--switch-ms", type=float, default=0.0, help="sys.setswitchinterval; 0: as the server has it")
    parser.add_argument("--busy", action="store_true", help="with a thread that holds the GIL whenever it can")
    args = parser.parse_args()
    engine = Clockwork(max(args.streams), host_ms=args.host_ms, device_ms=args.device_ms, is_deferring=args.defer)
    stop = threading.Event()
    with served(engine) as port, Clients(port) as clients:
        if args.switch_ms:
            sys.setswitchinterval(args.switch_ms / 1e3)
        if args.busy:
            threading.Thread(target=chew, args=(stop,)).start()
        for n in args.streams:
            print(compare(engine, clients, n, args.rounds, args.turns))
        stop.set()
    engine.close()


if __name__ == "__main__":
    main()
