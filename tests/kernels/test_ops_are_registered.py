"""An op is found at one place: its folder, which says everything about it."""

import pickle
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

import pyspec.cuda.ops
from pyspec.cuda import faults, jit, prepare, survey
from pyspec.cuda.jit import GpuKind
from pyspec.cuda.op import FaultPlace, Op, all_ops, guarded_ops, op_names, tiers_of
from pyspec.errors import ConfigError

FOLDER = Path(pyspec.cuda.ops.__file__).parent
CPU = torch.device("cpu")
NUMBERS = {"gdn": 3, "attend": 4, "rope_kv": 5, "mamba2": 7, "embed": 8, "norms": 9, "ahead": 10} | {
    "index_rows": 11,
    "sparse_attend": 12,
    "compress": 13,
    "short_conv": 14,
    "rope_latent": 15,
    "seen_pages": 16,
    "ngrams": 17,
    "moe": 18,
}
"""As they stand in cubins that are out: these never change."""
TOY = '''
"""`toy`: doubles a tensor."""

from dataclasses import dataclass

import torch

from pyspec.cuda.op import FaultPlace, Guard, Impl, Op


@dataclass(frozen=True)
class ToySpec:
    device: torch.device
    n: int = 4


def bind(spec):
    return lambda x: x + x


def check(launch, reference, spec):
    x = torch.ones(spec.n, device=spec.device)
    return None if torch.equal(launch(x), reference(x)) else "differs"


toy = Op(
    "toy",
    Impl("torch", lambda spec: lambda x: 2 * x),
    [Impl("cuda", bind, programs=lambda spec, target: [target.program("toy", {"N": spec.n})])],
    check,
    guard=Guard(99, FaultPlace.ROW),
    shapes=lambda device: [ToySpec(device)],
)
'''


def test_every_op_is_listed_and_found_where_it_says() -> None:
    for op in all_ops():
        module, _, name = op.home.partition(":")
        assert isinstance(op, Op) and getattr(import_module(module), name) is op, (
            "a child process finds it by this name"
        )
        assert not op.named or op.named in op_names()
    names = op_names()
    assert len(set(names)) == len(names)
    assert {path.parent.name for path in FOLDER.glob("*/op.py")} <= set(names)
    assert {op.name for op in all_ops()} - set(names) == {"linear_tall"}
    assert {op.name for op, _ in survey.standard(CPU)} == set(names), "doctor has a usual shape for each"


def test_adding_an_op_is_adding_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else names it: it is surveyed, selected, compiled ahead, checked in a child and named in a fault."""
    with pytest.raises(ConfigError, match="there is no op toy"):
        tiers_of("toy=reference")
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "__init__.py").touch()
    (tmp_path / "toy" / "op.py").write_text(TOY)
    monkeypatch.setattr(pyspec.cuda.ops, "__path__", [*pyspec.cuda.ops.__path__, str(tmp_path)])
    toy, spec = next((op, spec) for op, spec in survey.standard(CPU) if op.name == "toy")
    assert survey.findings([(toy, spec)]) == [survey.Finding("toy", "n 4", "cuda", True, ())]
    assert (toy, spec) in survey.asked()
    assert tiers_of("toy=reference") == (("toy", "reference"),)
    found = faults.fault_of(99, 1, 7, 4)
    assert (found.op, found.names) == ("toy", FaultPlace.ROW)
    assert str(found.error(0)) == "kernel toy, slot 0: index 7 is outside 0..3"
    assert found.slot([4, 5], [0, 1, 3]) == 5
    gpu = next(spec for op, spec in survey.standard(torch.device("cuda")) if op.name == "toy")
    target = GpuKind((9, 0))
    assert prepare.programs_of([(toy, gpu)], target) == [target.program("toy", {"N": 4})]
    home, impl, _ = pickle.loads(pickle.dumps((toy.home, "cuda", spec)))
    assert import_module(home.partition(":")[0]).toy is toy and impl in {i.name for i in toy.impls}


def test_numbers_in_fault_records_stay_as_they_are() -> None:
    assert {op.name: number for number, op in guarded_ops().items()} == NUMBERS
    assert len(guarded_ops()) == sum(op.guard is not None for op in all_ops()), "each has its own"
    assert faults.fault_of(6, 0, 0, 0).op == "number 6"


def test_guards_report_the_number_of_their_op() -> None:
    """Whether it is a macro of the launcher or stands in the source."""
    with_guards = set()
    for path in sorted(FOLDER.glob("*/*.cu")):
        text, op = jit.source(path.stem), path.parent.name
        if "clamped(" not in text.replace("int clamped(", ""):
            continue
        with_guards.add(op)
        for name, number in re.findall(r"#define OP_(\w+) (\d+)", text):
            assert NUMBERS[name.lower()] == int(number) and name.lower() == op, path.name
    assert with_guards == set(NUMBERS)
