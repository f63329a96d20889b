"""Own prompts of `pyspec bench` and `pyspec verify`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pyspec.bench.prompts import read_prompts
from pyspec.cli import main
from pyspec.errors import ConfigError

DEMO = Path(__file__).parents[2] / "pyspec" / "demo" / "pyspec-demo.gguf"
CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]


def test_a_line_of_text_is_a_message_and_a_line_of_json_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text('Hi\n\n{"prompt": "x"}\n')
    own = [{"prompt": "two\nlines"}, {"messages": CHAT}, "text"]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, own)))
    assert read_prompts(tmp_path / "a.txt") == [
        [{"role": "user", "content": "Hi"}],
        [{"role": "user", "content": '{"prompt": "x"}'}],
    ]
    assert read_prompts(tmp_path / "a.jsonl") == ["two\nlines", CHAT, "text"]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "3",
        "null",
        '""',
        "[]",
        '{"text": "x"}',
        '{"messages": [3]}',
        '{"messages": [{"role": "user", "content": 3}]}',
    ],
)
def test_another_line_is_refused_with_its_place(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x"}\n' + line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_prompts(path)


@pytest.mark.parametrize("content", [None, b"\n \n", b"\xff\xfe\n"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "a.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"a\.txt"):
        read_prompts(path)


def test_the_bench_measures_own_prompts_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "The fox and"}) + "\n" + json.dumps({"messages": CHAT}))
    args = [
        "bench",
        str(DEMO),
        "-f",
        str(path),
        "-npl",
        "3",
        "-n",
        "8",
        "-r",
        "1",
        "-o",
        "json",
        "--ignore-eos",
    ]
    out = CliRunner().invoke(main, args)
    assert out.exit_code == 0, out.output
    report = json.loads(out.stdout)
    assert report["about"]["prompts"] == "own"
    assert all(run["n_prompt"] < 60 for run in report["runs"])  # short ones of the file, not questions


def test_own_prompts_and_random_ones_are_refused_together(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("Hi\n")
    out = CliRunner().invoke(main, ["bench", str(DEMO), "-f", str(path), "--random-prompts"])
    assert out.exit_code == 2 and "only one of them" in out.output
