"""The documented installation, and that of `make`: our own distribution, and a torch that suits the machine."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pyspec.cuda.machine import CUDA_PACKAGES

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import install_torch  # noqa: E402  (tools/ is no package)

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORDS = re.compile(r"pip(?:3)? install((?: +(?:'[^'\n]*'|\"[^\"\n]*\"|[^\s'\"`();&|]+))+)")
KINDS = ("*.md", "*.py", "*.toml", "*.service", "Dockerfile", "Makefile", "*.js", "*.html")
INDEXES = re.compile(r"download\.pytorch\.org|pypi\.org|pythonhosted\.org")


def texts() -> Iterator[tuple[str, str]]:
    """Every file of the tree that a person may read or run, by its name."""
    for top in (
        ROOT,
        *(ROOT / name for name in ("docs", "pyspec", "deploy", "examples", "tests", "tools")),
    ):
        for kind in KINDS:
            for path in top.glob(kind) if top == ROOT else top.rglob(kind):
                yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def distributions(line: str) -> list[str]:
    """Names of the packages that a `pip install` line takes from the index."""
    words = [word.strip("'\"") for word in line.split()]
    after_option = {
        i + 1
        for i, word in enumerate(words)
        if word in ("-c", "-r", "--constraint", "--requirement", "--index-url")
    }
    taken = [
        word
        for i, word in enumerate(words)
        if i not in after_option and not word.startswith(("-", ".", "/"))
    ]
    return [re.split(r"[\[=<>!~; ]", word)[0].lower() for word in taken]


def test_no_line_that_installs_names_the_other_pyspec():
    assert distributions(" -U 'pyspec[cuda]' gguf") == ["pyspec", "gguf"]
    assert distributions(" './clone[cuda]' -c constraints.txt") == []
    seen, wrong = 0, []
    for name, text in texts():
        for line in WORDS.findall(text) if name != "tests/test_install.py" else ():
            seen += 1
            wrong += [(name, line) for one in distributions(line) if one in ("pyspec", PROJECT["name"])]
    assert seen > 15 and wrong == []


def test_our_distribution_has_a_name_of_its_own_and_examples_ask_for_no_other():
    assert PROJECT["name"] != "pyspec" and PROJECT["scripts"]["pyspec"] == "pyspec.__main__:main"
    for path in (ROOT / "examples").rglob("pyproject.toml"):
        needs = tomllib.loads(path.read_text(encoding="utf-8"))["project"].get("dependencies", [])
        assert not [need for need in needs if re.match(r"pyspec(?![\w-])", need)], path
    assert "uninstall --quiet --quiet --yes pyspec" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_tree_names_no_index():
    assert [
        name
        for name, text in texts()
        if name != "tests/test_install.py" and not name.startswith("docs/log") and INDEXES.search(text)
    ] == []


def test_what_messages_and_make_ask_for_is_what_the_project_needs():
    assert [word.strip("'") for word in CUDA_PACKAGES.split()] == PROJECT["optional-dependencies"][
        "cuda"
    ]
    assert install_torch.WANTED in PROJECT["dependencies"]
    assert install_torch.is_new_enough(install_torch.TESTED.removeprefix("torch=="))


def test_constraints_leave_a_torch_that_fits():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if re.match(r"(torch|nvidia|triton)", line)]


@pytest.mark.parametrize(("found", "is_enough"), [("", False), ("2.9.1", False), ("2.10.0+cpu", False), ("2.11.0", True), ("2.15.0+cu130", True), ("3.0.1", True), ("nightly", False)])  # fmt: skip
def test_a_torch_that_fits_stays(found: str, is_enough: bool):
    assert install_torch.is_new_enough(found) == is_enough
    assert (install_torch.commands("", found, is_linux=True, driver=False) == []) == is_enough


def test_a_driver_is_seen_by_what_the_kernel_shows_or_by_its_tool(tmp_path: Path):
    assert not install_torch.has_driver(tmp_path, lambda name: None)
    assert install_torch.has_driver(
        tmp_path, lambda name: f"/usr/bin/{name}" if name == "nvidia-smi" else None
    )
    for name in install_torch.DRIVER_FILES:
        root = tmp_path / name.replace("/", "_")
        (root / name[1:]).parent.mkdir(parents=True)
        (root / name[1:]).write_text("")
        assert install_torch.has_driver(root, lambda name: None), name


class Machine:
    """Runs nothing: records the commands, and fails those that begin with a word of `broken`."""

    def __init__(self, *broken: str) -> None:
        self.broken, self.ran, self.said = broken, list[str](), list[str]()

    def run(self, words: Sequence[str]) -> int:
        self.ran.append(" ".join(words))
        return int(any(self.ran[-1].startswith(begin) for begin in self.broken))

    def install(
        self, asked: str = "", found: str = "", *, is_linux: bool = True, driver: bool = False
    ) -> int:
        todo = install_torch.commands(asked, found, is_linux=is_linux, driver=driver)
        return install_torch.install(todo, self.run, self.said.append)


def test_without_a_driver_the_cpu_build_is_taken_and_nothing_behind_it():
    machine = Machine()
    assert machine.install() == 0
    assert len(machine.ran) == 2 and machine.ran[0].startswith("pip install --quiet uv")
    assert "--torch-backend cpu torch>=2.11" in machine.ran[1] and machine.said == []


@pytest.mark.parametrize("broken", ["uv ", "pip install --quiet uv"])
def test_where_there_is_no_cpu_build_that_is_said_with_its_size(broken: str):
    machine = Machine(broken)
    assert machine.install() == 0
    assert machine.ran[-1] == f"pip install {install_torch.TESTED}"
    assert len(machine.said) == 1 and "no CPU build" in machine.said[0] and "GB" in machine.said[0]


def test_where_nothing_can_be_had_make_fails():
    machine = Machine("uv ", "pip install torch")
    assert machine.install() == 1


def test_with_a_driver_or_on_a_mac_pips_own_is_taken_and_what_is_asked_for_goes_first():
    for where in ({"driver": True}, {"is_linux": False}, {"driver": True, "found": "2.10.1"}):
        machine = Machine()
        assert machine.install(**where) == 0 and machine.ran == ["pip install torch>=2.11"]
    machine = Machine()
    assert machine.install("--no-deps 'torch==2.12.0'", "2.13.0") == 0
    assert machine.ran == ["pip install --no-deps torch==2.12.0"]
