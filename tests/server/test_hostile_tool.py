"""The short form of `make hostile`: all kinds of hostile clients at once, and answers that are right meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FEW = """
import socket, sys, time
import httpx
sys.path.insert(0, sys.argv[1])
from hostile import Server
server = Server(["-np", "2"], "ulimit -n 64")
n_line = len(server.log)
try:
    held = []
    for _ in range(400):
        sock = socket.socket()
        sock.settimeout(20)
        sock.connect(("127.0.0.1", server.port))
        held.append(sock)
    for _ in range(5):
        began = time.monotonic()
        assert httpx.get(server.url + "/health", timeout=30).status_code == 200
        print("seconds", time.monotonic() - began)
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "json_schema": {}}
    assert httpx.post(server.url + "/v1/chat/completions", json=chat, timeout=60).status_code == 200
    said = server.log[n_line:]
    assert len(said) < 60 and sum(map(len, said)) < 100_000, said[:5]
finally:
    assert server.end() == 0
"""


@pytest.mark.slow
def test_hostile_clients_end_nothing_and_answers_beside_them_are_right() -> None:
    command = [
        sys.executable,
        str(ROOT / "tests" / "long_runs" / "hostile.py"),
        "--timid",
        "--minutes",
        "0.4",
        "--clients",
        "12",
        "--answer-s",
        "90",
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    last = done.stdout.splitlines()[-1]
    assert int(last.split()[0]) > 30 and last.endswith("0 statuses above 499, 0 wrong"), last


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of file descriptors as Linux has them")
def test_with_64_file_descriptors_a_server_stays_reachable_and_its_log_small() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FEW, str(ROOT / "tests" / "long_runs")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
