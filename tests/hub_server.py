"""A hub on this machine: lists files, serves ranges, breaks off, and serves wrong contents on request."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

REPO = "user/repo"
COMMIT = "0" * 39 + "1"


@dataclass
class FakeHub:
    """The served files of REPO. `more`: other repositories, by name. `cut`: bytes after which the next answers break off; `lies`: files served with other bytes.
    `sizeless`: files whose size is not said before they come. `pace`: seconds between the pieces of a file, eight of them.
    `refuses`: status and error code of the answers for a file, or for the listing (""); `in_body`: of its contents alone, not of its head.
    `rangeless`: ranges are not honoured. `elsewhere`: the server that contents are redirected to. `tokens`: of all requests for contents. `then`: files that take the place of others once one has been read."""

    files: dict[str, bytes]
    cut: list[int] = field(default_factory=list)
    lies: set[str] = field(default_factory=set)
    sizeless: set[str] = field(default_factory=set)
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # method, file, range
    url: str = ""
    pace: float = 0.0
    refuses: dict[str, tuple[int, str]] = field(default_factory=dict)
    in_body: dict[str, tuple[int, str]] = field(default_factory=dict)
    rangeless: bool = False
    then: dict[str, bytes] = field(default_factory=dict)
    elsewhere: str = ""
    tokens: list[str] = field(default_factory=list)
    more: dict[str, dict[str, bytes]] = field(default_factory=dict)


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """The hub at `hub.url` until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            repo = "/".join(path.removeprefix("/api/models").split("/")[1:3])
            files = hub.files if repo == REPO else hub.more.get(repo)
            if files is None:
                self.reply(404, b"", {})
                return
            if path.startswith("/api/models/"):
                self.refuse(*hub.refuses[""]) if "" in hub.refuses else self.listing(files)
                return
            if not path.startswith(f"/{repo}/resolve/main/"):
                self.reply(404, b"", {})
                return
            name = path.removeprefix(f"/{repo}/resolve/main/")
            data = files.get(name)
            hub.asked.append((self.command, name, self.headers.get("Range", "")))
            if body:
                hub.tokens.append(self.headers.get("Authorization", ""))
            if body and hub.elsewhere:
                self.reply(302, b"", {"Location": hub.elsewhere + self.path})
                return
            refused = hub.refuses.get(name) or (hub.in_body.get(name) if body else None)
            if refused is not None:
                self.refuse(*refused)
                return
            if data is None:
                self.reply(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
                return
            about = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}  # fmt: skip
            sent = bytes(b ^ 1 for b in data) if name in hub.lies else data
            first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last or len(sent)), len(sent) - 1)
            is_part = "Range" in self.headers and not hub.rangeless
            if not is_part:
                start, end = 0, len(sent) - 1
            if is_part:
                about["Content-Range"] = f"bytes {start}-{end}/{len(sent)}"
            says_size = body or name not in hub.sizeless
            if body and name in hub.then:  # before the reply: its reader may ask again at once
                files[name] = hub.then.pop(name)
            self.reply(206 if is_part else 200, sent[start : end + 1], about, body, says_size)

        def refuse(self, status: int, code: str) -> None:
            about = {"X-Error-Code": code, "X-Error-Message": f"Access to model {REPO} is restricted."}
            self.reply(status, b'{"error": "no"}', about if code else {})

        def listing(self, files: dict[str, bytes]) -> None:
            tree = [
                {"type": "file", "oid": "0" * 40, "size": len(data), "path": name}
                for name, data in files.items()
            ]
            self.reply(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})

        def reply(
            self,
            status: int,
            data: bytes,
            headers: dict[str, str],
            body: bool = True,
            says_size: bool = True,
        ) -> None:
            self.send_response(status)
            for key, value in (
                headers | ({"Content-Length": str(len(data))} if says_size else {})
            ).items():
                self.send_header(key, value)
            self.end_headers()
            if not body:
                return
            if hub.cut and status < 300 and "ETag" in headers:
                self.wfile.write(data[: hub.cut.pop(0)])
                self.close_connection = True
                return
            if not hub.pace or status != 200 or "ETag" not in headers:
                self.wfile.write(data)
                return
            step = -(-len(data) // 8)
            for at in range(0, len(data), step):
                self.wfile.write(data[at : at + step])
                self.wfile.flush()
                threading.Event().wait(hub.pace)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
