"""Pictures that clients send to a server process, and hostile ones: a sentence for their sender, while a stream beside them goes on."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from served_command import ServedCommand
from server_client import refusal

pytestmark = pytest.mark.slow
FIXTURES = Path(__file__).parents[1] / "fixtures" / "images"
RNG = np.random.default_rng(11)
COLOURS = Image.fromarray(RNG.integers(0, 255, (37, 45, 3), dtype=np.uint8))
TURNS = [COLOURS.rotate(90).resize(COLOURS.size), COLOURS.rotate(180)]
FEW = {"max_tokens": 4, "temperature": 0}


def saved(image: Image.Image, kind: str, **more: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **more)
    return out.getvalue()


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(RNG.integers(0, 255, (height, width, 3), dtype=np.uint8))


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, data: bytes, *more: bytes) -> bytes:
    """With a header that says this size, and any data."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    parts = head, *more, chunk(b"IDAT", zlib.compress(data, 9)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


PNG, JPEG = saved(COLOURS, "PNG"), saved(COLOURS, "JPEG")
ROWS = bytes(30 * 91)  # of a black picture of 30 x 30
READ = {
    "a JPEG with a rotation": saved(COLOURS, "JPEG", exif=turned()),
    "grey of 16 bits": saved(Image.fromarray(RNG.integers(0, 65535, (37, 45), dtype=np.uint16)), "PNG"),
    "alpha": saved(COLOURS.convert("RGBA"), "PNG"),
    "grey and alpha": saved(COLOURS.convert("LA"), "PNG"),
    "a palette whose colours are transparent": saved(COLOURS.convert("P"), "PNG", transparency=bytes(range(256))),
    "an animated GIF": saved(COLOURS, "GIF", save_all=True, append_images=TURNS),
    "an animated WebP": saved(COLOURS, "WEBP", save_all=True, append_images=TURNS),
    "an animated PNG": saved(COLOURS, "PNG", save_all=True, append_images=TURNS),
    "a progressive JPEG": saved(COLOURS, "JPEG", progressive=True),
    "20 x 4000": saved(Image.new("RGB", (20, 4000)), "PNG"),
    "4000 x 20": saved(Image.new("RGB", (4000, 20)), "PNG"),
    "more data than pixels": png(30, 30, bytes(30_000_000)),
    "a name of another type": JPEG,
}  # fmt: skip
REFUSED = {
    "1 x 4000": saved(Image.new("RGB", (1, 4000)), "PNG"),
    "4000 x 1": saved(Image.new("RGB", (4000, 1)), "PNG"),
    "nothing": b"",
    "half a PNG": PNG[: len(PNG) // 2],
    "half a JPEG": JPEG[: len(JPEG) // 2],
    "half a WebP": saved(COLOURS, "WEBP")[:100],
    "a bomb": png(60_000, 60_000, ROWS),
    "a bomb within the limit": png(7_900, 7_900, ROWS),
    "a bomb of text": png(30, 30, ROWS, chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(90_000_000), 9))),
    "a bomb of colours": png(30, 30, ROWS, chunk(b"iCCP", b"k\0\0" + zlib.compress(bytes(90_000_000), 9))),
    "a negative size": png(1 << 31, 30, ROWS),
    "a wrong sum": PNG[:20] + b"\xff" + PNG[21:],
    "text": b"I am a PNG",
    "SVG": b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
    "TIFF": saved(COLOURS, "TIFF"),
    "EPS, which Pillow gives to a program": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
}  # fmt: skip


def b64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def part(content: bytes | str) -> dict[str, Any]:
    url = content if isinstance(content, str) else f"data:image/png;base64,{b64(content)}"
    return {"type": "image_url", "image_url": {"url": url}}


def chat(*content: Any, **more: Any) -> dict[str, Any]:
    parts = [c if isinstance(c, dict) else {"type": "text", "text": c} for c in content]
    return {"messages": [{"role": "user", "content": parts}], **FEW, **more}


class Beside:
    """A client that streams the same text again and again. texts: of its answers; failed: the errors"""

    def __init__(self, url: str) -> None:
        self.url, self.texts, self.failed = url, list[str](), list[str]()
        self.is_over = False
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        body = chat("the picture then tell", max_tokens=60, stream=True, ignore_eos=True)
        while not self.is_over:
            try:
                with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=body, timeout=60) as r:
                    told = [json.loads(x[6:]) for x in r.iter_lines() if x.startswith("data: {")]
                self.texts.append(
                    "".join(c["delta"].get("content") or "" for t in told for c in t["choices"])
                )
            except Exception as e:  # noqa: BLE001 - any error
                self.failed.append(repr(e))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCommand]:
    words = [str(FIXTURES / "qwen35.gguf"), "--mmproj", str(FIXTURES / "mmproj-qwen35.gguf"), "--spec-type", "mtp,suffix"]  # fmt: skip
    words += ["--device", "cpu", "-np", "4", "-c", "4096", "--port", "0", "--cache-reuse", "16"]
    served = ServedCommand("", [*words, "--slot-save-path", str(tmp_path_factory.mktemp("slots"))])
    yield served
    served.process.send_signal(signal.SIGINT)
    served.process.wait(30)


@contextmanager
def asking(served: ServedCommand) -> Iterator[httpx.Client]:
    """A client; beside it a stream goes on and keeps its text, and the server writes no traceback."""
    n_line, beside = len(served.log), Beside(served.url)
    try:
        with httpx.Client(base_url=served.url, timeout=120) as client:
            yield client
            n = len(beside.texts)
            while len(beside.texts) < n + 2 and not beside.failed:
                time.sleep(0.01)
            assert client.get("/health").json() == {"status": "ok"}
    finally:
        beside.is_over = True
        beside.thread.join()
    assert len({*beside.texts}) == 1 and not beside.failed
    assert not [line for line in served.log[n_line:] if "Traceback" in line or "Error" in line]


