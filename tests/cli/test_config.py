"""`pyspec config` and `pyspec completion`: origins of values, support of flags, shell completion."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from pyspec.cli import main
from pyspec.cli.flags import honoured_flags, llama_flags


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
