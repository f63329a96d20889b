"""Where the time of a CPU's recorded forwards goes: by kernel, and products by type and shape.

    python tools/cpu_parts.py MODEL.gguf --streams 1 8
    ... --draft mtp|FILE -t 2 -n 64                          drafters' forwards, too
    ... --cpu-activations q8

Runs random prompts in this process, greedily and without an end. Each shape of a forward has a table: calls and microseconds of one replay, and
for products the GB of weights a second. `between` is the time from one replay to the next: Python, and kernels outside recordings.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import struct
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pyspec.cpu import build, kernels
from pyspec.cpu.kernels import Tape
from pyspec.engine.api import Engine
from pyspec.gguf import GGMLType
from pyspec.request import SamplingParams

PRODUCTS = ("product", "product_eight")
PRODUCT = struct.Struct("<15qd")  # linear.h's ProductArgs


@dataclass
class Sum:
    calls: int = 0
    ns: int = 0
    n_bytes: int = 0


@dataclass
class Forward:
    """All replays of tapes with this many calls and rows."""

    replays: int = 0
    ns: int = 0
    parts: dict[str, Sum] = field(default_factory=lambda: defaultdict(Sum))


class Clock:
    """Stands in for `Tape.replay` and notes each call's time."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        lib.pyspec_replay_timed.argtypes = [
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_void_p,
        ]
        lib.pyspec_replay_timed.restype = None
        texts = (path.read_text() for path in build.SOURCES.glob("*.cpp"))
        names = {n for text in texts for n in re.findall(r'extern "C" void pyspec_(\w+)\(const', text)}
        self.lib = lib
        self.names = {ctypes.cast(getattr(lib, f"pyspec_{n}"), ctypes.c_void_p).value: n for n in names}
        self.clear()

    def clear(self) -> None:
        self.forwards: dict[tuple[int, int], Forward] = defaultdict(Forward)
        self.between_ns = self.n_between = self.ended = 0

    def replay(self, tape: Tape) -> None:
        began, n = time.perf_counter_ns(), len(tape.calls)
        if self.ended:
            self.between_ns, self.n_between = self.between_ns + began - self.ended, self.n_between + 1
        times = (ctypes.c_int64 * (n + 1))()
        self.lib.pyspec_replay_timed(tape._steps, n, kernels.n_thread(), times)
        parts = [self.part(*call) for call in tape.calls]
        forward = self.forwards[n, max((rows for _, _, rows in parts), default=0)]
        forward.replays, forward.ns = forward.replays + 1, forward.ns + times[n] - times[0]
        for i, (name, n_bytes, _) in enumerate(parts):
            one = forward.parts[name]
            one.calls, one.ns = one.calls + 1, one.ns + times[i + 1] - times[i]
            one.n_bytes += n_bytes
        self.ended = time.perf_counter_ns()

    def part(self, kernel: int, packed: bytes) -> tuple[str, int, int]:
        """The call's name, the bytes of its weights, and its rows where it is a product."""
        name = self.names.get(kernel, "?")
        if name not in PRODUCTS:
            return name, 0, 0
        type, n_row, n_in, n_out = PRODUCT.unpack(packed)[9:13]
        kind = GGMLType(type)
        n_bytes = n_in * n_out // kind.block_size * kind.type_size
        return f"{name} {kind.name} {n_in} -> {n_out}, {n_row} rows", n_bytes, n_row

    def table(self, n_most: int) -> list[str]:
        lines = [f"between replays {self.between_ns / 1e3 / max(self.n_between, 1):,.0f} us"]
        for (n_call, n_row), forward in sorted(self.forwards.items(), key=lambda kv: -kv[1].ns):
            n = forward.replays
            lines.append(
                f"{n} forwards of {n_row} rows, {n_call} calls: {forward.ns / n / 1e3:,.0f} us each"
            )
            found = sorted(forward.parts.items(), key=lambda kv: -kv[1].ns)
            for name, one in found[:n_most]:
                rate = f"{one.n_bytes / max(one.ns, 1):6.1f} GB/s" if one.n_bytes else " " * 11
                lines.append(f"{one.ns / n / 1e3:10,.1f} us {one.calls / n:6.1f} calls {rate}  {name}")
        return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--draft", default="none", help="as --spec-type, or a drafter's file")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("-n", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--cpu-activations", choices=("q16", "q8"), default="q16")
    parser.add_argument("--top", type=int, default=20, help="lines of a table")
    options = parser.parse_args()
    lib = kernels.compiled()
    if isinstance(lib, str):
        raise SystemExit(lib)
    clock = Clock(lib)
    Tape.replay = lambda tape: clock.replay(tape)  # type: ignore[assignment, method-assign]
    values: dict[str, object] = {"np": max(options.streams), "ctx": 64 + options.n}
    values |= {"threads": options.threads, "cpu_activations": options.cpu_activations}
    engine = Engine.open(options.model, options.draft, values)
    for n in options.streams:
        run(engine, n, options.n)  # warms up
        clock.clear()
        seconds = run(engine, n, options.n)
        print(f"\n{n} streams: {n * options.n / seconds:,.1f} tokens a second")
        print(*clock.table(options.top), sep="\n", flush=True)
    os._exit(0)


def run(engine: Engine, n_stream: int, n: int) -> float:
    """Seconds of that many answers at once."""
    prompts: Sequence[list[int]] = [
        torch.randint(100, 1000, (16,), generator=torch.Generator().manual_seed(i)).tolist()
        for i in range(n_stream)
    ]
    began = time.perf_counter()
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    engine.generate_many(prompts, params=params, max_tokens=n)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