def test_pictures_of_clients_are_read_and_hostile_ones_refused(served: ServedCommand) -> None:
    with asking(served) as client:
        for name, content in READ.items():
            answer = client.post("/v1/chat/completions", json=chat("see", part(content)))
            assert answer.status_code == 200, (name, answer.text)
            assert answer.json()["usage"]["completion_tokens"] == 4
        for name, content in REFUSED.items():
            answer = client.post("/v1/chat/completions", json=chat("see", part(content)))
            assert answer.status_code == 400, (name, answer.text)
            assert answer.json()["error"]["message"].startswith("messages.0.content.1: the image"), name


def test_the_first_frame_and_no_rotation(served: ServedCommand) -> None:
    with asking(served) as client:

        def said(content: bytes) -> Any:
            more = {"max_tokens": 20, "logprobs": True, "cache_prompt": False}
            answer = client.post("/v1/chat/completions", json=chat("see", part(content), **more)).json()
            return answer["choices"][0]["message"], answer["choices"][0]["logprobs"]

        want = said(PNG)
        for name in ("an animated PNG", "alpha"):
            assert said(READ[name]) == want, name
        assert said(READ["a JPEG with a rotation"]) == said(JPEG) != want
        assert said(saved(TURNS[0], "PNG")) != want, "the test sees which picture it was"


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/x-own+xml;charset=utf-8;base64,{b64(PNG)}",
        f"DATA:IMAGE/PNG;BASE64,{b64(PNG)}",
        "data:image/png;base64,"
        + "\r\n".join(b64(PNG)[i : i + 76] for i in range(0, len(b64(PNG)), 76)),
        b64(PNG) + "\n",
    ],
    ids=range(4),
)
def test_odd_forms_of_a_data_url(served: ServedCommand, url: str) -> None:
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=chat("see", part(url)), timeout=60)
    assert answer.status_code == 200, answer.text


def test_urls_that_are_no_picture_are_refused_at_once(served: ServedCommand) -> None:
    pad = b64(PNG).rstrip("=")
    urls = [
        "data:image/png,abc", f"data:;base64,{pad}", f"data:application/pdf;base64,{b64(PNG)}", "data:image/png;base64,\0\0",
        "data:image/png;base64," + base64.urlsafe_b64encode(b"\xff" * 99).decode(), "data:image/png;base64,é中",
        "data:image/" + "a" * 100_000 + ";base64,AAAA", "data:image/png" + ";a" * 200_000 + ",x", "blob:http://x/y", "javascript:x()",
    ]  # fmt: skip
    with asking(served) as client:
        for url in urls:
            began = time.monotonic()
            assert refusal(client.post("/v1/chat/completions", json=chat(part(url)))).startswith(
                "messages.0"
            )
            assert time.monotonic() - began < 10


def test_pictures_with_all_that_a_request_may_want(served: ServedCommand) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "yz"]}, "b": {"type": "integer"}}, "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
    with asking(served) as client:

        def post(body: dict[str, Any], path: str = "/v1/chat/completions") -> Any:
            answer = client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        two = post(
            chat("n", part(saved(noise(50, 70), "PNG")), n=2, temperature=1.0, seed=5, max_tokens=9)
        )
        assert len({c["message"]["content"] for c in two["choices"]}) == 2
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        asked = chat("json", part(PNG), response_format=form, max_tokens=300, logit_bias={"198": -100})
        told = json.loads(post(asked)["choices"][0]["message"]["content"])
        assert told["a"] in ("x", "yz") and isinstance(told["b"], int)
        many = [part(saved(noise(33 + i, 40), "PNG")) for i in range(32)]
        assert post(chat(*many))["usage"]["prompt_tokens"] > 32 * 20
        call = {"id": "a", "type": "function", "function": {"name": "shot", "arguments": "{}"}}
        turns = [
            {"role": "system", "content": [part(PNG)]},
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": [part(JPEG)], "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": [part(PNG), {"type": "text", "text": "t"}]},
        ]
        assert post({"messages": turns, **FEW})["usage"]["prompt_tokens"] > 3 * 20
        saved_one = chat("look", part(saved(noise(64, 48), "PNG")), id_slot=1, max_tokens=6)
        first = post(saved_one)
        assert post({"filename": "a.bin"}, "/slots/1?action=save")["n_saved"] > 20
        post({}, "/slots/1?action=erase")
        post({"filename": "a.bin"}, "/slots/2?action=restore")
        again = post({**saved_one, "id_slot": 2})
        assert again["choices"][0]["message"] == first["choices"][0]["message"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48, "rows of the picture"


def test_clients_that_leave_while_a_picture_is_encoded(served: ServedCommand) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    large = [saved(noise(300 + i, 320), "PNG") for i in range(5)]
    with asking(served) as client:
        for content in large:
            for delay in (0.02, 0.2, 0.5):
                body = json.dumps(chat("s", part(content), stream=True, max_tokens=50)).encode()
                head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                with socket.create_connection((host, int(port))) as sock:
                    sock.sendall(head.encode() + body)
                    time.sleep(delay)
        with socket.create_connection((host, int(port))) as sock:  # and in the middle of a body
            sock.sendall(head.encode() + body[: len(body) // 2])
        answer = client.post("/v1/chat/completions", json=chat("s", part(large[0])))
        assert answer.status_code == 200
        slots = client.get("/slots").json()
        assert sum(slot["is_processing"] for slot in slots) <= 1
    assert os.path.exists(f"/proc/{served.process.pid}")
