"""A server that refuses, breaks off, lies or changes its files: one line for each, before a download if the head shows it."""
# ruff: noqa: F811

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hub_server import REPO, FakeHub, serving
from rewrite import rewrite
from test_hub import there  # noqa: F401  (a fixture)

from pyspec import hub, synth
from pyspec.cli import main
from pyspec.errors import DownloadError
from pyspec.gguf import open_gguf
from pyspec.hub import heads

HEAD, NAME = 60_000, "m-Q8_0.gguf"
GATED, NO_SUCH, REFUSED = "it is gated: accept its terms", "no such repository, or it is private", "refuses access (403)"  # fmt: skip
BUSY, FAILED = "takes no more requests for now (429)", "the server failed (500); try again later"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """Two models."""
    folder = tmp_path_factory.mktemp("models")
    first = synth.write("qwen3", folder / "a.gguf", tiny=True)
    other = synth.write("qwen35", folder / "b.gguf", tiny=True, mtp=False)
    return first.read_bytes(), other.read_bytes()


@pytest.fixture(autouse=True)
def _small_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "FIRST_BYTES", HEAD)


CASES: dict[str, tuple[dict[str, Any], int, str]] = {
    "a gated repository": ({"refuses": {"": (401, "GatedRepo")}}, 7, GATED),
    "a gated file": ({"refuses": {NAME: (403, "GatedRepo")}}, 7, GATED),
    "a file that is gated when it is read": ({"in_body": {NAME: (401, "GatedRepo")}}, 7, GATED),
    "a private repository": ({"refuses": {"": (401, "RepoNotFound")}}, 7, NO_SUCH),
    "no repository": ({"refuses": {"": (404, "RepoNotFound")}}, 7, NO_SUCH),
    "a wrong token": ({"in_body": {NAME: (403, "")}}, 7, REFUSED),
    "too many requests": ({"in_body": {NAME: (429, "")}}, 7, BUSY),
    "a broken server": ({"refuses": {NAME: (500, "")}}, 7, FAILED),
    "ranges that do not exist": ({"in_body": {NAME: (416, "")}}, 7, "416"),
    "connections that break off": ({"cut": [1000] * 9}, 7, f"{NAME}: the connection breaks off in its first {HEAD} bytes"),
    "connections without a byte": ({"cut": [0]}, 7, f"{NAME}: the connection breaks off in its first {HEAD} bytes"),
    "a web page": ({"files": {NAME: b"<html>" * 20_000}}, 3, "it is not a GGUF file"),
    "an empty file": ({"files": {NAME: b""}}, 3, "0 bytes is too short"),
    "a file of a few bytes": ({"files": {NAME: b"GGUF\x03\0\0\0"}}, 3, "8 bytes is too short"),
    "other contents": ({"lies": {NAME}}, 3, "it is not a GGUF file"),
}  # fmt: skip


def run(*args: str) -> Any:
    few = ("-p", "Hi", "-n", "1", "-np", "1", "-c", "256", "--no-warmup")
    return CliRunner().invoke(main, ["run", "-hf", REPO, *few, *args])


def was_downloaded(fake: FakeHub) -> bool:
    return any(method == "GET" and not span for method, _, span in fake.asked)


@pytest.mark.parametrize("name", CASES)
def test_what_a_server_does_wrong_is_one_line(
    name: str, there: FakeHub, models: tuple[bytes, bytes]
) -> None:
    there.files = {NAME: models[0]}
    faults, status, says = CASES[name]
    for what, value in faults.items():
        setattr(there, what, value)
    done = run()
    lines = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert done.exit_code == status and len(lines) == 1 and says in lines[0], done.stderr
    assert not was_downloaded(there)


@pytest.mark.slow
def test_a_server_without_ranges_is_read_from_the_beginning(
    there: FakeHub, models: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "FIRST_BYTES", 500)
    monkeypatch.setattr(heads, "HEAD_BYTES", HEAD)
    there.files, there.rangeless = {NAME: models[0]}, True
    assert run().exit_code == 0
    spans = [span for method, _, span in there.asked if method == "GET"]
    assert spans == ["bytes=0-499", f"bytes=500-{HEAD - 1}", ""]


