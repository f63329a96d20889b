"""Compiling and checking ahead: failures are reported as without it, and an op that is bound meanwhile waits for its own verdict."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import checker_fakes
import pytest
import torch
from checker_fakes import Launch, TwiceSpec

from pyspec.cuda import checker, jit, prepare, verdicts
from pyspec.cuda.checker import Checker, Verdict
from pyspec.cuda.jit import GpuKind, Program
from pyspec.cuda.op import Op
from pyspec.cuda.ops.angles.op import angles
from pyspec.cuda.ops.angles.ref import AnglesSpec
from pyspec.cuda.ops.norms.op import norms
from pyspec.cuda.ops.norms.ref import NormsSpec
from pyspec.cuda.prepare import Preparation, Wanted
from pyspec.errors import ConfigError, DeviceError

SPEC, GPU = TwiceSpec(torch.device("cpu"), 4), torch.device("cuda")
GOOD = GpuKind((9, 0)).program("angles")
BROKEN = Program("angles", "sm_90a", (("float", "no_such_type"),))


def candidate(name: str) -> verdicts.Candidate:
    op: Op[TwiceSpec, Launch] = checker_fakes.twice
    return op.candidate(next(i for i in op.impls if i.name == name), SPEC)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Checker]:
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(jit, "_kept", {})
    own = Checker({"start": 60.0, "binding": 20.0, "check": 5.0})
    monkeypatch.setattr(checker, "shared", lambda: own)
    yield own
    own.close()
    assert not verdicts.promised


class _Answers(Checker):
    """Stands for children: gives a test's verdicts and records the requests."""

    def __init__(self, found: dict[str, Verdict]) -> None:
        super().__init__({"start": 1.0, "binding": 1.0, "check": 1.0})
        self.found, self.asked, self.go = found, list[str](), threading.Event()

    def start(self) -> None:
        pass

    def check(self, home: str, impl: str, spec: object) -> Verdict:
        self.asked.append(impl)
        assert self.go.wait(20)
        return self.found[impl]


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Answers]:
    """Its threads end with the test: a late one would keep its verdict in the next test's folder."""
    made = _Answers(
        {
            "right": Verdict(None),
            "wrong": Verdict("it is wrong"),
            "full": Verdict("no memory", lasting=False),
        }
    )
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(jit, "_kept", {})
    monkeypatch.setattr(checker, "shared", lambda: made)
    yield made
    made.go.set()
    for thread in threading.enumerate():
        if thread.name.startswith("pyspec-checks"):
            thread.join(20)


def test_who_asks_meanwhile_waits_for_its_own_answer(answers: _Answers) -> None:
    names = ["right", "wrong"]
    preparation = Preparation([Wanted(candidate(n), [GOOD]) for n in names], 2, 1)
    heard: dict[str, str | None] = {}
    asking = [
        threading.Thread(target=lambda n=n: heard.update({n: verdicts.refusal(candidate(n))}))
        for n in names
    ]
    for thread in asking:
        thread.start()
    answers.go.set()
    for thread in asking:
        thread.join(30)
    assert heard == {"right": None, "wrong": "it is wrong"}
    assert answers.asked == names, "each once, in the order in which they were wanted"
    preparation.close()
    assert not verdicts.promised
    assert verdicts.refusal(candidate("wrong")) == "it is wrong" and answers.asked == names, "it is kept"


def test_what_may_be_different_the_next_time_is_asked_again(answers: _Answers) -> None:
    answers.go.set()
    preparation = Preparation([Wanted(candidate("full"), [])], 1, 1)
    promise = next(iter(verdicts.promised.values()))
    assert promise.result(20).refusal == "no memory"
    answers.found["full"] = Verdict(None)
    assert verdicts.refusal(candidate("full")) is None and answers.asked == ["full"] * 2
    preparation.close()


def test_what_is_known_is_not_checked_again(answers: _Answers) -> None:
    verdicts.save(verdicts.key_of(candidate("right")), None)
    preparation = Preparation([Wanted(candidate("right"), [GOOD])], 1, 1)
    assert not verdicts.promised and not answers.asked
    preparation.close()


def test_a_program_that_does_not_compile_hinders_nobody(
    answers: _Answers, caplog: pytest.LogCaptureFixture
) -> None:
    answers.go.set()
    both = [Wanted(candidate("wrong"), [BROKEN, GOOD]), Wanted(candidate("right"), [GOOD])]
    preparation = Preparation(both, 2, 1)
    assert verdicts.refusal(candidate("right")) is None
    assert verdicts.refusal(candidate("wrong")) == "it is wrong", (
        "what its check says, and no other word"
    )
    preparation.close()
    assert not [r for r in caplog.records if r.levelname in ("WARNING", "ERROR")]


