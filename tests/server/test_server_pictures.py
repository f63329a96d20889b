"""Pictures in every API: the engine gets rows, and senders of bad ones a sentence."""

from __future__ import annotations

import base64
import io
import json
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
from PIL import Image
from router_fakes import World, serving
from server_client import App, app_of, refusal
from server_fakes import FakeEngine
from server_live import Live

from pyspec.engine.api import Engine
from pyspec.engine.sight import NO_PROJECTOR
from pyspec.gguf import open_gguf
from pyspec.request import Request
from pyspec.server import fetch
from pyspec.server.api.pictures import MARKER, SentPictures
from pyspec.server.media import media_of
from pyspec.server.settings import ServerSettings
from pyspec.slots.images import IMAGE
from pyspec.text.left_out import NO_IMAGE
from pyspec.text.tokenizer import Tokenizer
from pyspec.vision.pixels import prepared
from pyspec.vision.projector import read_projector

FIXTURES = Path(__file__).parents[1] / "fixtures" / "images"
PROJECTOR = FIXTURES / "mmproj-qwen35.gguf"
ODD, WIDE = (FIXTURES / "odd.png").read_bytes(), (FIXTURES / "wide.jpg").read_bytes()
N_ODD, N_WIDE = 30, 128  # rows, by the fixtures' qwen35.json
BEFORE, AFTER = "<|vision_start|>", "<|vision_end|>"
AT = "messages.0.content.0"


