"""Images in `pyspec run`: files for one message, and for the next message of a chat."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from pyspec.cli import main
from pyspec.cli.run import AnswerOptions, talk
from pyspec.engine.api import Engine
from pyspec.request import Request, SamplingGiven, SamplingParams

FIXTURES = Path(__file__).parents[1] / "fixtures" / "images"
ASK = AnswerOptions(SamplingGiven(SamplingParams(temperature=0), frozenset({"temperature"})), 3, ())


@pytest.fixture
def engine() -> Iterator[Engine]:
    path, projector = FIXTURES / "qwen35.gguf", FIXTURES / "mmproj-qwen35.gguf"
    with Engine.load(path, None, mmproj=projector, np=1, ctx=1000) as loaded:
        yield loaded


def test_a_chat_takes_images(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    typed = [
        f"/image {FIXTURES / 'odd.png'}", "/image nowhere.png", "what?", "and now?",
        f"/image {broken}", "lost", f"/image {FIXTURES / 'wide.jpg'}", "/clear", "text", "/exit",
    ]  # fmt: skip
    said, seen, run = iter(typed), list[Request](), engine.run_stream

    def watched(request: Request) -> Any:
        seen.append(request)
        return run(request)

    monkeypatch.setattr(click, "prompt", lambda *args, **options: next(said))
    monkeypatch.setattr(engine, "run_stream", watched)
    talk(engine, ASK, "")
    err = capsys.readouterr().err
    assert "/image FILE adds an image" in err.splitlines()[0]
    assert "odd.png goes with the next message" in err and "there is no file nowhere.png" in err
    assert "the image is none of" in err
    assert [[image.picture.n_row for image in request.images] for request in seen] == [[30], [30], []]
    first, second, _ = (request.prompt for request in seen)
    n = seen[0].images[0].first + 30
    assert first[:n] == second[:n] and len(second) > len(first)


def test_images_want_a_message() -> None:
    image = ("--image", str(FIXTURES / "odd.png"))
    for words in (("-p", "text"), ("-f", str(FIXTURES / "qwen35.json"))):
        result = CliRunner().invoke(main, ["run", "demo", *words, *image])
        assert result.exit_code == 2 and "--image goes with a message" in result.stderr
