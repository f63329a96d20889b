"""Requests to several models behind one port in turns, so that most of them switch: python tools/bench_switches.py N PORT NAME,NAME -- SERVER...

SERVER... is the command of pyspec's or llama-server's router, with its port. Each model has a prompt of 90 random ids and gives 8 tokens."""

import random
import subprocess
import sys
import time
from statistics import median

import httpx

at = sys.argv.index("--")
n, port, names = int(sys.argv[1]), sys.argv[2], sys.argv[3].split(",")
prompts = {name: [random.Random(name).randrange(3, 200) for _ in range(90)] for name in names}
texts, took, differ = dict[str, object](), {name: list[float]() for name in names}, 0
with subprocess.Popen(sys.argv[at + 1 :]) as server:
    transport = httpx.HTTPTransport(retries=1000)  # of connections, until it listens
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=600)
    for i in range(len(names) + n):
        name, began = names[i % len(names)], time.perf_counter()
        body = {
            "model": name,
            "prompt": prompts[name],
            "n_predict": 8,
            "temperature": 0,
            "ignore_eos": True,
        }
        while (answer := client.post("/completion", json=body)).status_code == 503:
            time.sleep(0.1)  # it loads
        text = answer.raise_for_status().json()["content"]
        differ += texts.setdefault(name, text) != text
        took[name].append(time.perf_counter() - began)
    server.terminate()
for name, each in took.items():
    print(
        f"{name}: first {each[0]:.2f} s, then median {median(each[1:] or each):.2f}, {len(each) - 1} switches; texts that differ in all: {differ}"
    )
