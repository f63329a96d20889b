"""What a request pays for a server of several models: one token of a loaded model, from it and from a server of this model alone, in turns.
Beside times, which other work on the machine disturbs, the CPU time of each server's own process (Linux)."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import httpx

BODY = {"model": "m", "prompt": [5, 6, 7], "n_predict": 1, "temperature": 0}
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", type=Path)
parser.add_argument("-n", type=int, default=300, help="requests to each")
args = parser.parse_args()
took: list[list[float]] = [[], []]
cpu = [0.0, 0.0]
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "m.gguf").symlink_to(args.model.resolve())
    processes, clients = [], []
    for port, words in (18391, ["-m", f"{folder}/m.gguf"]), (18392, ["--models-dir", folder]):
        command = [sys.executable, "-m", "pyspec", "server", *words, "-np", "2", "-c", "512", "-lv", "0"]
        processes.append(subprocess.Popen([*command, "--port", str(port)]))
        transport = httpx.HTTPTransport(retries=1000)  # of connections, until it listens
        clients.append(
            httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=300)
        )
    for i in range(-20, args.n):  # the first ones load and warm up
        for k in (i % 2, (i + 1) % 2):
            tasks = list(Path(f"/proc/{processes[k].pid}/task").glob("*/schedstat"))
            before, began = sum(int(task.read_text().split()[0]) for task in tasks), time.perf_counter()
            while clients[k].post("/completion", json=BODY).status_code != 200:
                time.sleep(0.2)  # it loads
            if i >= 0:
                took[k].append(time.perf_counter() - began)
                cpu[k] += (
                    (sum(int(task.read_text().split()[0]) for task in tasks) - before) / 1e6 / args.n
                )
    for process in processes:
        process.terminate()
for name, times, spent in zip(("alone", "of several"), took, cpu, strict=True):
    print(f"{name}: median {1e3 * median(times):.2f} ms, fastest tenth {1e3 * sorted(times)[args.n // 10]:.2f}, CPU {spent:.3f} ms a request")  # fmt: skip
print(f"median of the differences {1e3 * median(b - a for a, b in zip(*took, strict=True)):.3f} ms, load {os.getloadavg()[0]:.1f}")  # fmt: skip
