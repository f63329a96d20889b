"""An op is found at one place: its folder, its line in the survey, its number where its kernels have guards."""

import re
from importlib import import_module
from pathlib import Path

import torch

import pyspec.cuda.ops
from pyspec.cuda import faults, jit, survey
from pyspec.cuda.op import Op
from pyspec.cuda.ops.linear.op import linear_tall

FOLDER = Path(pyspec.cuda.ops.__file__).parent
BESIDE = {
    "attend_prompt": "attend",
    "attend_blocks": "attend",
    "linear_tall": "linear",
}  # ops that share another one's folder


def test_every_op_is_surveyed_and_found_where_it_says() -> None:
    folders = {path.parent.name for path in FOLDER.glob("*/op.py")}
    assert folders == {name for name in survey.OPS if name not in BESIDE}
    for op in (*survey.ops(), linear_tall):
        module, _, name = op.home.partition(":")
        assert isinstance(op, Op) and getattr(import_module(module), name) is op, (
            "a child process finds it by this name"
        )
    assert len({op.name for op in survey.ops()}) == len(survey.OPS)
    asked = {op.name for op, _ in survey.standard(torch.device("cpu"))}
    assert asked == set(survey.OPS), "doctor has a usual shape for each"


def test_guards_report_the_number_of_their_op() -> None:
    """Whether it is a macro of the launcher or stands in the source."""
    guarded = set()
    for path in sorted(FOLDER.glob("*/*.cu")):
        text, op = jit.source(path.stem), path.parent.name
        if "clamped(" not in text.replace("int clamped(", ""):
            continue
        guarded.add(op)
        for name, number in re.findall(r"#define OP_(\w+) (\d+)", text):
            assert faults.OPS[int(number)] == name.lower() == op, path.name
    assert guarded == set(faults.NUMBERS)
