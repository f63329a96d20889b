"""`pyspec perplexity`: the scored tokens, their log probabilities, the divergence of two loads, and refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from pyspec.cli import main
from pyspec.config import EngineSettings
from pyspec.errors import ConfigError, RequestError
from pyspec.gguf import open_gguf
from pyspec.logits import LogitReader, compute_logits
from pyspec.perplexity import Compared, Scored, chunks_of, compare, score
from pyspec.text.tokenizer import Tokenizer

FIXTURES = Path(__file__).parent / "fixtures"
DEMO = Path(__file__).parents[1] / "pyspec" / "demo" / "pyspec-demo.gguf"
QWEN35, LLAMA = FIXTURES / "qwen35.gguf", FIXTURES / "llama_q8_0.gguf"


def reader(path: Path, n_ctx: int, **settings: object) -> LogitReader:
    given: dict[str, object] = {"device": "cpu", "kv_type": "f32"} | settings
    return LogitReader(path, EngineSettings(ctx=n_ctx + 1, **given))  # type: ignore[arg-type]


def sequences(n: int, n_ctx: int, n_vocab: int = 290) -> list[list[int]]:
    gen = torch.Generator().manual_seed(7)
    return torch.randint(1, n_vocab, (n, n_ctx), generator=gen).tolist()


@pytest.mark.parametrize(("path", "n_ctx", "batch"), [(QWEN35, 23, 5), (LLAMA, 31, 31)])
def test_the_second_half_of_each_sequence_is_scored_by_the_models_logits(
    path: Path, n_ctx: int, batch: int
) -> None:
    """Of 23 tokens those from the 12th on are scored, by the rows before them. A state of the sequence before would show."""
    chunks = sequences(3, n_ctx)
    found = score(reader(path, n_ctx, batch=batch, ubatch=batch), chunks)
    wanted = []
    for ids in chunks:
        logprobs = torch.from_numpy(compute_logits(path, ids, device="cpu")).double().log_softmax(-1)
        wanted += [float(logprobs[i, ids[i + 1]]) for i in range(n_ctx // 2, n_ctx - 1)]
    assert found.n == len(wanted) == 3 * (n_ctx - 1 - n_ctx // 2)
    assert np.allclose(found.logprobs, wanted, atol=2e-3)
    assert found.perplexity == pytest.approx(math.exp(-np.mean(wanted)), rel=1e-3)
    assert found.error == pytest.approx(
        found.perplexity * np.std(wanted, ddof=1) / len(wanted) ** 0.5, rel=0.01
    )


def test_a_reader_gives_the_same_again_from_the_row_that_is_asked_for() -> None:
    ids = sequences(1, 40)[0]
    one = reader(QWEN35, 40, batch=13, ubatch=13)
    whole = torch.cat([rows for _, rows in one.read(ids)])
    pieces = list(one.read(ids, first=17))
    assert [i for i, _ in pieces] == [17, 26, 39] and whole.shape[0] == 40
    assert torch.equal(torch.cat([rows for _, rows in pieces]), whole[17:])
    started = one.read(ids)
    next(started)
    started.close()  # a reader that is left early has its slot again
    assert torch.equal(next(one.read(ids))[1], whole[:13])
    with pytest.raises(RequestError, match="token 99999 is outside"):
        next(one.read([1, 99999]))


def test_two_loads_diverge_by_what_differs() -> None:
    chunks = sequences(2, 27)
    base = reader(LLAMA, 27)
    same, other = compare(base, [reader(LLAMA, 27), reader(LLAMA, 27, kv_type="f16")], chunks)
    assert same.mean == 0.0 and same.same == 1.0 and same.rms == 0.0
    assert 0 < other.mean < 1e-4 and other.quantile(1.0) >= other.quantile(0.5) and other.rms > 0
    p, q = (
        [torch.from_numpy(compute_logits(LLAMA, ids, kv_type=kv, device="cpu")) for ids in chunks]
        for kv in ("f32", "f16")
    )
    wanted = []
    for a, b in zip(p, q, strict=True):
        x, y = (z[13:26].double().log_softmax(-1) for z in (a, b))
        wanted += (x.exp() * (x - y)).sum(-1).tolist()
    assert other.mean == pytest.approx(np.mean(wanted), rel=0.02)
    assert other.base.logprobs == same.own.logprobs == score(base, chunks).logprobs
    with pytest.raises(RequestError, match=r"vocabularies of .* have no divergence"):
        compare(base, [reader(DEMO, 27)], chunks)


def test_sequences_begin_with_the_models_own_token() -> None:
    tokenizer = Tokenizer.from_metadata(open_gguf(LLAMA).metadata)
    text = "a few words, again and again. " * 12
    ids, chunks = tokenizer.encode(text, parse_special=False), chunks_of(tokenizer, text, 21)
    assert len(chunks) == len(ids) // 21 > 3 and all(len(one) == 21 for one in chunks)
    assert [one[1:] for one in chunks] == [ids[i * 21 + 1 : (i + 1) * 21] for i in range(len(chunks))]
    first = {one[0] for one in chunks}
    assert first == {tokenizer.bos_id} if tokenizer.add_bos else len(first) > 1
    assert chunks_of(tokenizer, text, 21, 2) == chunks[:2]
    assert chunks_of(tokenizer, text, 21, 0) == chunks
    with pytest.raises(RequestError, match=r"the text has \d+ tokens; want 5000 \(-c\) at least"):
        chunks_of(tokenizer, text, 5000)


def test_one_token_has_no_error() -> None:
    assert Scored([-0.5]).error == 0.0 and Compared(divergences=[0.25]).error == 0.0


def run(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["perplexity", *args])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


def test_the_command_prints_both_loads(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("What a language model predicts is a distribution. " * 9 + "\n", encoding="utf-8")
    args = ("demo", "-f", str(text), "-c", "33", "--chunks", "2", "-dev", "cpu")
    plain = json.loads(run(*args, "--json", "-ctk", "q8_0"))
    assert plain["tokens"] == 2 * 16 and plain["sequences"] == 2 and plain["perplexity"] > 1
    both = json.loads(run(*args, "--json", "-ctk", "q8_0", "--kl-divergence"))
    assert both["perplexity"] == plain["perplexity"] and 0 < both["kl_divergence"] < 1e-3
    said = run(*args, "-ctv", "q8_0", "--kl-base", "demo").splitlines()
    assert said[0].startswith(f"perplexity {plain['perplexity']:.4f} +/- ") and "32 tokens" in said[0]
    assert said[1].startswith(f"of the base {both['base_perplexity']:.4f}")
    assert f"KL divergence {both['kl_divergence']:.6f}" in said[2] and "same likeliest token" in said[3]


def test_a_text_that_can_not_be_read_is_one_sentence(tmp_path: Path) -> None:
    assert "-f nowhere.txt: No such file" in run("demo", "-f", "nowhere.txt", code=2)
    (tmp_path / "bytes").write_bytes(b"abc\xff")
    assert "is not UTF-8: byte 3" in run("demo", "-f", str(tmp_path / "bytes"), code=2)
    (tmp_path / "short").write_text("few", encoding="utf-8")
    said = run("demo", "-f", str(tmp_path / "short"), "-dev", "cpu", code=1)
    assert "tokens; want 512 (-c) at least" in said and len(said.strip().splitlines()) == 1
    with pytest.raises(ConfigError, match="on one device: leave out --tp"):
        reader(LLAMA, 8, tp=2)
