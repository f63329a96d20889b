"""The command line's border: help, exit statuses, hints, and modules that stay unloaded; and files of settings."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from pyspec import errors
from pyspec.cli import COMMANDS, ELSEWHERE, command_of, main
from pyspec.cli.flags import honoured_flags, llama_flags
from pyspec.cli.options import SPEC_TYPES

PYSPEC = [sys.executable, "-m", "pyspec"]


def invoke(*args: str, **options: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, list(args), **options)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_imports_nothing_heavy(command: str):
    code = (
        "import sys\nfrom pyspec.cli import main\n"
        f"main({[command, '--help'] if command else ['--help']}, standalone_mode=False)\n"
        "heavy = {'torch', 'numpy', 'rich', 'starlette', 'uvicorn', 'tokenizers', 'jinja2', 'huggingface_hub'}\n"
        "print(len(sys.modules), sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    n_module, heavy = done.stderr.strip().split(" ", 1)
    assert heavy == "[]"
    assert int(n_module) < 250, "help comes at once: torch alone is over a thousand modules"


def test_help_lists_every_command_with_a_sentence():
    code, out, _ = invoke("--help")
    assert code == 0
    lines = out.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in lines] == list(COMMANDS)
    assert all(len(line.split()) > 4 for line in lines)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_of_a_command_what_the_command_says(name: str):
    command = main.get_command(click.Context(main), name)
    assert command is not None and command.get_short_help_str(1000) == COMMANDS[name]


def test_help_imports_no_command():
    code = "import sys\nfrom pyspec.cli import main\nmain(['--help'], standalone_mode=False)\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = {name for name in done.stderr.split() if name.startswith("pyspec")}
    assert found <= {"pyspec", "pyspec.cli", "pyspec.streams", "pyspec.errors", "pyspec.version"}


def test_no_flag_is_spelled_twice_in_a_command():
    context = click.Context(main)
    for name in COMMANDS:
        command = main.get_command(context, name)
        assert command is not None
        flags = [
            f
            for p in command.params
            if isinstance(p, click.Option)
            for f in (*p.opts, *p.secondary_opts)
        ]
        assert len(flags) == len(set(flags)), name


def test_a_mistyped_command_is_answered_with_the_right_one():
    code, _, err = invoke("serv")
    assert code == 2
    assert "Did you mean 'server'?" in err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("chat", "Use pyspec run MODEL."),
        ("serve", "Use pyspec server MODEL."),
        ("show", "Use pyspec inspect MODEL"),
        ("rm", "pyspec list --json shows the path"),
        ("help", "Use pyspec --help"),
        ("Model.GGUF", "To run the file: pyspec run Model.GGUF"),
    ],
)
def test_a_command_of_other_programs_is_answered_with_ours(typed: str, meant: str):
    code, out, err = invoke(typed, "demo")
    assert (code, out) == (2, "") and meant in err.splitlines()[-1]


def test_what_is_named_for_other_programs_commands_exists():
    assert not ELSEWHERE.keys() & COMMANDS.keys()
    used = re.findall(r"pyspec ([a-z]+)", " ".join(ELSEWHERE.values()))
    assert set(used) - {"runs"} <= COMMANDS.keys()


@pytest.mark.parametrize(
    ("words", "model", "said"),
    [
        ("run demo What is this", "demo", "What is this"),
        ("run demo What -n 3 is this", "demo", "What is this"),
        ("run -m demo What is this", "demo", "What is this"),
        ("run What is this --model demo", "demo", "What is this"),
        ("run -m demo What", "demo", "What"),
        ("run demo", "demo", None),
        ("tokenize -m demo What", "demo", ("What",)),
        ("tokenize demo What", "demo", ("What",)),
    ],
)
def test_words_behind_the_model_are_the_text(words: str, model: str, said: object):
    """Without quotes they are one message, as in ollama."""
    name, *rest = words.split()
    own = command_of(name).make_context(name, rest).params
    assert (own["name"] or own["model"], own["message" if name == "run" else "words"]) == (model, said)


def test_a_model_of_the_environment_leaves_words_as_they_are(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYSPEC_MODEL", "other")
    own = command_of("run").make_context("run", ["demo", "What", "is", "this"]).params
    assert (own["name"], own["message"]) == ("demo", "What is this")


def test_a_mistyped_flag_is_answered_with_the_right_one():
    code, _, err = invoke("server", "demo", "--cts-size", "5")
    assert code == 2
    assert "--ctx-size" in err


@pytest.mark.parametrize("kind", ["draft-medusa", "ngram-mod", "dflash,mtp", "dflas"])
def test_a_drafter_we_do_not_have_is_refused_with_those_we_have(kind: str):
    code, _, err = invoke("run", "demo", "-p", "x", "--spec-type", kind)
    assert code == 2
    assert all(name in err for name in SPEC_TYPES)


def test_a_type_of_values_that_there_is_not_is_refused():
    code, _, err = invoke("run", "demo", "-p", "x", "-ctk", "f16", "-ctv", "q3_0")
    assert code == 2
    assert "'q3_0' is not one of 'f16', 'bf16', 'f32', 'q8_0', 'f8_e4m3'" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", "-p", "x"], "no model given"),
        (["run", "demo", "-m", "demo", "-p", "x"], "two models"),
        (["run", "demo", "-hf", "a/b", "-p", "x"], "exclude each other"),
        (["run", "demo", "-hff", "a.gguf", "-p", "x"], "name the repository with -hf"),
        (["run", "-hf", "no-slash", "-p", "x"], "user/repo"),
        (["run", "demo", "-md", "gone.gguf", "-p", "x"], "no file gone.gguf"),
        (["run", "deepseek-v4-flash", "-p", "x"], "the catalogue has no download for 'deepseek-v4-flash'"),
        (["run", "demo", "-p", "x", "--chat", "y"], "exclude each other"),
        (["run", "demo", "y", "-p", "x"], "exclude each other"),
        (["run", "demo", "y", "--chat", "y"], "exclude each other"),
        (["run", "demo", "-p", "x", "-np", "1", "-ub", "-1"], "-ub"),
        (["server", "demo", "--host", "0.0.0.0"], "--api-key"),
        (["server", "demo", "--port", "99999"], "99999 is not in the range"),
        (["tokenize", "demo"], "nothing on stdin"),
        (["tokenize", "demo", "two", "words"], "needs quotes: 'two words'"),
        (["tokenize", "demo", "text", "-p", "text"], "exclude each other"),
        (["run", "-m", "demo", "demo", "two words"], "two models"),
        (["logits", "demo", "--ids", "1,x", "--out", "x.npz"], "numbers between commas"),
        (["bench", "demo", "-npl", "1,a"], "numbers between commas"),
        (["bench", "demo", "--max-regress", "much"], "percentage"),
        (["bench", "demo", "--baseline", "gone.json"], "cannot read gone.json"),
        (["synth", "no-such-model", "x.gguf"], "no-such-model"),
        (["synth", "qwen3", "gone/x.gguf", "--tiny"], "cannot write gone/x.gguf: there is no folder gone"),
        (["run", "demo", "--grammar-file", "-"], "--grammar-file - reads stdin, so the message"),
        (["run", "demo", "-jf", "-", "-f", "-"], "--json-schema-file - reads stdin, so the message"),
    ],
)  # fmt: skip
def test_what_the_user_got_wrong_is_exit_code_2_and_said(args: list[str], message: str):
    code, out, err = invoke(*args)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_a_malformed_file_is_exit_code_3_and_one_line(tmp_path: Path):
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 60)
    for command in (
        ["inspect"],
        ["tokenize", "--text", "x"],
        ["run", "-p", "x"],
        ["server", "--port", "0"],
    ):
        code, out, err = invoke(command[0], str(path), *command[1:])
        assert (code, out) == (3, "")
        *before, line = err.splitlines()
        assert line.startswith("Error: ") and all("listening on" in said for said in before)


def test_every_error_class_reaches_the_shell_with_its_exit_code(monkeypatch: pytest.MonkeyPatch):
    for kind, code in [
        (errors.ConfigError, 2),
        (errors.BadGGUF, 3),
        (errors.PairError, 4),
        (errors.DoesNotFit, 5),
        (errors.DeviceError, 6),
        (errors.DownloadError, 7),
        (errors.RequestError, 1),
    ]:
        monkeypatch.setattr(
            "pyspec.catalog.catalogue", lambda kind=kind: _raise(kind("what happened; what to do"))
        )
        assert invoke("models") == (code, "", "Error: what happened; what to do\n")


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("args", [["-v", "inspect", "gone.gguf"], ["inspect", "gone.gguf", "-v"]])
def test_verbose_keeps_the_traceback(args: list[str]):
    result = CliRunner().invoke(main, args)
    assert isinstance(result.exception, errors.ConfigError)


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pyspec.catalog.catalogue", lambda: _raise(ZeroDivisionError("bug")))
    assert isinstance(CliRunner().invoke(main, ["models"]).exception, ZeroDivisionError)


@pytest.mark.parametrize("words", ["--help", "server demo -dev cpu --port 0"])
@pytest.mark.parametrize("entry", ["from pyspec.__main__ import main; main()", "import runpy; runpy.run_module('pyspec', run_name='__main__')"], ids=["script", "module"])  # fmt: skip
def test_ctrl_c_while_modules_are_imported_is_exit_code_130(entry: str, words: str):
    """It showed a traceback, or ended with 1."""
    hears = "import os, signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a job in the background ignores it
    code, ends = f"{hears}; os.write(2, b'.'); {entry}", (130, 0, -2) if words == "--help" else (130,)
    for delay in (0.02, 0.05, 0.1, 0.2, 0.3):
        for _ in range(4):  # on a busy machine our first line may come later than the signal
            command = [sys.executable, "-c", code, *words.split()]
            with subprocess.Popen(command, stdout=-1, stderr=-1) as child:
                assert child.stderr is not None and child.stderr.read(1) == b"."
                time.sleep(delay)
                child.send_signal(signal.SIGINT)
                try:
                    said = child.communicate(timeout=60)[1].decode()
                except subprocess.TimeoutExpired:
                    child.kill()
                    raise
            if is_quiet := "Traceback" not in said and child.returncode in ends:
                break
        assert is_quiet, (delay, child.returncode, said)


def test_ctrl_c_is_exit_code_130(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pyspec.catalog.catalogue", lambda: _raise(KeyboardInterrupt()))
    assert invoke("models") == (130, "", "interrupted\n")


def test_a_closed_pipe_is_quiet():
    done = subprocess.run(
        ["bash", "-c", f"'{sys.executable}' -m pyspec inspect demo --json | head -c 10"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        check=True,
    )
    assert len(done.stdout) == 10
    assert done.stderr == ""


def test_models_lists_the_catalogue():
    from pyspec.catalog import RUNS, catalogue

    _, out, _ = invoke("models")
    assert all(name in out for name in catalogue())
    entries = json.loads(invoke("models", "--json")[1])
    assert [e["name"] for e in entries] == list(catalogue())
    assert all(e["runs"] is (e["arch"] in RUNS) for e in entries) and entries[0]["runs"]


def test_inspect_shows_the_same_for_people_and_programs():
    about = json.loads(invoke("inspect", "demo", "--json")[1])
    _, text, _ = invoke("inspect", "demo")
    assert about["architecture"] == "qwen35" and "qwen35" in text
    assert all(t["name"] in text for t in about["tensors"])
    assert "tensors" not in json.loads(invoke("inspect", "demo", "--json", "--no-tensors")[1])


def test_synth_writes_a_file_that_inspect_reads(tmp_path: Path):
    path = tmp_path / "tiny.gguf"
    code, out, _ = invoke("synth", "qwen3", str(path), "--tiny", "--quant", "Q8_0")
    assert (code, out) == (0, "")
    assert json.loads(invoke("inspect", str(path), "--json")[1])["architecture"] == "qwen3"


def shown(*args: str, **env: str) -> dict[str, dict[str, object]]:
    result = CliRunner().invoke(main, ["config", "show", "--json", *args], env=env)
    assert result.exit_code == 0, result.output
    return {row["flag"]: row for row in json.loads(result.stdout)}


def test_each_setting_has_its_value_and_its_origin():
    rows = shown(
        "demo",
        "-np",
        "3",
        "--api-key",
        "secret,other",
        LLAMA_ARG_CTX_SIZE="64",
        PYSPEC_QUEUE="9",
        LLAMA_ARG_PORT="1",
    )
    assert (rows["MODEL"]["value"], rows["MODEL"]["origin"]) == ("demo", "command line")
    assert (rows["--parallel"]["value"], rows["--parallel"]["origin"]) == (3, "command line")
    assert (rows["--ctx-size"]["value"], rows["--ctx-size"]["origin"]) == (64, "LLAMA_ARG_CTX_SIZE")
    assert (rows["--queue"]["value"], rows["--queue"]["origin"]) == (9, "PYSPEC_QUEUE")
    assert (rows["--threads"]["value"], rows["--threads"]["origin"]) == (0, "default")
    assert rows["--api-key"]["value"] == "2 keys" and "secret" not in json.dumps(rows)


def test_a_setting_that_is_wrong_is_refused_as_the_server_would():
    result = CliRunner().invoke(main, ["config", "show", "demo", "--port", "99999"])
    assert result.exit_code == 2 and "99999" in result.stderr


def test_the_table_of_flags_is_for_people_and_programs():
    rows = json.loads(CliRunner().invoke(main, ["config", "flags", "--json"]).stdout)
    honoured = {name for flag in honoured_flags() for name in flag.names}
    assert {name for row in rows for name in row["names"]} == honoured | set(llama_flags())
    assert all(row["why"] for row in rows if row["fate"] != "honoured")
    assert "--rope-scale" in CliRunner().invoke(main, ["config", "flags"]).stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_a_script(shell: str):
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0 and "_PYSPEC_COMPLETE" in result.stdout and "pyspec" in result.stdout
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=result.stdout, text=True, check=True)


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("serv", "server"),
        ("server --no-s", "--no-slots"),
        ("server -sm layer de", "demo"),
        ("run de", "demo"),
    ],
)
def test_a_shell_completes_commands_flags_and_models(words: str, offered: str):
    env = os.environ | {
        "_PYSPEC_COMPLETE": "bash_complete",
        "COMP_WORDS": f"pyspec {words}",
        "COMP_CWORD": str(len(words.split())),
    }
    code = "from pyspec.cli import main; main(prog_name='pyspec')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False
    )
    assert f"plain,{offered}" in done.stdout.splitlines(), done.stdout + done.stderr


ROOT = Path(__file__).parents[2]
PLACES = [ROOT / "docs" / "serving.md", *sorted((ROOT / "deploy").iterdir())]


def test_what_deploy_and_its_page_set_in_the_environment_is_read():
    command = main.get_command(click.Context(main), "server")
    assert command is not None
    known = {name for p in command.params if isinstance(p, click.Option) for name in p.envvar or ()}
    named = {
        name
        for path in PLACES
        for name in re.findall(r"PYSPEC_[A-Z_]+[A-Z]", path.read_text(encoding="utf-8"))
    }
    assert {"PYSPEC_HOST", "PYSPEC_MODEL"} <= named
    ours = {"PYSPEC_NAME", "PYSPEC_CACHE"}  # an example, the cache's own
    assert sorted(named - known - ours) == []