def test_closing_waits_for_nothing_that_has_not_begun(answers: _Answers) -> None:
    """A waiting caller has it checked as if nothing had been prepared."""
    preparation = Preparation([Wanted(candidate("right"), []), Wanted(candidate("wrong"), [])], 1, 1)
    last = list(verdicts.promised.values())[-1]
    heard: list[str | None] = []
    waiting = threading.Thread(target=lambda: heard.append(verdicts.refusal(candidate("wrong"))))
    waiting.start()
    preparation.close()
    preparation.close()
    assert last.cancelled() and not verdicts.promised
    answers.go.set()
    waiting.join(20)
    assert heard == ["it is wrong"]


def test_a_load_goes_on_without_what_nobody_waits_for(
    answers: _Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is decided when it is asked for later, from the kept verdict, and not before."""
    right = next(i for i in checker_fakes.twice.impls if i.name == "right")
    op = replace(checker_fakes.twice, impls=[replace(right, native=True)], verdicts={}, _decided={})
    monkeypatch.setattr(prepare, "_first", lambda op, spec: op.impls[0])
    closed, told, left = threading.Event(), threading.Event(), threading.Event()
    monkeypatch.setattr(checker, "close", closed.set)
    monkeypatch.setattr(
        Checker, "close", lambda self: left.wait(20)
    )  # of the second child, whose end takes a while
    preparation = Preparation([Wanted(op.candidate(op.impls[0], SPEC), [])], 1, 2)
    prepare.settle([(op, SPEC)])
    preparation.finish([(op, SPEC)], told.set)
    assert SPEC not in op.decided and not closed.is_set() and verdicts.promised
    answers.go.set()
    assert closed.wait(20) and not told.wait(0.1), "memory is not looked at while a child has some of it"
    left.set()
    assert told.wait(20)
    assert op.decided[SPEC].name == "right" and not verdicts.promised and answers.asked == ["right"]
    again = replace(op, verdicts={}, _decided={})
    prepare.settle([(again, SPEC)])
    assert again.decided[SPEC].name == "right" and answers.asked == ["right"], "it is kept"


@pytest.mark.parametrize("free", [2 << 30, 64 << 30])
def test_a_load_that_fills_the_card_begins_when_no_child_has_memory_there(
    own: Checker, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    """Beside a card's last GiB a child of 0.9 to 1.8 GiB had every load end for want of memory."""
    right = next(i for i in checker_fakes.twice.impls if i.name == "right")
    op = replace(checker_fakes.twice, impls=[right], verdicts={}, _decided={})
    wanted = [Wanted(op.candidate(right, SPEC), [])]
    monkeypatch.setattr(jit, "missing", lambda device: None)
    monkeypatch.setattr(prepare, "target_of", lambda device: GpuKind((9, 0)))
    monkeypatch.setattr(prepare, "wanted_of", lambda asks, target: wanted)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 << 30))
    begun = prepare.begin([(op, SPEC)], GPU, 1 << 30)
    assert begun is not None
    fills = free < 3 << 30
    assert (own._child is None) == fills, "one that has all verdicts is gone"
    assert (SPEC in op.decided) == fills
    if fills:
        other = TwiceSpec(torch.device("cpu"), 5)
        assert verdicts.refusal(op.candidate(right, other)) is None, "nobody foretold this one"
        assert own._child is None, "its child does not stay either"
    over = threading.Event()
    begun.finish([], over.set)
    assert over.wait(60)
    assert own.stays is not fills
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (64 << 30, 80 << 30))
    again = prepare.begin([(op, SPEC)], GPU, 1 << 30)
    assert again is not None and own.stays, "the next load has room"
    again.close()


