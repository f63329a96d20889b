"""The table of perplexities of `make real`, without the model: texts by their hash, bounds, verdicts, and the record."""

from __future__ import annotations

import hashlib
import math
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import real_perplexity  # noqa: E402  (tools/ is no package)

from pyspec.perplexity import Compared, Scored, score  # noqa: E402

N_CTX = 16  # of which seven tokens are scored
DEMO = ROOT / "pyspec" / "demo" / "pyspec-demo.gguf"


def text(path: Path, words: bytes = b"words", **more: object) -> real_perplexity.Text:
    given: dict[str, object] = {"name": "T", "path": str(path), "ids": "", "f32": {"f16": [7.0, 21.0]}}
    given["sums"] = {"q4_0": [14.0, 14.0]}
    given |= {"sha256": hashlib.sha256(words).hexdigest()} | more
    return real_perplexity.Text(**given)  # type: ignore[arg-type]


def compared(logprob: float, divergence: float, n: int = 14) -> Compared:
    found = Compared(base=Scored([-2.0] * n), own=Scored([logprob] * n), divergences=[divergence] * n)
    found.n_same = n - 1
    return found


def test_a_text_counts_only_with_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "text"
    assert text(path).read() is None
    path.write_bytes(b"other words")
    assert text(path).read() is None
    path.write_bytes(b"words")
    assert text(path).read() == "words"


def test_recorded_sums_give_the_perplexity_of_the_first_sequences() -> None:
    assert real_perplexity.recorded_perplexity([7.0, 21.0], 1, N_CTX) == pytest.approx(math.e)
    assert real_perplexity.recorded_perplexity([7.0, 21.0], 2, N_CTX) == pytest.approx(math.exp(2))


def test_a_percent_is_allowed_and_more_where_keys_are_rounded_more() -> None:
    assert real_perplexity.allowed(compared(-2.0, 1e-6, 1000)) == 0.01
    rough = real_perplexity.allowed(compared(-2.0, 0.1, 1000))
    assert rough == pytest.approx(3 * math.sqrt(0.4 / 1000)) and 0.05 < rough < 0.07


@pytest.mark.parametrize(("logprob", "n_bad"), [(-2.009, 0), (-1.991, 0), (-2.011, 1), (-1.98, 1)])
def test_a_perplexity_that_is_more_than_a_percent_off_is_wrong(
    logprob: float, n_bad: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recorded one is e^2. A pair without a record is shown and not judged."""
    found = [compared(logprob, 1e-7), compared(-3.0, 0.1)]
    pairs = ("f16", "q4_0")
    assert real_perplexity.show(text(tmp_path), pairs, found, 2, N_CTX) == n_bad
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["llama.cpp", "keys/values", "f32", "f16", "q4_0"]
    assert ("WRONG" in lines[3]) == bool(n_bad) and "WRONG" not in lines[4]
    assert f"{math.e**2:.4f}" in lines[3] and "92.86%" in lines[4] and "0.100000" in lines[4]


def test_missing_texts_are_skipped_by_name_and_other_ids_are_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = b"All of the words of this text are read by the packaged model. " * 9
    (tmp_path / "text").write_bytes(words)
    missing, here = text(tmp_path / "none"), text(tmp_path / "text", words, ids="other")
    record = real_perplexity.Record("x", N_CTX, (missing, here))
    assert real_perplexity.measure(DEMO, record, ["f16"], n_chunk=2, device="cpu") == 1
    said = capsys.readouterr().out
    assert f"skipped T: {tmp_path}/none is missing" in said and "T: WRONG token ids" in said


def test_a_text_is_measured_beside_its_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = b"All of the words of this text are read by the packaged model. " * 9
    (tmp_path / "text").write_bytes(words)
    base = real_perplexity.readers_of(DEMO, ["f32"], N_CTX, "auto", "cpu")[0]
    chunks = real_perplexity.chunks_of(base.tokenizer, words.decode(), N_CTX)
    sums = [-sum(score(base, [one]).logprobs) for one in chunks]
    one = text(tmp_path / "text", words, ids=real_perplexity.ids_hash(chunks), f32={"f16": sums})
    record = real_perplexity.Record("x", N_CTX, (one,))
    assert real_perplexity.measure(DEMO, record, ["f16", "q8_0"], n_chunk=3, device="cpu") == 0
    assert "21 tokens of 3 sequences" in capsys.readouterr().out


def test_the_record_is_whole() -> None:
    """Two texts of licences; as many sums for each pair, which are those of real text and rise as types get fewer bits."""
    record = real_perplexity.read()
    assert "llama.cpp" in record.program and record.n_ctx == 512
    assert [one.name for one in record.texts] == ["GPL-3", "GFDL-1.3"]
    for one in record.texts:
        assert {"f16", "q8_0", "q8_0/q4_0", "q4_0"} <= one.f32.keys() <= one.sums.keys()
        for found in (one.f32, one.sums):
            assert {len(sums) for sums in found.values()} in ({14}, {9})
            at = {
                pair: real_perplexity.recorded_perplexity(sums, len(sums), 512)
                for pair, sums in found.items()
            }
            assert 13 < at["f16"] < 14 and abs(at["q8_0"] / at["f16"] - 1) < 0.005
            assert 1.1 < at["q4_0"] / at["f16"] < 1.2 and at["q8_0/q4_0"] < 1.02 * at["f16"]