def test_a_head_goes_on_where_it_broke_off(there: FakeHub, models: tuple[bytes, bytes]) -> None:
    there.files, there.cut = {NAME: models[0]}, [1000, 2000]
    assert run().exit_code == 0
    spans = [span for method, _, span in there.asked if method == "GET"]
    assert spans == [f"bytes={at}-{HEAD - 1}" for at in (0, 1000, 3000)] + [""]


def test_a_file_that_changes_between_head_and_body_is_not_loaded(
    there: FakeHub, models: tuple[bytes, bytes], tmp_path: Path
) -> None:
    there.files, there.then = {NAME: models[0]}, {NAME: models[1]}
    done = run()
    assert done.exit_code == 7 and not was_downloaded(there), done.output
    assert (
        f"{NAME} of {REPO} has changed on the server since its head was read; run it again"
        in done.stderr
    )
    assert run().exit_code == 0 and was_downloaded(there)


def test_a_file_that_changes_within_its_head_is_not_pieced_together(
    there: FakeHub, models: tuple[bytes, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "FIRST_BYTES", 500)
    there.files, there.then = {NAME: models[0]}, {NAME: models[1]}
    done = run()
    assert done.exit_code == 7 and "has changed on the server while its head was read" in done.stderr


def test_a_head_without_an_end_is_not_fetched_for_ever(
    there: FakeHub, models: tuple[bytes, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "HEAD_BYTES", 2000)
    there.files = {NAME: models[0]}
    with (
        hub.heads_only(tmp_path, lambda path: False),
        pytest.raises(DownloadError, match=r"has no whole head in its first 2000 bytes: it is damaged"),
    ):
        hub.from_hub(REPO)


def test_a_token_is_for_the_hub_alone(
    there: FakeHub, models: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    there.files = {NAME: models[0]}
    with serving(FakeHub(dict(there.files))) as storage, hub.heads_only(tmp_path):
        there.elsewhere = storage.url
        assert hub.from_hub(REPO).read_bytes()[:HEAD] == models[0][:HEAD]
        assert storage.tokens == [""] and "hf_secret" in there.tokens[0]


@pytest.mark.parametrize("name", ["../../m-Q8_0.gguf", "/tmp/m-Q8_0.gguf", "..\\m-Q8_0.gguf", "m\x1b[2J-Q8_0.gguf"])  # fmt: skip
def test_names_that_lead_out_of_the_repository_are_no_files_of_it(
    name: str, there: FakeHub, models: tuple[bytes, bytes]
) -> None:
    there.files = {name: models[0]}
    done = run()
    assert done.exit_code == 2 and f"{REPO} has no GGUF model among its 0 files" in done.stderr
    assert not there.asked and "\x1b" not in done.stderr


@pytest.mark.slow
def test_heads_of_split_files_are_read_and_a_missing_part_is_named(
    there: FakeHub, models: tuple[bytes, bytes], tmp_path: Path
) -> None:
    (whole := tmp_path / "whole.gguf").write_bytes(models[0])
    names = tuple(f"m-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2))
    with open_gguf(whole) as file:
        tensors = list(file.tensors)
    parts = set(tensors[: len(tensors) // 2]), set(tensors[len(tensors) // 2 :])
    for i, name in enumerate(names):
        split = {"split.no": i, "split.count": 2, "split.tensors.count": len(tensors)}
        path = rewrite(whole, tmp_path / name, change=split, drop=parts[1 - i].__contains__)
        there.files[name] = path.read_bytes()
    there.then = {names[1]: b"GGUF"}
    done = run()
    assert done.exit_code == 7 and f"{names[1]} of {REPO} has changed" in done.stderr, done.output
    there.files[names[1]] = (tmp_path / names[1]).read_bytes()
    there.asked.clear()
    done = run()
    assert done.exit_code == 0, done.output
    assert {name for method, name, span in there.asked if not span and method == "GET"} == {names[1]}
    del there.files[names[1]]
    done = run()
    assert done.exit_code == 2 and f"1 are missing: {names[1]}" in done.stderr


@pytest.mark.slow
def test_a_gated_file_that_is_here_is_used(there: FakeHub, models: tuple[bytes, bytes]) -> None:
    there.files = {NAME: models[0]}
    assert run().exit_code == 0
    there.refuses = {"": (401, "GatedRepo")}
    done = run()
    assert done.exit_code == 0, done.output
