"""The commands that load a model, on the packaged pair and the fixtures."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from pyspec.cache import n_cores
from pyspec.cli import main
from pyspec.cli.run import AnswerOptions, RunFlags, acceptance, talk
from pyspec.cpu import build
from pyspec.engine.api import Engine
from pyspec.request import SamplingGiven, SamplingParams, Timings

FIXTURES = Path(__file__).parents[1] / "fixtures"
GREEDY = ["--temp", "0"]


def invoke(*args: str, input: str | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, list(args), input=input)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def reference(question: str) -> dict:
    from importlib.resources import files

    rows = map(
        json.loads, (files("pyspec") / "demo" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    )
    return next(r for r in rows if r["messages"][-1]["content"] == question)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load("demo", np=1, ctx=512) as e:
        yield e


@pytest.mark.parametrize("form", ["--grammar", "--grammar-file", "--json-schema", "-jf"])
def test_run_holds_its_answer_to_a_grammar_or_a_schema(form: str, tmp_path: Path) -> None:
    source = 'root ::= "yes" | "no"' if "gramm" in form else '{"enum": ["yes", "no"]}'
    path = tmp_path / "source"
    path.write_text(source, encoding="utf-8")
    given = str(path) if form in ("--grammar-file", "-jf") else source
    code, out, _ = invoke("run", "demo", "--chat", "Hi", *GREEDY, "--no-warmup", form, given)
    assert code == 0 and out.strip().strip('"') in ("yes", "no")


def test_run_refuses_two_constraints() -> None:
    code, _, err = invoke("run", "demo", "Hi", "--grammar", "root ::= [a]", "-j", "{}")
    assert code == 2 and "exclude each other" in err


def test_no_slots_are_refused() -> None:
    code, _, err = invoke("run", "demo", "Hi", "-np", "0")
    assert code == 2 and "0 slots answer nothing" in err


def test_run_answers_as_llama_cpp_does_and_reports_its_drafts():
    question = "Implement bubble sort in Python"
    code, out, _ = invoke(
        "run", "demo", "--chat", question, *GREEDY, "--json", "--spec-fixed", "--no-warmup"
    )
    answer, wanted = json.loads(out), reference(question)
    assert code == 0
    assert (answer["text"], answer["tokens"]) == (wanted["answer"], wanted["answer_ids"])
    assert (answer["finish"], answer["n_prompt"]) == ("eos", len(wanted["prompt_ids"]))
    t, by_position = answer["timings"], answer["acceptance_per_position"]
    assert 0 < t["draft_n_accepted"] <= t["draft_n"]
    assert t["mean_len"] > 5 and by_position[0] > 0.7
    assert all(0 <= share <= 1 for share in by_position)
    assert sum(t["n_draft_used"]) == t["rounds"]


def test_positions_at_which_no_draft_was_ever_accepted_count_as_zero():
    assert acceptance(Timings(drafted_per_pos=(4, 2, 1), accepted_per_pos=(1,))) == [0.25, 0, 0]


def test_run_continues_text_from_stdin_and_keeps_talk_off_stdout():
    text = "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
    plain = ("--spec-type", "none", "-ngl", "99", "--no-warmup")
    code, out, err = invoke("run", "demo", *GREEDY, *plain, "-no-cnv", input=text)
    assert (code, out) == (0, reference("Hi!")["answer"] + "\n")
    assert "14 tokens" in err and "drafted" not in err


@pytest.mark.parametrize("more", [(), ("-sys", "")])
def test_what_is_piped_is_a_question(more: tuple[str, ...]):
    code, out, _ = invoke("run", "demo", *GREEDY, "--no-warmup", *more, input="  Hi!\n\n")
    assert (code, out) == (0, reference("Hi!")["answer"] + "\n")


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("has_template", [True, False])
def test_without_a_chat_or_with_a_flag_what_is_piped_is_continued(
    has_template: bool, monkeypatch: pytest.MonkeyPatch
):
    how = ("run", str(FIXTURES / "llama.gguf"), *GREEDY, "-n", "3", "--json", "--no-warmup")
    raw = json.loads(invoke(*how, "-p", "ab ")[1])["tokens"]
    asked = json.loads(invoke(*how, "ab")[1])["tokens"]
    if not has_template:
        monkeypatch.setattr("pyspec.cli.run.has_chat", lambda engine: False)
    piped = json.loads(invoke(*how, *(["--no-conversation"] if has_template else []), input="ab ")[1])[
        "tokens"
    ]
    assert piped == raw != asked


@pytest.mark.parametrize("nothing", ["", " \n"])
def test_nothing_on_stdin_is_a_usage_error_before_anything_is_loaded(nothing: str):
    code, _, err = invoke("run", "no-such-model", input=nothing)
    assert code == 2 and "nothing on stdin" in err


def test_text_on_stdin_is_utf_8_and_read_without_what_click_gives_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Grüße".encode()), encoding="latin-1"))
    said = RunFlags(
        message=None,
        prompt=None,
        chat=None,
        file=None,
        system="",
        stop=(),
        as_json=False,
        no_conversation=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        assert said.piped() == "Grüße" and said.text() is None


def test_a_prompt_that_does_not_fit_is_one_line():
    code, out, err = invoke("run", "demo", "-p", "word " * 200, "-c", "64")
    assert (code, out) == (1, "")
    assert re.fullmatch(r"Error: .*its prompt has \d+ tokens, and a request holds 64 .*\n", err)


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("words", [["demo", "{}"], ["-m", "demo", "{}"], ["{}", "--model=demo"]])
def test_a_word_behind_the_model_is_a_message(words: list[str]) -> None:
    question = "Implement bubble sort in Python"
    code, out, err = invoke(
        "run", *(w.format(question) for w in words), *GREEDY, "-n", "8", "--json", "--no-warmup"
    )
    assert code == 0, err
    assert json.loads(out)["tokens"] == reference(question)["answer_ids"][:8]


@pytest.mark.parametrize("more", [0, 1])
def test_more_threads_than_processors_are_warned_of(more: int):
    code, out, err = invoke("run", "demo", "-p", "3 4", "-n", "1", "-t", str(n_cores() + more))
    assert code == 0 and out
    assert err.count("more threads than this process may use") == more


@pytest.mark.slow
def test_a_chat_remembers_and_clears(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    said = iter(
        ["My name is Lena.", "What is my name?", "/clear", "What is my name?", "/nonsense", "", "/exit"]
    )
    monkeypatch.setattr(click, "prompt", lambda *args, **options: next(said))
    talk(
        engine,
        AnswerOptions(SamplingGiven(SamplingParams(temperature=0), frozenset({"temperature"})), 48, ()),
        "",
    )
    out, err = capsys.readouterr()
    answers = out.splitlines()
    assert "Lena" in answers[1] and "Lena" not in answers[2]
    assert err.count("/clear forgets") == 2
    assert next(said, "all read") == "all read"


def test_a_refused_message_does_not_end_a_chat(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    said = iter(["word " * 2000, "Hi!"])

    def prompt(*args: object, **options: object) -> str:
        for text in said:
            return text
        raise click.Abort

    monkeypatch.setattr(click, "prompt", prompt)
    talk(
        engine,
        AnswerOptions(SamplingGiven(SamplingParams(temperature=0), frozenset({"temperature"})), 48, ()),
        "",
    )
    out, err = capsys.readouterr()
    assert "Error: the request exceeds the available context size" in err
    assert out.startswith(reference("Hi!")["answer"])


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen35"])
def test_logits_are_those_of_llama_cpp(name: str, tmp_path: Path):
    wanted, out = np.load(FIXTURES / f"{name}.npz"), tmp_path / "x.npz"
    ids = ",".join(map(str, wanted["tokens"]))
    code, printed, _ = invoke(
        "logits", str(FIXTURES / f"{name}.gguf"), "--ids", ids, "--out", str(out), "--chunk", "16"
    )
    assert (code, printed) == (0, "")
    got = np.load(out)
    assert (got["tokens"].dtype, got["logits"].dtype) == (np.int32, np.float32)
    np.testing.assert_array_equal(got["tokens"], wanted["tokens"])
    assert np.abs(got["logits"] - wanted["logits"]).max() < 1e-3


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ("1,300", "token 300 is outside 0..299"),
        ("-1", "token -1 is outside"),
        ("", "no tokens"),
        ("1," * 5000, "5000 tok"),
    ],
)
def test_ids_that_can_not_run_are_refused(ids: str, message: str, tmp_path: Path):
    code, _, err = invoke(
        "logits", str(FIXTURES / "qwen3.gguf"), "--ids", ids, "--out", str(tmp_path / "x.npz")
    )
    assert code == 1
    assert message in err and len(err.splitlines()) == 1


def test_tokenize_gives_llama_cpps_ids(tmp_path: Path):
    cases = json.loads((FIXTURES / "tokens.json").read_text(encoding="utf-8"))
    text = "".join(c["text"] for c in cases)
    path = tmp_path / "text"
    path.write_bytes(text.encode())
    _, out, _ = invoke("tokenize", "demo", "--file", str(path), "--json", "--no-bos")
    got = json.loads(out)
    assert got["n_tokens"] == len(got["tokens"]) == len(got["pieces"])
    for case in cases[:20]:
        _, out, _ = invoke("tokenize", "-m", "demo", "--text", case["text"], "--json", "--no-bos")
        assert json.loads(out)["tokens"] == case["demo"], case["text"]


def test_special_tokens_are_read_or_not():
    text = "<|im_end|>"
    assert json.loads(invoke("tokenize", "demo", "--text", text, "--json")[1])["tokens"] == [4090]
    _, out, _ = invoke("tokenize", "demo", "--text", text, "--json", "--no-parse-special")
    assert 4090 not in json.loads(out)["tokens"]


def test_a_text_that_is_not_utf8_is_refused(tmp_path: Path):
    (tmp_path / "x").write_bytes(b"abc\xff")
    code, _, err = invoke("tokenize", "demo", "--file", str(tmp_path / "x"))
    assert code == 2 and "byte 3" in err


@pytest.mark.slow
def test_the_demo_streams_compares_and_ends_well():
    code, out, err = invoke("demo", "-np", "2", "-r", "1")
    assert (code, err) == (0, "")
    assert "Implement bubble sort in Python" in out and "What is speculative decoding?" in out
    assert "identical" in out
    assert re.search(r"2 streams +\d+ +\d+ +x\d", out) and re.search(r"1 stream +\d+ +\d+ +x\d", out)


@pytest.mark.sampled(1, most=1)
def test_the_server_says_where_it_is_and_stops_on_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A real process: banner on stderr, nothing on stdout, an answer, and exit 0 after Ctrl-C."""
    command = [
        sys.executable,
        "-m",
        "pyspec",
        "server",
        "demo",
        "-np",
        "2",
        "-c",
        "256",
        "--port",
        "0",
        "--no-warmup",
    ]
    if (built := build.find(build.isas()[0])) is not None:  # the C++ library is not compiled again
        (tmp_path / "cpu").mkdir()
        (tmp_path / "cpu" / built.name).symlink_to(built)
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None and server.stdout is not None
        try:
            banner = []
            for line in server.stderr:
                banner.append(line)
                if line.startswith("url"):
                    break
            url = re.search(r"http://127\.0\.0\.1:\d+", banner[-1])
            assert url, banner
            with urllib.request.urlopen(f"{url[0]}/props", timeout=10) as answer:
                assert json.load(answer)["total_slots"] == 2
            code, out, _ = invoke("ps", "--json")
            assert code == 0 and [(one["url"], one["pid"]) for one in json.loads(out)] == [
                (url[0], server.pid)
            ]
            server.send_signal(signal.SIGINT)
            assert server.wait(20) == 0
        finally:
            server.kill()
        text = "".join(banner)
        assert "memory plan" in text and "slots    2, 256 tokens each" in text and "dflash" in text
        assert server.stdout.read() == ""
        assert json.loads(invoke("ps", "--json")[1]) == []