def b64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def url(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{b64(content)}"


def part(content: bytes | str) -> dict[str, Any]:
    return {
        "type": "image_url",
        "image_url": {"url": content if isinstance(content, str) else url(content)},
    }


def chat(*content: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    parts = [c if isinstance(c, dict) else {"type": "text", "text": c} for c in content]
    return {"messages": [{"role": role, "content": parts}], **more}


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine(n_ctx=20011)
    fake.info = replace(fake.info, mmproj=str(PROJECTOR))
    yield fake
    fake.close()


def blind() -> FakeEngine:
    return FakeEngine(n_ctx=20011)


def shown(request: Request) -> str:
    """The prompt's text with {n} for n rows of a picture."""
    text, at = bytearray(), 0
    for image in request.images:
        end = image.first + image.picture.n_row
        assert set(request.prompt[image.first : end]) == {IMAGE}
        text += (
            bytes(t for t in request.prompt[at : image.first] if t < 256) + b"{%d}" % image.picture.n_row
        )
        at = end
    assert all(t < 258 for t in request.prompt[at:])
    return (text + bytes(t for t in request.prompt[at:] if t < 256)).decode()


def of(n: int) -> str:
    return f"{BEFORE}{{{n}}}{AFTER}"


def test_a_part_of_a_chat_becomes_rows_where_it_stands(app: App, engine: FakeEngine) -> None:
    body = chat("What is ", part(ODD), "this", "here?", part(WIDE))
    answer = app.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    (seen,) = engine.seen
    assert shown(seen) == f"user: What is {of(N_ODD)}this\nhere?{of(N_WIDE)}\nassistant: "
    assert answer.json()["usage"]["prompt_tokens"] == len(seen.prompt) and seen.prompt[0] == 256
    first, second = (image.picture for image in seen.images)
    projector = read_projector(PROJECTOR)
    assert first.digest == prepared(projector, ODD).digest != second.digest
    assert np.array_equal(second.pixels, prepared(projector, WIDE).pixels)


@pytest.mark.parametrize(
    "form",
    [
        {"type": "image_url", "image_url": url(ODD)},
        {"type": "image_url", "image_url": {"url": url(ODD, "jpeg"), "detail": "low"}},
        {"type": "image_url", "image_url": {"url": b64(ODD)}},
        {"type": "image_url", "image_url": {"url": f"data:image/png;name=a;base64,{b64(ODD)}"}},
        {"type": "image_url", "image_url": {"url": "\n".join([url(ODD)[:100], url(ODD)[100:]])}},
    ],
)
@pytest.mark.parametrize("role", ["user", "system", "assistant"])
def test_every_form_and_every_role(app: App, engine: FakeEngine, form: Any, role: str) -> None:
    body = {"messages": [{"role": role, "content": [form]}, {"role": "user", "content": "?"}]}
    assert app.post("/v1/chat/completions", body).status_code == 200
    assert f"{role}: {of(N_ODD)}\n" in shown(engine.seen[0])


@pytest.mark.parametrize("name", ["qwen35", "gemma3", "gemma4", "gemma4-e", "mistral3"])
def test_the_ids_around_pictures_are_llama_cpps(name: str) -> None:
    with open_gguf(FIXTURES / f"{name}.gguf") as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
    info = replace(blind().info, mmproj=str(FIXTURES / f"mmproj-{name}.gguf"))
    media = media_of(info, ServerSettings())
    assert media is not None
    prompts = json.loads((FIXTURES / f"{name}.json").read_text())["prompts"]
    assert len(prompts) == 4
    for prompt in prompts.values():
        pictures, texts = SentPictures(media), [""]
        for each in prompt["parts"]:
            if isinstance(each, str):
                texts[-1] += each
            else:
                pictures.add(b64((FIXTURES / each["image"]).read_bytes()), "here")
                texts.append("")
        found = pictures.encoded(tokenizer, texts)
        chunks = [chunk.get("ids") or [IMAGE] * chunk["image_tokens"] for chunk in prompt["chunks"]]
        assert [*found.ids] == [token for chunk in chunks for token in chunk]
        sizes = [(c["nx"], c["ny"], c["image_tokens"]) for c in prompt["chunks"] if "nx" in c]
        placed = [(p.picture.nx, p.picture.ny, p.picture.n_row) for p in found.images]
        assert placed == sizes and len(found.ids) == prompt["prompt_tokens"]


def test_a_picture_comes_first_and_bos_before_it(app: App, engine: FakeEngine) -> None:
    body = {"prompt": {"prompt_string": MARKER + "x", "multimodal_data": [b64(ODD)]}}
    answer = app.post("/completion", body)
    assert answer.status_code == 200, answer.text
    assert engine.seen[0].prompt[0] == 256 and shown(engine.seen[0]) == of(N_ODD) + "x"
    assert answer.json()["prompt"] == f"<s>{BEFORE}[image]{AFTER}x"
    assert answer.json()["tokens_evaluated"] == len(engine.seen[0].prompt)


def test_completion_wants_a_marker_for_each_picture(app: App, engine: FakeEngine) -> None:
    assert app.get("/props").json()["media_marker"] == MARKER
    for text, data, wanted in (
        ("no marker", [b64(ODD)], "1 images and 0 markers"),
        (MARKER * 3, [b64(ODD)] * 2, "2 images and 3 markers"),
        (MARKER, ["AAAA"], "prompt.multimodal_data.0: the image is none of"),
        (MARKER, ["?"], "prompt.multimodal_data.0: it is not base64"),
    ):
        assert wanted in refusal(
            app.post("/completion", {"prompt": {"prompt_string": text, "multimodal_data": data}})
        )
    many = [{"prompt_string": MARKER * 11, "multimodal_data": [b64(ODD)] * 11}] * 3
    assert (
        "33 images; at most 32" in app.post("/completion", {"prompt": many}).json()["error"]["message"]
    )
    two = [{"prompt_string": MARKER, "multimodal_data": [b64(ODD)]}, "text", {"prompt_string": MARKER}]
    assert app.post("/completion", {"prompt": two}).status_code == 200
    assert [shown(request) for request in engine.seen] == [of(N_ODD), "text", MARKER]


def test_a_marker_in_a_text_is_text(app: App, engine: FakeEngine) -> None:
    assert app.post("/v1/chat/completions", chat(f"say {MARKER}", part(ODD))).status_code == 200
    assert shown(engine.seen[0]) == f"user: say {MARKER}{of(N_ODD)}\nassistant: "


def test_responses(app: App, engine: FakeEngine) -> None:
    image = {"type": "input_image", "image_url": url(ODD), "detail": "auto"}
    call = {"type": "function_call", "call_id": "c", "name": "shot", "arguments": "{}"}
    sent = [
        {"role": "user", "content": [{"type": "input_text", "text": "look"}, image]},
        call,
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [image, {"type": "input_text", "text": "s"}],
        },
    ]
    answer = app.post("/v1/responses", {"input": sent})
    assert answer.status_code == 200, answer.text
    text = shown(engine.seen[0])
    assert f"user: look{of(N_ODD)}\n" in text and f"<tool_response>\n{of(N_ODD)}s\n" in text
    assert answer.json()["usage"]["input_tokens"] == len(engine.seen[0].prompt)
    refused = app.post(
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
    )
    assert refused.status_code == 400 and "file_id is not supported" in refused.text


def test_anthropic(app: App, engine: FakeEngine) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": b64(ODD)}}
    use = {"type": "tool_use", "id": "t", "name": "shot", "input": {}}
    result = [
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
        image,
        {"type": "text", "text": "c"},
    ]
    messages = [
        {"role": "user", "content": [image, {"type": "text", "text": "look"}]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": result}]},
    ]
    body = {"messages": messages, "max_tokens": 7}
    answer = app.post("/v1/messages", body)
    assert answer.status_code == 200, answer.text
    text = shown(engine.seen[0])
    assert f"user: {of(N_ODD)}look\n" in text and f"<tool_response>\nab{of(N_ODD)}c\n" in text
    n_prompt = len(engine.seen[0].prompt)
    usage = answer.json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == n_prompt
    counted = app.post("/v1/messages/count_tokens", {"messages": messages})
    assert counted.json() == {"input_tokens": n_prompt} and len(engine.seen) == 1
    for source, wanted in (
        ({"type": "file", "file_id": "f"}, "an image's source is base64 or url, not 'file'"),
        ({"type": "base64", "data": "AAAA"}, "source.media_type"),
        ({"type": "url", "url": "https://example.org/a.png"}, "not fetched from URLs"),
    ):
        sent = {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
        assert wanted in refusal(app.post("/v1/messages", sent))


def test_counting_and_rendering_decode_nothing(
    app: App, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(*_: Any) -> None:
        raise AssertionError("it was decoded")

    body = chat("a", part(ODD), part(WIDE))
    monkeypatch.setattr("pyspec.server.media.prepared", decode)
    counted = app.post("/v1/chat/completions/input_tokens", body).json()["input_tokens"]
    shown_text = app.post("/apply-template", body).json()["prompt"]
    assert shown_text == f"user: a{MARKER}{MARKER}\nassistant: " and not engine.seen
    monkeypatch.undo()
    app.post("/v1/chat/completions", body)
    assert counted == len(engine.seen[0].prompt)


def test_a_rendered_prompt_can_be_completed(app: App, engine: FakeEngine) -> None:
    body = chat("a", part(ODD))
    text = app.post("/apply-template", body).json()["prompt"]
    app.post("/completion", {"prompt": {"prompt_string": text, "multimodal_data": [b64(ODD)]}})
    app.post("/v1/chat/completions", body)
    assert engine.seen[0].prompt == engine.seen[1].prompt


def test_what_a_model_that_sees_says_of_itself(app: App) -> None:
    assert app.get("/props").json()["modalities"] == {"vision": True, "video": False, "audio": False}
    assert app.get("/v1/models").json()["models"][0]["capabilities"] == ["completion", "multimodal"]
    assert app.get("/model_info").json()["has_image_understanding"] is True


def test_without_a_projector_users_are_refused_and_tools_get_a_line() -> None:
    fake = blind()
    try:
        app = app_of(fake)
        assert refusal(app.post("/v1/chat/completions", chat(part(ODD)))) == f"{AT}: {NO_PROJECTOR}"
        body = {"prompt": {"prompt_string": MARKER, "multimodal_data": [b64(ODD)]}}
        assert NO_PROJECTOR in app.post("/completion", body).json()["error"]["message"]
        assert NO_PROJECTOR in app.post("/apply-template", chat(part(ODD))).json()["error"]["message"]
        assert app.post("/v1/chat/completions", chat("Shot:", part(ODD), role="tool")).status_code == 200
        assert f"<tool_response>\nShot:\n{NO_IMAGE}" in shown(fake.seen[0])
        assert app.get("/props").json()["modalities"]["vision"] is False
        assert app.get("/v1/models").json()["models"][0]["capabilities"] == ["completion"]
        assert app.post("/v1/chat/completions", chat(part(ODD + bytes(9 << 20)))).status_code == 413
    finally:
        fake.close()


# -- broken and hostile pictures -------------------------------------------------------------------------------------------


def png(width: int, height: int) -> bytes:
    """A file whose header says this size."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(bytes(64))), (b"IEND", b""))
    body = (struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def saved(image: Image.Image, kind: str, **more: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **more)
    return out.getvalue()


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        ("", "the image is empty"),
        ("not base64!", "it is not base64"),
        ("data:image/png;base64,####", "it is not base64"),
        (url(ODD[: len(ODD) // 2]), "can not be decoded"),
        (url(b"GIF89a"), "the image"),
        (url(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "the image is none of"),
        (url(png(60000, 60000)), "pixels by its header"),
        (url(png(0, 7)), "the image"),
        (url(png(1, 4000)), "one side may be 200 times the other"),
        (url(bytes(21 << 20)), "20000000 bytes"),
        ("data:audio/wav;base64,AAAA", "audio input is out of scope"),
        ("data:video/mp4;base64,AAAA", "video input is out of scope"),
        ("data:text/plain;base64,AAAA", "want data:image/"),
        ("http://example.org/a.png", "pictures are not fetched from URLs"),
        ("HTTPS://example.org/a.png", "pictures are not fetched from URLs"),
        ("file:///etc/passwd", "files are read only below"),
        ("ftp://example.org/a.png", "want data:image/"),
    ],
)  # fmt: skip
def test_a_broken_picture_is_its_senders(app: App, engine: FakeEngine, sent: str, wanted: str) -> None:
    answer = app.post("/v1/chat/completions", chat(part(sent)))
    said = answer.json()["error"]["message"]
    assert answer.status_code == 400 and said.startswith(AT) and wanted in said, said
    assert not engine.seen


def test_a_broken_picture_is_named_by_its_place_in_the_body_that_was_sent(app: App) -> None:
    """System prompts and results of tools are messages of their own in the form that all APIs are brought to."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "@"}}
    calls = [{"type": "tool_use", "id": x, "name": "shot", "input": {}} for x in "ab"]
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": "x"},
        {"type": "tool_result", "tool_use_id": "b", "content": [image]},
    ]
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": calls}]
    body = {"max_tokens": 2, "system": "s", "messages": [*turns, {"role": "user", "content": results}]}
    at = "messages.2.content.1.content.0: it is not base64"
    assert app.post("/v1/messages", body).json()["error"]["message"] == at
    input_image = {"type": "input_image", "image_url": "data:image/png;base64,@"}
    asked = [{"role": "user", "content": "q"}, {"role": "user", "content": [input_image]}]
    body = {"instructions": "s", "input": asked}
    assert refusal(app.post("/v1/responses", body)) == "input.1.content.0: it is not base64"


@pytest.mark.parametrize(
    "sent",
    [f" {url(ODD)}", url(ODD).rstrip("="), f"{url(ODD)}==", f"data:image/png; base64,{b64(ODD)}"],
    ids=range(4),
)
def test_forms_that_llama_server_or_browsers_take(app: App, engine: FakeEngine, sent: str) -> None:
    assert app.post("/v1/chat/completions", chat(part(sent))).status_code == 200
    assert engine.seen[-1].images[0].picture.n_row == N_ODD


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        ({"type": "image_url"}, f"{AT}.image_url.url: a string is needed"),
        ({"type": "image_url", "image_url": {"url": 7}}, f"{AT}.image_url.url: a string is needed"),
        ({"type": "input_audio", "input_audio": {}}, "audio input ('input_audio') is out of scope"),
        ({"type": "video_url", "video_url": {}}, "video input ('video_url') is out of scope"),
        ({"type": "file", "file": {}}, "parts of type 'file' are not supported"),
    ],
)
def test_other_parts_are_refused_by_name(app: App, sent: dict[str, Any], wanted: str) -> None:
    assert wanted in refusal(app.post("/v1/chat/completions", chat(sent)))


def test_more_than_32_pictures(app: App, engine: FakeEngine) -> None:
    assert "at most 32 images" in refusal(app.post("/v1/chat/completions", chat(*[part(ODD)] * 33)))
    assert app.post("/v1/chat/completions", chat(*[part(ODD)] * 32, max_tokens=1)).status_code == 200
    assert len(engine.seen[0].images) == 32


def test_odd_files_are_read(app: App, engine: FakeEngine) -> None:
    rng = np.random.default_rng(7)
    colours = Image.fromarray(rng.integers(0, 255, (37, 45, 3), dtype=np.uint8))
    deep = Image.fromarray(rng.integers(0, 65535, (37, 45), dtype=np.uint16))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees: parity with llama.cpp, which does not turn it
    files = [
        saved(colours, "JPEG", exif=exif), saved(deep, "PNG"), saved(colours.convert("RGBA"), "PNG"),
        saved(colours.convert("P"), "PNG"), saved(colours.convert("P"), "GIF", save_all=True, append_images=[colours]),
        saved(colours, "WEBP"), saved(colours, "BMP"), saved(colours.convert("CMYK"), "JPEG"),
        saved(colours.convert("1"), "PNG"), saved(Image.new("RGB", (1, 1)), "PNG"), saved(colours.resize((9, 1700)), "PNG"),
    ]  # fmt: skip
    for file in files:
        answer = app.post("/v1/chat/completions", chat(part(file), max_tokens=1))
        assert answer.status_code == 200, answer.text
    assert [seen.images[0].picture.nx for seen in engine.seen[:9]] == [6] * 9


def test_a_prompt_beyond_the_context_counts_rows() -> None:
    fake = FakeEngine(n_ctx=101)
    fake.info = replace(fake.info, mmproj=str(PROJECTOR))
    try:
        answer = app_of(fake).post("/v1/chat/completions", chat(part(WIDE)))
        assert answer.status_code == 400 and answer.json()["error"]["n_prompt_tokens"] > N_WIDE
    finally:
        fake.close()


def test_a_continued_message_and_a_template_that_drops(app: App, engine: FakeEngine) -> None:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": [part(ODD)]}]
    answer = app.post("/v1/chat/completions", {"messages": messages})
    assert answer.status_code == 400 and "can not be continued" in answer.text

    class Deaf:
        def __getattr__(self, name: str) -> Any:
            return getattr(template, name)

        def encode(self, tokenizer: Any, messages: Any, **more: Any) -> list[int]:
            return template.encode(tokenizer, [{**m, "content": "gone"} for m in messages], **more)

    template, engine.template = engine.template, Deaf()  # type: ignore[assignment]
    answer = app.post("/v1/chat/completions", chat(part(ODD)))
    assert answer.status_code == 400 and "leaves out image 1 of 1" in answer.text


def test_the_same_picture_is_decoded_once(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    n = [0]

    def decode(*given: Any) -> Any:
        n[0] += 1
        return prepared(*given)

    monkeypatch.setattr("pyspec.server.media.prepared", decode)
    for _ in range(3):
        assert (
            app.post("/v1/chat/completions", chat(part(ODD), part(ODD), max_tokens=1)).status_code == 200
        )
    assert n[0] == 1


# -- files and URLs --------------------------------------------------------------------------------------------------------


def test_files_below_a_folder(engine: FakeEngine, tmp_path: Path) -> None:
    folder = tmp_path / "media"
    (folder / "in").mkdir(parents=True)
    (folder / "in" / "o d.png").write_bytes(ODD)
    (folder / "big.png").write_bytes(bytes(20_000_001))
    (tmp_path / "secret.png").write_bytes(ODD)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    app = app_of(engine, media_path=str(folder))
    for name in ("file://in/o%20d.png", f"file://{folder}/in/o%20d.png"):
        assert app.post("/v1/chat/completions", chat(part(name), max_tokens=1)).status_code == 200
    for name in (
        "../secret.png",
        "link.png",
        f"{tmp_path}/secret.png",
        "in",
        "none.png",
        "%00",
        "",
        "/dev/zero",
    ):
        answer = app.post("/v1/chat/completions", chat(part(f"file://{name}")))
        assert answer.status_code == 400 and "no such file" in answer.text, name
    assert "20000000 bytes" in app.post("/v1/chat/completions", chat(part("file://big.png"))).text


class Pages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path[4:])
            self.end_headers()
            return
        self.send_response(404 if self.path == "/none" else 200)
        self.end_headers()
        if self.path == "/slow":
            for _ in range(50):
                self.wfile.write(b"x")
                time.sleep(0.1)
        elif self.path == "/endless":
            for _ in range(200):
                self.wfile.write(bytes(1 << 16))
        else:
            self.wfile.write(ODD)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def pages() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_hosts_that_are_named_are_asked_if_they_are_public(
    engine: FakeEngine, pages: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = replace(ServerSettings().limits, fetch_s=1.0)
    app = app_of(engine, media_hosts=(pages, "localhost"), limits=limits)

    def said(path: str) -> str:
        answer = app.post("/v1/chat/completions", chat(part(path), max_tokens=1))
        return "ok" if answer.status_code == 200 else answer.json()["error"]["message"]

    assert "an address that is not public" in said(f"http://{pages}/odd.png")
    assert "an address that is not public" in said("http://localhost/odd.png")
    assert "is not among the hosts" in said("http://169.254.169.254/latest/meta-data")
    assert "is not among the hosts" in said("http://localhost:22/")
    assert "without a name and a password" in said(f"http://localhost@{pages}/odd.png")
    monkeypatch.setattr(fetch, "is_public", lambda address: True)
    assert said(f"http://{pages}/odd.png") == "ok"
    assert said(f"http://{pages}/to//odd.png") == "ok"
    assert "answers with status 404" in said(f"http://{pages}/none")
    assert "is not among the hosts" in said(f"http://{pages}/to/http://127.0.0.1/odd.png")
    assert "is not among the hosts" in said(f"http://{pages}/to/http://127.0.0.2:{pages[10:]}/odd.png")
    assert "want a URL such as" in said(f"http://{pages}/to/file:///etc/passwd")
    assert "3 redirects" in said(f"http://{pages}/to//to//to//to//odd.png")
    assert "more than 10485760 bytes" in said(f"http://{pages}/endless")
    began = time.monotonic()
    assert "takes too long" in said(f"http://{pages}/slow") and time.monotonic() - began < 3


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "192.168.7.7", "172.16.0.1", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255",
     "::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::"],
)  # fmt: skip
def test_addresses_that_are_not_asked(address: str) -> None:
    assert not fetch.is_public(fetch.ip_address(address))


