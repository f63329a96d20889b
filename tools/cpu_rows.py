"""Microseconds a row of prompts on a CPU, by rows of a forward and by threads: large forwards have to be as fast as small ones.

    python tools/cpu_rows.py MODEL.gguf --rows 256 512 1024 2048 --threads 2 8 16 32

For each number of threads and rows, N prompts of 256 tokens are read in one forward (`-b`, `-ub`), the best of three times; and the page faults of a
row and the processors' time in the system.
"""

from __future__ import annotations

import argparse
import random
import resource
import time

from pyspec.engine.api import Engine

PROMPT = 256


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    draw = random.Random(1)
    for n_thread in options.threads:
        for n_row in options.rows:
            n = max(1, n_row // PROMPT)
            values = {"np": n, "ctx": PROMPT + 16, "threads": n_thread, "batch": n_row, "ubatch": n_row}
            values |= {"device": "cpu", "prefix_cache": False, "check_tap_shift": False}
            with Engine.open(options.model, "none", values) as engine:
                found = []
                for _ in range(options.turns + 1):  # the first one warms up
                    prompts = [[draw.randrange(3, 250) for _ in range(n_row // n)] for _ in range(n)]
                    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
                    engine.generate_many(prompts, max_tokens=1, temperature=0.0)
                    took, after = (
                        time.perf_counter() - began,
                        resource.getrusage(resource.RUSAGE_SELF),
                    )
                    faults, system = (
                        after.ru_minflt - before.ru_minflt,
                        after.ru_stime - before.ru_stime,
                    )
                    found.append((took, faults / n_row, system))
                took, faults, system = min(found[1:])
                print(
                    f"-t {n_thread}, {n_row} rows: {1e6 * took / n_row:.0f} us a row, {n_row / took:.0f} tokens/s, "
                    f"{faults:.1f} faults a row, {1e3 * system:.0f} ms in the system",
                    flush=True,
                )


if __name__ == "__main__":
    main()
