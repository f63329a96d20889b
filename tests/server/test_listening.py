"""Listening: several addresses, paths, a prefix, TLS; the log of requests; sockets that are bound before a load."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import pytest
from server_client import refusal
from server_fakes import FakeEngine
from server_live import running
from waiting import wait_for

from pyspec.errors import ConfigError
from pyspec.server.app import create_app
from pyspec.server.http import door as access
from pyspec.server.http.listen import listen, unlink, url_of
from pyspec.server.http.serve import run
from pyspec.server.settings import Limits, ServerSettings, keys_of


@pytest.fixture
def serve() -> Iterator[object]:
    """Starts servers; returns the URLs that each listens on."""
    with ExitStack() as started:

        def start(**settings: object) -> list[str]:
            made = ServerSettings(port=0, limits=Limits(drain_s=0.2), **settings)  # type: ignore[arg-type]
            made.check()
            sockets = listen(made)
            started.callback(unlink, made)
            engine = started.enter_context(closing(FakeEngine()))
            urls = [url_of(sock, made) for sock in sockets]
            started.enter_context(running(create_app(engine, made), made, sockets))
            return urls

        yield start


def test_a_target_may_be_a_whole_address(serve):
    """As clients of a proxy send it; the host in it is the one that counts."""
    (url,) = serve(hosts=("127.0.0.1",), api_prefix="/llm")
    port = int(url.split(":")[2].split("/")[0])

    def status(target: str, host: str = "127.0.0.1") -> tuple[int, str]:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as s:
            s.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            answer = b"".join(iter(lambda: s.recv(65536), b"")).decode()
        return int(answer.split()[1]), answer.partition("\r\n\r\n")[2]

    assert (
        status(f"http://127.0.0.1:{port}/llm/health")
        == status("/llm/health")
        == (200, '{"status":"ok"}')
    )
    assert status(f"HTTP://localhost:{port}/llm/health?x=1")[0] == 200
    assert status(f"http://127.0.0.1:{port}")[0] == 404
    assert status(f"http://127.0.0.1:{port}/llm")[0] == 308
    assert status(f"http://127.0.0.1:{port}/llm/health", host="evil.example")[0] == 200
    assert status("http://evil.example/llm/health")[0] == 403


def test_several_hosts_and_a_path_are_served_on_one_port(serve, tmp_path: Path):
    path = tmp_path / "pyspec.sock"
    first, second, third = serve(hosts=("127.0.0.1", "127.0.0.2", str(path)))
    assert first.startswith("http://127.0.0.1:")
    assert second == first.replace("0.1", "0.2")
    assert third == f"unix:{path}"
    for url in (first, second):
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
        answer = client.post("http://here/completion", json={"prompt": "x"})
    assert answer.json()["content"] == "Hello, world"


def test_a_path_that_a_dead_server_left_is_taken_and_one_of_a_living_server_is_not(
    serve, tmp_path: Path
):
    dead, living = tmp_path / "dead.sock", tmp_path / "living.sock"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(dead))
    assert serve(hosts=(f"unix:{dead}",)) == [f"unix:{dead}"]
    serve(hosts=(str(living),))
    with pytest.raises(ConfigError, match="another server does"):
        listen(ServerSettings(hosts=(str(living),)))
    (tmp_path / "file.sock").write_text("a file of somebody's")
    with pytest.raises(ConfigError, match="cannot listen on"):
        listen(ServerSettings(hosts=(str(tmp_path / "file.sock"),)))
    assert (tmp_path / "file.sock").read_text() == "a file of somebody's"


def test_nothing_is_bound_if_one_address_is_not_to_be_had():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        listen(ServerSettings(hosts=("127.0.0.1", "192.0.2.1"), port=port, insecure=True))
    socket.create_server(("127.0.0.1", port)).close()


def test_a_taken_port_is_told_before_anything_is_loaded():
    loads: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = ServerSettings(port=port)
        said = f"port {port}: Address already in use.*choose another with --port"
        with pytest.raises(ConfigError, match=said):
            run(lambda: loads.append(1), settings, print)  # type: ignore[arg-type,return-value]
    assert loads == []


def test_a_port_may_be_shared_if_asked_for():
    with listen(ServerSettings(port=0, reuse_port=True))[0] as first:
        port = first.getsockname()[1]
        listen(ServerSettings(port=port, reuse_port=True))[0].close()
        with pytest.raises(ConfigError):
            listen(ServerSettings(port=port))


def test_paths_begin_with_the_prefix_and_only_those(serve):
    (inside,) = serve(api_prefix="/llm/v2", api_keys=("k",))
    url = inside.removesuffix("/llm/v2")
    assert url != inside
    assert httpx.get(f"{url}/llm/v2/health").json() == {"status": "ok"}
    assert httpx.get(f"{url}/llm/v2/props").status_code == 401
    assert httpx.get(f"{url}/llm/v2/props", headers={"x-api-key": "k"}).status_code == 200
    assert "all begin with /llm/v2" in refusal(httpx.get(f"{url}/health"), 404)
    assert httpx.get(f"{url}/llm/v2").headers["location"] == "/llm/v2/"
    assert httpx.get(f"{url}/llm/v22/health").status_code == 404


@pytest.mark.parametrize("prefix", ["llm", "/llm/", "/", "/a b", "//"])
def test_what_is_no_prefix_is_refused(prefix: str):
    with pytest.raises(ConfigError, match="--api-prefix"):
        ServerSettings(api_prefix=prefix).check()


def test_names_and_tags_are_those_that_were_given(serve):
    (url,) = serve(aliases=("house", "big"), tags=("coder", "fast"))
    (model,) = httpx.get(f"{url}/v1/models").json()["data"]
    assert model["id"] == "house" and model["aliases"][0] == "big" and model["tags"] == ["coder", "fast"]
    for name in ("house", "big", model["aliases"][-1]):
        assert httpx.get(f"{url}/v1/models/{name}").status_code == 200
    assert httpx.get(f"{url}/v1/models/other").status_code == 404


def test_the_page_can_be_switched_off(serve):
    (with_page,), (without,) = serve(), serve(page=False)
    assert httpx.get(with_page).status_code == 200 and httpx.get(without).status_code == 404


def test_tls_needs_a_key_and_a_certificate_that_fit(
    serve, tmp_path: Path, certificate: tuple[Path, Path]
):
    key, cert = map(str, certificate)
    (url,) = serve(ssl_key_file=key, ssl_cert_file=cert)
    assert url.startswith("https://127.0.0.1:")
    assert httpx.get(f"{url}/health", verify=False).json() == {"status": "ok"}
    bad = tmp_path / "bad.pem"
    bad.write_text("no certificate")
    for given in (
        {"ssl_key_file": key},
        {"ssl_key_file": key, "ssl_cert_file": str(bad)},
        {"ssl_cert_file": "gone"},
    ):
        with pytest.raises(ConfigError, match="--ssl-key-file"):
            ServerSettings(**given).check()  # type: ignore[arg-type]


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    import subprocess

    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    try:
        subprocess.run(
            [*made, "-keyout", str(key), "-out", str(cert), "-subj", "/CN=localhost", "-days", "2"],
            check=True,
            capture_output=True,
        )
    except FileNotFoundError:
        pytest.skip("no openssl here")
    return key, cert


def test_keys_are_read_from_a_file(tmp_path: Path):
    path = tmp_path / "keys"
    path.write_text("# ours\n\n  one \ntwo\n")
    assert keys_of(str(path)) == ("one", "two")
    path.write_text("# none\n")
    with pytest.raises(ConfigError, match="has no key"):
        keys_of(str(path))
    with pytest.raises(ConfigError, match="can not be read"):
        keys_of(str(tmp_path / "gone"))


def test_a_request_has_a_line_with_fields_and_an_id_that_its_answer_carries(
    serve, caplog: pytest.LogCaptureFixture
):
    (url,) = serve()
    caplog.set_level(logging.INFO, "pyspec.access")
    answer = httpx.post(
        f"{url}/completion?secret=1", json={"prompt": "x"}, headers={"x-request-id": "mine-1"}
    )
    assert answer.headers["x-request-id"] == "mine-1"
    wait_for(lambda: any("mine-1" in r.getMessage() for r in caplog.records), 20)
    (record,) = [r for r in caplog.records if "mine-1" in r.getMessage()]
    fields = record.fields  # type: ignore[attr-defined]
    assert fields | {"ms": 0} == {
        "event": "request", "method": "POST", "path": "/completion", "status": 200, "ms": 0, "client": "127.0.0.1",
        "request_id": "mine-1",
    }  # fmt: skip
    assert fields["ms"] > 0 and "secret" not in record.getMessage()
    own = httpx.get(f"{url}/nowhere", headers={"x-request-id": "a b\x7f"}).headers["x-request-id"]
    assert len(own) == 16 and own.isalnum()
    assert httpx.get(f"{url}/health").status_code == 200
    assert not [r for r in caplog.records if "/health" in r.getMessage()], (
        "polled paths are told at debug level"
    )


def test_a_flood_of_requests_is_counted_not_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    now = [100.0]
    monkeypatch.setattr(access.time, "monotonic", lambda: now[0])
    caplog.set_level(logging.INFO, "pyspec.access")
    logged = access.AccessLog(lambda *args: None)  # type: ignore[arg-type,return-value]
    for i in range(3 * access.MOST_LINES):
        logged._log({"path": f"/{i}", "method": "GET"}, 200, 1.0, "id")
    assert len(caplog.records) == access.MOST_LINES
    now[0] += 1
    logged._log({"path": "/x", "method": "GET"}, 200, 1.0, "id")
    assert caplog.records[-2].fields == {"event": "requests_left_out", "count": 2 * access.MOST_LINES}  # type: ignore[attr-defined]
