"""`pyspec doctor` on a machine without a GPU: it reports the missing GPU and the implementations in use."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from pyspec.cli import doctor, main
from pyspec.cpu import kernels
from pyspec.cuda import jit, machine, prepare, survey, tri, tri_install, verdicts
from pyspec.cuda.op import op_names
from pyspec.cuda.survey import Finding, RefusedImpl

FIXTURE = Path(__file__).parents[1] / "fixtures" / "qwen35.gguf"
CPU = torch.device("cpu")
OPS = [op for op in op_names() if kernels.missing() or op not in doctor.GPU_OPS]


@pytest.fixture(autouse=True)
def _small_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A small buffer to time, and a cache of its own."""
    monkeypatch.setattr(machine, "CPU_BYTES", 1 << 20)
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))


def invoke(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["doctor", "-dev", "cpu", *args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def test_a_machine_without_a_gpu_is_healthy_and_doctor_says_what_runs(tmp_path: Path) -> None:
    code, out = invoke()
    assert code == 0
    last = out.strip().splitlines()[-1]
    assert last.startswith("this machine runs pyspec on its CPU: yes (")
    assert "gloo, gathered and summed in the order of ranks" in out and "no other GPU" in " ".join(
        out.split()
    )
    assert "GB/s measured" in out and str(tmp_path) in out.replace("\n", "")
    for op in OPS:
        assert out.count(f"\n {op} ") in (1, 2), "a row for each outcome"
    assert sum(invoke("-v")[1].count(f"\n {op} ") for op in OPS) > 2 * sum(
        out.count(f"\n {op} ") for op in OPS
    )


def test_the_doctors_json_says_what_its_table_says(tmp_path: Path) -> None:
    code, out = invoke("--json")
    about = json.loads(out)
    assert code == 0 and about["own_kernels"] is False and about["reason"]
    assert about["healthy"] is True and "on its CPU: yes" in about["verdict"]
    assert about["bandwidth_bytes_per_s"] > 1e6 and about["memory_bytes"] > 1 << 28
    assert about["cache"] == str(tmp_path)
    assert about["cpu_kernels"] == kernels.described()
    assert {f["op"] for f in about["ops"]} == set(OPS)
    assert all(f["choice"] != "cuda" for f in about["ops"])
    assert all(
        f["refused"][0]["impl"] in ("cuda", "cudnn", "library", "triton", "wgmma", "unpack")
        for f in about["ops"]
        if f["refused"]
    )
    gdn = next(f for f in about["ops"] if f["op"] == "gdn")
    assert (gdn["choice"], gdn["own"]) == (
        ("cpu", True) if kernels.missing() is None else ("torch", False)
    )


def test_with_a_model_its_own_shapes_are_looked_at() -> None:
    code, out = invoke(str(FIXTURE), "--json")
    shapes = {f["op"]: f["shape"] for f in json.loads(out)["ops"]}
    assert code == 0
    assert {"attend", "gdn"} <= set(shapes) and "head_dim 256" not in shapes["attend"]
    assert CliRunner().invoke(main, ["doctor", "no-such-model"]).exit_code == 2


def test_what_is_the_matter_with_triton_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tri_install, "version", lambda: "3.5.0")
    monkeypatch.setattr(tri, "missing", lambda device: "Triton 3.5.0 is too old")
    monkeypatch.setattr(survey, "standard", lambda device: [])
    code, out = invoke("--kernels", "triton")
    assert code == 0 and "3.5.0: Triton 3.5.0 is too old" in " ".join(out.split())
    assert json.loads(invoke("--json")[1])["triton"] == {
        "version": "3.5.0",
        "refused": "Triton 3.5.0 is too old",
    }
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert doctor._why_not("cpu", []) == "no AMD GPU"


def test_recheck_forgets_what_was_known() -> None:
    verdicts.save({"op": "x"}, "it was bad")
    invoke("--json")
    assert verdicts.load({"op": "x"}) is not None
    invoke("--json", "--recheck")
    assert verdicts.load({"op": "x"}) is None


def test_yes_takes_kernels_of_our_own_for_all() -> None:
    good = Finding("gdn", "n 3", "cuda", True, ())
    bad = Finding("linear", "Q5_K, n_in 64", "torch", False, (RefusedImpl("cuda", "no packed form"),))
    assert doctor._why_not("cuda", [good, good]) == ""
    assert doctor._why_not("cuda", [good, bad]) == (
        "1 of 2 run as torch, first linear (Q5_K, n_in 64): cuda: no packed form"
    )
    assert doctor._why_not("cpu", [good]) != ""


def test_a_cpu_that_is_not_as_it_should_be_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def finding(reason: str) -> Finding:
        return Finding(
            "gdn",
            "n 3",
            "torch",
            False,
            (RefusedImpl("cuda", "runs on NVIDIA GPUs only"), RefusedImpl("cpu", reason)),
        )

    monkeypatch.setattr(machine, "has_driver", lambda: False)
    limit, broken = map(
        finding, ("a state of 7 rows is not a multiple of 8", "failed its check: it is wrong")
    )
    assert doctor._wrong_on_cpu([limit], was_asked=False) == ""
    assert (
        doctor._wrong_on_cpu([limit, broken], was_asked=True)
        == "gdn (n 3): cpu: failed its check: it is wrong"
    )
    assert (
        doctor._verdict("cpu", "no NVIDIA GPU", "")
        == "this machine runs pyspec on its CPU: yes (no NVIDIA GPU)"
    )
    monkeypatch.setattr(machine, "has_driver", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "this torch was built for CPUs" in doctor._wrong_on_cpu([], was_asked=False)
    assert doctor._wrong_on_cpu([], was_asked=True) == ""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "finds no GPU" in doctor._wrong_on_cpu([], was_asked=False)


@pytest.mark.parametrize(
    ("driver", "said"),
    [
        (False, "no NVIDIA driver"),
        (True, "pip uninstall torch, then pip install 'torch>=2.11' 'cuda-core"),
    ],
)
def test_a_gpu_that_this_torch_can_not_use_has_the_right_advice(
    driver: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspec.engine.plan import describe

    monkeypatch.setattr(describe, "has_driver", lambda: driver)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert said in describe._other_devices("cuda") and describe._other_devices("cuda").endswith(
        "-dev cpu"
    )


def test_the_standard_shapes_name_every_op_once_at_least() -> None:
    asks = survey.standard(CPU)
    assert {op.name for op, _ in asks} == set(op_names())
    for op, spec in asks:
        module, _, name = op.home.partition(":")
        assert getattr(import_module(module), name) is op, "where a child process finds it"
        assert "device" not in survey.shape_of(spec)
        assert replace(spec, device=torch.device("cuda", 1)) != spec


def compiled_ahead(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["doctor", "--compile", *args])
    return result.exit_code, result.stdout, result.stderr


def test_kernels_are_compiled_ahead_for_gpus_that_are_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspec.cuda.ops.angles.op import angles
    from pyspec.cuda.ops.angles.ref import AnglesSpec

    monkeypatch.setattr(jit, "_kept", {})
    monkeypatch.setattr(survey, "standard", lambda device: [(angles, AnglesSpec(device))])
    monkeypatch.setattr(survey, "products", lambda device: [])
    code, out, _ = compiled_ahead("--arch", "sm_80,sm_90")
    assert code == 0 and out.startswith(f"2 of 2 programs for sm_80, sm_90a are in {tmp_path}")
    assert list((tmp_path / "cubin").rglob("*")), "where a load looks for them"
    code, out, _ = compiled_ahead("--arch", "sm_80,sm_90", "--json")
    assert code == 0 and json.loads(out) | {"seconds": 0} == {
        "archs": ["sm_80", "sm_90a"],
        "programs": 2,
        "seconds": 0,
        "cache": str(tmp_path / "cubin"),
        "failed": [],
    }
    monkeypatch.setattr(jit, "_kept", {})
    monkeypatch.setattr(jit, "source", lambda stem: "no kernel")
    code, out, _ = compiled_ahead("--arch", "sm_90")
    assert code == 1 and "0 of 1 programs" in out and "angles.cu does not compile for sm_90a: " in out


def test_a_models_own_kernels_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[jit.Program] = []
    monkeypatch.setattr(prepare, "compile_all", lambda programs, tell: wanted.extend(programs) or [])
    fixture = FIXTURE.parent / "qwen35_q8_0.gguf"
    assert compiled_ahead(str(fixture), "--arch", "sm_90")[0] == 0
    assert {p.stem for p in wanted} >= {"linear_sm90", "linear_wgmma", "rows", "norms", "embed", "ahead", "best"}  # fmt: skip
    assert len(wanted) == len(set(wanted)) and {p.arch for p in wanted} == {"sm_90a"}
    wanted.clear()
    assert compiled_ahead("--arch", "sm_120")[0] == 0
    assert {p.stem for p in wanted} >= {"gdn", "mamba2", "moe", "linear_sm90", "sparse_attend"}, (
        "usual shapes"
    )


def test_ahead_for_which_gpu_is_said_where_there_is_none() -> None:
    code, _, err = compiled_ahead()
    assert code != 0 and "--arch sm_90" in err
    code, _, err = compiled_ahead("--arch", "sm_75")
    assert code == 2 and "sm_80 to sm_121" in err
    result = CliRunner().invoke(main, ["doctor", "--arch", "sm_90"])
    assert result.exit_code == 2 and "--arch needs --compile" in result.stderr