def test_public_addresses() -> None:
    for address in ("93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946", "64:ff9b::5db8:d822"):
        assert fetch.is_public(fetch.ip_address(address))


def test_several_models_say_which_see_and_take_large_bodies() -> None:
    rng = np.random.default_rng(5)
    large = saved(Image.fromarray(rng.integers(0, 255, (1700, 2100, 3), dtype=np.uint8)), "PNG")
    assert len(large) > 9 << 20
    world = World({"a": 10, "b": 10}, more={"a": {"sees": True}}, projectors={"a": str(PROJECTOR)})
    with serving(world) as c:
        for loaded in (False, True):
            rows = c.get("/models").json()
            seen = {row["id"]: row["architecture"]["input_modalities"] for row in rows["data"]}
            assert seen == {"a": ["text", "image"], "b": ["text"]}
            able = {row["name"]: row["capabilities"] for row in rows["models"]}
            assert able == {"a": ["completion", "multimodal"], "b": ["completion"]}
            if loaded:
                continue
            for name, sent, status in (
                ("a", ODD, 200),
                ("b", ODD, 400),
                ("a", large, 400),
                ("b", large, 413),
            ):
                answer = c.post("/v1/chat/completions", chat(part(sent), model=name))
                assert answer.status_code == status, answer.text
            assert (
                "exceeds the available context"
                in c.post("/v1/chat/completions", chat(part(large), model="a")).text
            )