FIXTURES = Path(__file__).parents[1] / "fixtures"
DRAFTER = FIXTURES.parents[1] / "pyspec" / "demo" / "pyspec-demo-dflash.gguf"


@pytest.mark.parametrize(
    ("code", "args", "said"),
    [
        (2, ["demo", "-ub", "-1"], "-ub is -1; want a whole number from 0"),
        (3, [str(FIXTURES / "facts.json")], "facts.json"),
        (3, [str(DRAFTER)], f"type -m TARGET.gguf -md {DRAFTER}"),
        (3, [str(FIXTURES / "deepseek4_mtp.gguf")], "is a drafter (mtp), no model that answers"),
        (4, ["demo", "-md", str(FIXTURES / "deepseek4_mtp.gguf")], "the drafter has 300 tokens, the target 4096"),
        (5, ["demo", "-np", "8", "-c", "16777216", "--rope-freq-base", "1e7", "-dev", "cpu"], "this would fit: -c "),
        (6, ["demo", "-dev", "cuda:99"], "device 'cuda:99' can not be used"),
        (6, ["demo", "-dev", "cuda:99"], "-dev"),  # the suggested command
        (4, ["-m", str(FIXTURES / "qwen3.gguf"), "-md", str(FIXTURES / "deepseek4.gguf")], "it can not be the draft model"),
    ],
)  # fmt: skip
def test_each_class_of_error_has_its_exit_code_the_numbers_and_how_to_mend_it(
    code: int, args: list[str], said: str
):
    """docs/serving.md lists the codes; 7, the network, is in tests/test_hub.py's servers' hands."""
    found, out, err = invoke("run", *args, "-p", "x")
    assert (found, out) == (code, "") and "Traceback" not in err
    assert err.splitlines()[-1].startswith("Error: ") and said in err