@pytest.mark.parametrize(("no_cuda", "no_triton"), [("x", None), (None, "x"), ("x", "x")])
def test_checks_run_ahead_wherever_either_tier_may(
    no_cuda: str | None, no_triton: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Triton alone has a first start with as many children, and without cuda-python."""
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(jit, "missing", lambda device: no_cuda)
    monkeypatch.setattr(prepare.tri, "missing", lambda device: no_triton)
    monkeypatch.setattr(prepare, "target_of", lambda device: GpuKind((9, 0)))
    monkeypatch.setattr(prepare, "wanted_of", lambda asks, target: [Wanted(candidate("right"), [])])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (64 << 30, 80 << 30))
    if no_cuda:
        monkeypatch.setitem(sys.modules, "cuda.core", None)
    monkeypatch.setattr(Preparation, "_check", lambda self, w, key: Verdict(None))
    monkeypatch.setattr(Checker, "start", lambda self: None)
    begun = prepare.begin([], GPU, 1 << 30)
    assert (begun is None) == bool(no_cuda and no_triton)
    if begun is not None:
        assert begun._names
        begun.close()


@pytest.mark.slow
def test_several_children_check_at_once(own: Checker) -> None:
    found = [Wanted(candidate(n), []) for n in ("right", "wrong", "raising", "exiting", "aborting")]
    preparation = Preparation(found, 1, 2)
    reasons = {w.candidate.impl: verdicts.refusal(w.candidate) for w in found}
    preparation.close()
    assert reasons["right"] is None and reasons["wrong"] == "its doubles are no doubles"
    assert reasons["raising"] == "failed its check: ValueError: the compiler says no"
    assert reasons["exiting"] == "its binding ended the process: exit status 7"
    assert "killed by signal 6" in (reasons["aborting"] or "")


def test_threads_that_want_the_same_compile_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(jit, "_kept", {})
    n, gate, compile_one = [0], threading.Barrier(4), jit._compile

    def counted(program: Program, *, use_cache: bool) -> jit.Compiled:
        n[0] += 1
        return compile_one(program, use_cache=use_cache)

    monkeypatch.setattr(jit, "_compile", counted)
    codes: list[jit.Compiled] = []

    def ask() -> None:
        gate.wait(20)
        codes.append(jit.compiled(GOOD))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert n == [1] and len({id(code) for code in codes}) == 1
    for _ in range(2):
        with pytest.raises(DeviceError, match="does not compile"):
            jit.compiled(BROKEN)
    assert n == [3], "who asks again tries again"


def test_all_that_is_wanted_is_compiled_and_failures_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(jit, "_kept", {})
    told: list[int] = []
    found = prepare.compile_all([GOOD, BROKEN], lambda n, what: told.append(n))
    assert sorted(told) == [1, 2] and [program for program, _ in found] == [GOOD, BROKEN]
    assert isinstance(found[0][1], jit.Compiled)
    assert isinstance(found[1][1], str) and found[1][1].startswith(
        "angles.cu does not compile for sm_90a"
    )


def test_programs_are_listed_for_gpus_that_are_not_here() -> None:
    asks = [
        (angles, AnglesSpec(GPU)),
        (norms, NormsSpec(GPU, 64, 1e-6)),
        (norms, NormsSpec(GPU, 63, 1e-6)),
    ]
    before = torch.cuda.get_device_capability
    found = prepare.programs_of(asks, GpuKind((8, 0)))
    stems = [p.stem for p in found]  # norms alone, and norms that prepare rows
    assert stems == ["angles", "norms", "norms"] and {p.arch for p in found} == {"sm_80"}
    assert torch.cuda.get_device_capability is before


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("sm_90", (9, 0)),
        ("sm_90a", (9, 0)),
        ("9.0", (9, 0)),
        ("SM_120f", (12, 0)),
        (" sm_121", (12, 1)),
        ("8.9", (8, 9)),
    ],
)
def test_architectures_have_several_names(name: str, capability: tuple[int, int]) -> None:
    assert prepare.target_named(name).capability == capability


@pytest.mark.parametrize("name", ["", "sm_", "sm_7", "sm_75", "sm_130", "hopper", "9.0.1x"])
def test_others_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        prepare.target_named(name)


def test_children_are_as_many_as_there_is_room_for() -> None:
    gib = 1 << 30
    assert prepare.n_children(100 * gib, 30 * gib, 16) == checker.MOST
    assert prepare.n_children(40 * gib, 33 * gib, 16) == 2
    assert prepare.n_children(34 * gib, 33 * gib, 16) == prepare.n_children(30 * gib, 33 * gib, 16) == 1
    assert prepare.n_children(100 * gib, 0, 2) == 1


@pytest.mark.parametrize("gpu", ["nvidiactl", "kfd"])
def test_a_first_start_begins_with_children(
    gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fake:
        def __init__(self) -> None:
            self.process = SimpleNamespace(poll=lambda: self.status)
            self.status, self.ended = None, False

        def end(self) -> None:
            self.ended = True

    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(checker, "Child", Fake)
    monkeypatch.setattr(checker, "n_cores", lambda: 5)
    monkeypatch.setattr(checker, "GPUS", (tmp_path / "nvidiactl", tmp_path / "kfd"))
    checker.begin()
    assert not checker._ready, "no GPU"
    (tmp_path / gpu).touch()
    checker.begin()
    checker.begin()
    first, second = checker._ready
    assert checker.take() is first
    second.status = 0  # it left
    third = checker.take()
    assert third not in (first, second) and second.ended and not checker._ready
    verdicts.save(verdicts.key_of(candidate("right")), None)
    checker.begin()
    assert not checker._ready, "something is known already"
    checker._ready.append(first)
    checker.close()
    assert first.ended and not checker._ready


def test_children_can_be_started_before_torch_is_imported() -> None:
    code = "import sys; from pyspec.cuda import checker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