# -- a model ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "qwen35",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("gemma3", "gemma4", "gemma4-e", "mistral3")),
    ],
)
def test_the_answers_are_llama_cpps(name: str) -> None:
    path = FIXTURES / f"{name}.gguf"
    draft = "mtp" if name == "qwen35" else None
    with Engine.load(path, draft, mmproj=FIXTURES / f"mmproj-{name}.gguf", np=7, ctx=1000) as engine:
        app = app_of(engine)
        for prompt in json.loads((FIXTURES / f"{name}.json").read_text())["prompts"].values():
            files = [each["image"] for each in prompt["parts"] if not isinstance(each, str)]
            text = "".join(each if isinstance(each, str) else MARKER for each in prompt["parts"])
            data = [b64((FIXTURES / file).read_bytes()) for file in files]
            given = {"prompt_string": text, "multimodal_data": data}
            body = {"prompt": given, "n_predict": 12, "temperature": 0, "return_tokens": True}
            answer = app.post("/completion", body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["tokens"] == prompt["tokens"]
            assert answer.json()["tokens_evaluated"] == prompt["prompt_tokens"]
        again = app.post("/completion", body).json()
        assert again["tokens"] == prompt["tokens"] and again["timings"]["cache_n"] > 0


# -- real clients ----------------------------------------------------------------------------------------------------------


def test_the_openai_client_sends_pictures(live: Live, engine: FakeEngine) -> None:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0, timeout=20) as client:
        content: Any = [{"type": "text", "text": "what?"}, part(ODD)]
        answer = client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": content}]
        )
        assert answer.choices[0].message.content == "Hello, world"
        assert answer.usage is not None and answer.usage.prompt_tokens == len(engine.seen[0].prompt)
        sent: Any = [
            {
                "role": "user",
                "content": [{"type": "input_image", "image_url": url(WIDE), "detail": "auto"}],
            }
        ]
        assert client.responses.create(model="any", input=sent).output_text == "Hello, world"
        with pytest.raises(openai.BadRequestError, match="pictures are not fetched"):
            bad: Any = [{"role": "user", "content": [part("https://example.org/x.png")]}]
            client.chat.completions.create(model="any", messages=bad)
    assert [len(seen.images) for seen in engine.seen] == [1, 1]


