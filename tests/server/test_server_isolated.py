"""`pyspec server` with its engine in a process of its own: streams over HTTP outlive it, and a signal ends both."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from served_command import ServedCommand

ENGINE_TESTS = Path(__file__).parents[1] / "engine"
FIXTURE = Path(__file__).parents[1] / "fixtures" / "qwen35.gguf"


class Served(ServedCommand):
    """Its engine writes letters, with planted faults."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        child = (sys.executable, str(ENGINE_TESTS / "fake_engine_main.py"), str(folder))
        before = f"from pyspec.engine.process import supervisor\nsupervisor.COMMAND = {child!r}"
        super().__init__(
            before, [str(FIXTURE), "--port", "0", "-np", "4", "--hang-timeout", "1", *flags]
        )

    def plant(self, what: str) -> None:
        (self.folder / "new").write_text(what)
        (self.folder / "new").rename(self.folder / "round")

    def engine_pids(self) -> list[int]:
        """Of its children that are engines."""
        return self.children("fake_engine_main.py")


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Served]:
    served = Served(folder, *flags)
    try:
        yield served
    finally:
        served.process.kill()
        served.process.wait()


def pieces(response: httpx.Response) -> Iterator[dict]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line[6:])


BODY = {"prompt": [1, 2, 3], "n_predict": 600, "seed": 4, "stream": True}


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_stream_outlives_its_engine_and_health_tells(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        whole = httpx.post(f"{served.url}/completion", json=BODY | {"stream": False}, timeout=60).json()[
            "content"
        ]
        text, states = "", set()
        with httpx.stream("POST", f"{served.url}/completion", json=BODY, timeout=60) as response:
            for i, piece in enumerate(pieces(response)):
                text += piece["content"]
                if i == 20:
                    (tmp_path / "load").write_text("sleep 0.5")
                    (pid,) = served.engine_pids()
                    os.kill(pid, signal.SIGKILL)
                    while "recovering" not in states:
                        states.add(httpx.get(f"{served.url}/health").json()["status"])
                    assert httpx.get(f"{served.url}/ready").status_code == 503
        assert text == whole and piece["tokens_predicted"] == 600
        assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}
        counts = httpx.get(f"{served.url}/metrics").text
        assert "pyspec_engine_restarts_total 1.0" in counts
        assert "\npyspec_tokens_replayed_total 0.0" not in counts
        assert "pyspec_tokens_replayed_total" in counts


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_stream_outlives_its_replica_and_the_port_tells_of_all(tmp_path: Path) -> None:
    with serving(tmp_path, "--replicas", "3", "-np", "5") as served:
        for _ in range(3):  # one each: the stream is then the first one's, whose process is the oldest
            whole = httpx.post(
                f"{served.url}/completion", json=BODY | {"stream": False}, timeout=60
            ).json()
        text, states = "", []
        with httpx.stream("POST", f"{served.url}/completion", json=BODY, timeout=60) as response:
            for i, piece in enumerate(pieces(response)):
                text += piece["content"]
                if i == 20:
                    slots = httpx.get(f"{served.url}/slots").json()
                    assert [slot["id"] for slot in slots] == list(range(15))
                    assert [slot["id"] for slot in slots if slot["is_processing"]] == [0]
                    (tmp_path / "load").write_text("sleep 60")
                    os.kill(min(served.engine_pids()), signal.SIGKILL)
                    while "recovering" not in states:
                        health = httpx.get(f"{served.url}/health").json()
                        states = [row["state"] for row in health["replicas"]]
                    assert health["status"] == "ok" and states.count("ok") == 2
                    assert httpx.get(f"{served.url}/ready").status_code == 200
        assert text == whole["content"] and piece["tokens_predicted"] == 600
        counts = httpx.get(f"{served.url}/metrics").text.splitlines()
        assert "pyspec_engine_restarts_total 1.0" in counts
        assert "pyspec_requests_failed_total 0.0" in counts
        assert 'pyspec_replica_requests_moved_total{replica="0"} 1.0' in counts
        up = [f'pyspec_replica_up{{device="cpu",replica="{i}"}} {float(i > 0)}' for i in range(3)]
        assert set(up) <= set(counts)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_signal_ends_server_and_engine_though_the_engine_hangs(tmp_path: Path) -> None:
    with serving(tmp_path, "--drain-timeout", "0.5", "--hang-timeout", "1000") as served:
        (pid,) = served.engine_pids()
        with httpx.stream("POST", f"{served.url}/completion", json=BODY, timeout=60) as response:
            heard = pieces(response)
            next(heard)
            served.plant("endless")
            time.sleep(0.1)
            served.process.send_signal(signal.SIGTERM)
            *_, last = heard
        assert last["error"]["code"] == 503
        assert served.process.wait(30) == 0
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_running_requests_are_answered_before_a_signal_ends_the_server(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        with httpx.stream("POST", f"{served.url}/completion", json=BODY, timeout=60) as response:
            heard = pieces(response)
            next(heard)
            served.process.send_signal(signal.SIGTERM)
            *_, last = heard
        assert last["tokens_predicted"] == 600 and served.process.wait(30) == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_second_signal_ends_server_and_engine_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, "--drain-timeout", "1000") as served:
        (pid,) = served.engine_pids()
        body = BODY | {"n_predict": 4000}
        with httpx.stream("POST", f"{served.url}/completion", json=body, timeout=60) as response:
            heard = pieces(response)  # kept: a generator that goes closes the stream
            next(heard)
            served.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            assert served.process.poll() is None, "it did not wait for the running request"
            served.process.send_signal(signal.SIGTERM)
            assert served.process.wait(20) == 0
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", ">&- 2>&-", "</dev/null >/dev/full 2>/dev/full"])
def test_a_server_runs_without_its_streams(tmp_path: Path, streams: str) -> None:
    """The same for its engine's process, which is started without that knowledge."""
    child = (sys.executable, str(ENGINE_TESTS / "fake_engine_main.py"), str(tmp_path))
    address = tmp_path / "a.sock"
    command = ["server", str(FIXTURE), "--host", str(address)]
    (tmp_path / "main.py").write_text(
        f"from pyspec.engine.process import supervisor\nsupervisor.COMMAND = {child!r}\nfrom pyspec.cli import main\nmain({command!r})"
    )
    process = subprocess.Popen(f"exec {sys.executable} {tmp_path}/main.py {streams}", shell=True)
    try:
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(address)), base_url="http://localhost"
        ) as client:
            until = time.monotonic() + 60
            while process.poll() is None and time.monotonic() < until:
                with suppress(httpx.TransportError):
                    if client.get("/health").status_code == 200:
                        break
                time.sleep(0.05)
            assert (
                client.post("/completion", json=BODY | {"stream": False}, timeout=60).json()[
                    "tokens_predicted"
                ]
                == 600
            )
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
