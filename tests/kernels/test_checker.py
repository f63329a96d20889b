"""Implementations are checked in a child: one that is wrong, crashes or hangs there is refused here, and the verdict is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import checker_fakes
import pytest
import torch
from checker_fakes import Launch, TwiceSpec, planted

from pyspec.cuda import check_child, checker, verdicts
from pyspec.cuda.checker import Checker
from pyspec.cuda.op import Impl, Op

SPEC = TwiceSpec(torch.device("cpu"), 4)
LIMITS_S = {"start": 60.0, "binding": 20.0, "check": 2.0}


@pytest.fixture
def children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """An empty cache, a short patience, and the process ids of all children that were started."""
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))
    own = Checker(LIMITS_S)
    monkeypatch.setattr(checker, "shared", lambda: own)
    pids: list[int] = []
    start = checker.Child.__init__

    def counted(self: checker.Child) -> None:
        start(self)
        pids.append(self.process.pid)

    monkeypatch.setattr(checker.Child, "__init__", counted)
    yield pids
    own.close()


def fresh(op: Op[TwiceSpec, Launch]) -> Op[TwiceSpec, Launch]:
    """The op as another process sees it: nothing remembered."""
    return replace(op, verdicts={}, said=set(), _decided={})


@pytest.mark.slow
def test_every_bad_implementation_is_refused_with_its_reason(children: list[int]) -> None:
    op = fresh(checker_fakes.twice)
    reasons = dict(op.choices(SPEC))
    assert reasons["wrong"] == "its doubles are no doubles"
    assert reasons["raising"] == "failed its check: ValueError: the compiler says no"
    assert "its check ended the process: killed by signal 6" in (reasons["aborting"] or "")
    assert "a library's last words" in (reasons["aborting"] or "")
    assert reasons["exiting"] == "its binding ended the process: exit status 7"
    assert reasons["hanging"] == "its check took more than 2 s"
    assert reasons["full"] == "failed its check: RuntimeError: CUDA error: out of memory"
    assert reasons["right"] is None and reasons["torch"] is None
    assert op.chosen(SPEC).name == "right"
    assert len(children) == 4, "one child serves until it dies: three deaths"
    assert fresh(checker_fakes.only_bad).chosen(SPEC).name == "torch"


@pytest.mark.slow
def test_a_verdict_is_asked_for_once(children: list[int]) -> None:
    op = planted(checker_fakes.wrong, checker_fakes.raising, checker_fakes.right, name="twice")
    fresh(op).chosen(SPEC)
    checker.close()
    assert fresh(op).chosen(SPEC).name == "right" and len(children) == 1
    other = replace(SPEC, n=5)
    assert fresh(op).chosen(other).name == "right" and len(children) == 2, (
        "another shape is another verdict"
    )


def test_what_a_child_measures_is_in_its_verdict_and_harms_nothing_where_it_fails() -> None:
    def tuned(impl: Impl[TwiceSpec, Launch]) -> checker.Verdict:
        return check_child.examine(planted(impl.bind, name="twice"), impl, SPEC, lambda at: None)

    assert (
        tuned(Impl("right", checker_fakes.right, tune=lambda spec: f"{spec.n} of it")).choice
        == f"{SPEC.n} of it"
    )
    failing = tuned(Impl("right", checker_fakes.right, tune=checker_fakes.raising))  # type: ignore[arg-type]
    assert (failing.refusal, failing.choice) == (None, "")
    assert tuned(Impl("wrong", checker_fakes.wrong, tune=lambda spec: "some")).choice == ""


def test_a_choice_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))
    verdicts.save({"op": "x"}, None, "2 12")
    assert verdicts.load({"op": "x"}) == checker.Verdict(None, choice="2 12")


@pytest.mark.slow
def test_a_lack_of_memory_is_not_remembered(children: list[int]) -> None:
    op = planted(checker_fakes.full, name="twice")
    fresh(op).chosen(SPEC)
    checker.close()
    assert fresh(op).chosen(SPEC).name == "torch" and len(children) == 2


@pytest.mark.parametrize("impl", checker_fakes.unlucky.impls, ids=lambda impl: impl.name)
def test_what_a_machine_lacked_is_not_remembered(impl: Impl[TwiceSpec]) -> None:
    """No right to write, a compiler that was killed or does not build, no memory: it may be otherwise the next time."""
    found = check_child.examine(checker_fakes.unlucky, impl, SPEC, lambda at: None)
    assert found.refusal is not None
    assert found.refusal.startswith("failed its check: ")
    assert not found.lasting


def test_what_a_compiler_says_of_a_kernel_is_remembered() -> None:
    impl = next(i for i in checker_fakes.twice.impls if i.name == "raising")
    assert check_child.examine(checker_fakes.twice, impl, SPEC, lambda at: None).lasting


@pytest.mark.slow
def test_a_compiler_may_take_longer_than_a_kernel(children: list[int]) -> None:
    reasons = dict(fresh(checker_fakes.compiled).choices(SPEC))
    assert reasons["slow_to_compile"] is None, "3 s of compiling, where a check has 2"
    assert reasons["hanging_behind_a_compiler"] == "its check took more than 2 s"


@pytest.mark.slow
def test_other_sources_or_another_machine_are_other_verdicts(
    children: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # a source may change twice in a second here
    module = tmp_path / "planted_kernel.py"
    text = "import checker_fakes\ndef kernel(spec):\n    return lambda x: x * 2\n"
    text += "op = checker_fakes.planted(kernel, name='op')\nop.home = 'planted_kernel:op'\n"
    module.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    import planted_kernel

    def choose() -> str:
        checker.close()
        verdicts.digest.cache_clear()
        return fresh(planted_kernel.op).chosen(SPEC).name

    assert (choose(), len(children)) == ("kernel", 1)
    assert (choose(), len(children)) == ("kernel", 1)
    module.write_text(text.replace("* 2", "* 3"))
    assert (choose(), len(children)) == ("torch", 2)
    module.write_text(text)
    assert (choose(), len(children)) == ("kernel", 2), "the old verdict is still there"
    here = verdicts.machine(SPEC.device)
    monkeypatch.setattr(verdicts, "machine", lambda device: replace(here, driver="another"))
    assert (choose(), len(children)) == ("kernel", 3)


@pytest.mark.slow
def test_a_broken_cache_costs_a_check_and_nothing_else(children: list[int], tmp_path: Path) -> None:
    op = planted(checker_fakes.right, name="twice")
    key = verdicts.key_of(op.candidate(op.impls[0], SPEC))
    assert fresh(op).chosen(SPEC).name == "right"
    checker.close()
    (file,) = verdicts.folder().iterdir()
    whole = json.loads(file.read_text())
    lies = {"key": {**key, "driver": "old"}, "refusal": "no"}
    for text in ("", "{", "[]", "null", json.dumps(lies), json.dumps({**whole, "refusal": 3})):
        file.write_text(text)
        assert verdicts.load(key) is None, text
    assert fresh(op).chosen(SPEC).name == "right" and len(children) == 2
    assert verdicts.load(key) == checker.Verdict(None)
    verdicts.forget_all()
    verdicts.forget_all()
    assert verdicts.load(key) is None


@pytest.mark.slow
def test_a_cache_that_can_not_be_written_is_no_error(children: list[int], tmp_path: Path) -> None:
    (tmp_path / "verdicts").write_text("a file where the folder should be")
    assert fresh(planted(checker_fakes.right, name="twice")).chosen(SPEC).name == "right"


def test_processes_that_save_at_once_leave_one_whole_file(children: list[int]) -> None:
    op = fresh(checker_fakes.twice)
    key = verdicts.key_of(op.candidate(op.impls[0], SPEC))
    threads = [
        threading.Thread(target=verdicts.save, args=(key, f"reason {i}" * 1000)) for i in range(8)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    kept = verdicts.load(key)
    assert kept is not None and kept.refusal is not None and len(set(kept.refusal.split("reason "))) == 2
    assert len(list(verdicts.folder().iterdir())) == 1


@pytest.mark.slow
def test_what_a_child_can_not_find_is_refused_for_now(children: list[int]) -> None:
    op = planted(checker_fakes.right, name="nowhere")
    assert "could not be checked" in (fresh(op).refusal(op.impls[0], SPEC) or "")
    assert not verdicts.folder().exists()
    here = TwiceSpec(torch.device("cpu"), lambda: 4)  # type: ignore[arg-type]
    assert "could not be checked" in (fresh(op).refusal(op.impls[0], here) or "")


@pytest.mark.slow
def test_a_child_that_left_is_replaced(children: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    op = planted(checker_fakes.right, name="twice")
    assert fresh(op).chosen(SPEC).name == "right"
    os.kill(children[0], 9)
    assert fresh(op).chosen(replace(SPEC, n=7)).name == "right" and len(children) == 2


def test_what_fails_only_here_is_refused_too(children: list[int]) -> None:
    op = planted(checker_fakes.right, name="twice")

    def fails(spec: TwiceSpec) -> checker_fakes.Launch:
        raise RuntimeError("no room")

    here = replace(
        op, impls=[replace(op.impls[0], bind=fails)], verdicts={("right", SPEC): None}, _decided={}
    )
    assert torch.equal(here.bind(SPEC)(torch.ones(2)), torch.full((2,), 2.0))  # type: ignore[arg-type]
    assert here.chosen(SPEC).name == "torch"
    assert dict(here.choices(SPEC))["right"] == "can not be bound: RuntimeError: no room"


def test_without_a_gpu_what_is_not_native_is_checked_here(children: list[int]) -> None:
    impls = [replace(impl, native=False) for impl in checker_fakes.only_bad.impls[:2]]
    op = replace(checker_fakes.only_bad, impls=impls, verdicts={}, _decided={})
    assert [why for _, why in op.choices(SPEC)] == ["its doubles are no doubles", "failed its check: ValueError: the compiler says no", None]  # fmt: skip
    assert children == []


def test_sources_of_an_op_are_its_modules_and_kernels() -> None:
    """Everything a verdict on `linear` rests on is hashed: launcher, rows, packing, and each .cu they name."""
    seen: list[str] = []

    def watched(stem: str) -> str:
        seen.append(stem)
        return stem

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verdicts.jit, "source", watched)
        verdicts.digest.__wrapped__(("pyspec.cuda.ops.linear.op", "pyspec.cuda.ops.linear.cuda"))
    assert {"linear", "linear_sm90", "rows"} <= set(seen) and "gdn" not in seen


@pytest.mark.slow
def test_a_child_is_soon_there() -> None:
    """It imports torch, the op and little else; the server or the tokenizers would cost seconds."""
    code = (
        "import sys\nimport pyspec.cuda.check_child, pyspec.cuda.ops.attend.op\n"
        "heavy = {'tokenizers', 'jinja2', 'starlette', 'rich', 'pydantic', 'pyspec.models', 'pyspec.engine.api'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