def test_the_anthropic_client_sends_pictures(live: Live, engine: FakeEngine) -> None:
    with anthropic.Anthropic(base_url=live.url, api_key="unused", max_retries=0, timeout=20) as client:
        source: Any = {"type": "base64", "media_type": "image/jpeg", "data": b64(WIDE)}
        content: Any = [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]
        messages: Any = [{"role": "user", "content": content}]
        with client.messages.stream(model="any", max_tokens=20, messages=messages) as stream:
            assert stream.get_final_message().content[0].text == "Hello, world"
        n = client.messages.count_tokens(model="any", messages=messages).input_tokens
        assert n == len(engine.seen[0].prompt) > N_WIDE


def test_large_bodies_are_taken_and_a_broken_one_costs_only_its_sender(
    live: Live, engine: FakeEngine
) -> None:
    rng = np.random.default_rng(3)
    large = saved(Image.fromarray(rng.integers(0, 255, (2100, 2500, 3), dtype=np.uint8)), "PNG")
    assert len(large) > 15 << 20
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        content: Any = [part(large)]
        answer = client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": content}]
        )
        assert answer.usage is not None and answer.usage.prompt_tokens > 1000
        with pytest.raises(openai.BadRequestError):
            content = [part(large[:-1000])]
            client.chat.completions.create(model="any", messages=[{"role": "user", "content": content}])
        text: Any = [{"role": "user", "content": "hi"}]
        assert client.chat.completions.create(model="any", messages=text).choices


def test_the_document_has_pictures(app: App) -> None:
    document = json.dumps(app.get("/openapi.json").json())
    assert "image_url" in document and "multimodal_data" in document
