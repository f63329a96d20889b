"""What a request pays for a server of several models: one token of a loaded model, from it and from a server of this model alone, in turns."""

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
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "m.gguf").symlink_to(args.model.resolve())
    took, processes, clients = ([], []), [], []
    for port, words in (18391, ["-m", f"{folder}/m.gguf"]), (18392, ["--models-dir", folder]):
        command = [sys.executable, "-m", "pyspec", "server", *words, "-np", "2", "-c", "512", "-lv", "0"]
        processes.append(subprocess.Popen([*command, "--port", str(port)]))
        transport = httpx.HTTPTransport(retries=1000)  # of connections, until it listens
        clients.append(
            httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=300)
        )
    for i in range(-20, args.n):  # the first ones load and warm up
        for client, times in zip(clients, took, strict=True):
            began = time.perf_counter()
            while client.post("/completion", json=BODY).status_code != 200:
                time.sleep(0.2)  # it loads
            times.extend([time.perf_counter() - began] if i >= 0 else [])
    for process in processes:
        process.terminate()
alone, several = (sorted(times) for times in took)
ms = [1e3 * x for x in (median(alone), median(several), alone[args.n // 20], several[args.n // 20], median(b - a for a, b in zip(*took, strict=True)))]  # fmt: skip
print(f"ms alone, of several: median {ms[0]:.2f}, {ms[1]:.2f}; fastest twentieth {ms[2]:.2f}, {ms[3]:.2f}; median of the differences {ms[4]:.3f}; load {os.getloadavg()[0]:.1f}")  # fmt: skip
