"""Experts of every kind a file may declare, against the formulas of the two families written out in numpy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pyspec.errors import BadTensors, ModelError
from pyspec.gguf import GGMLType, GGUFFile, open_gguf
from pyspec.gguf.write import GGUFWriter
from pyspec.models.binding import Binding, bound_at
from pyspec.models.blocks.moe import Experts
from pyspec.models.bound import BoundForward
from pyspec.models.checks import check_tensors
from pyspec.models.part import Place
from pyspec.models.ropes import Ropes
from pyspec.models.weights import Weights
from pyspec.slots.kv_types import F16, KvFormat

CPU, N, EPS, P = torch.device("cpu"), 32, 1e-6, "blk.0"
QWEN = Experts(8, 3, 16, n_ff_shared=24, shared_gate=True)
NEMOTRON = Experts(8, 4, 48, n_ff_shared=40, router="sigmoid", scale=2.5, act="relu2", latent=16)
SHAPES = {
    "qwen": QWEN,
    "nemotron": NEMOTRON,
    "nano": Experts(8, 2, 24, n_ff_shared=16, router="sigmoid", scale=2.5, act="relu2"),
    "alone": Experts(6, 6, 16, renorm=False),
}
Tensors = dict[str, np.ndarray]


def tensors(s: Experts, *, bias: bool = False, seed: int = 0) -> Tensors:
    rng = np.random.default_rng(seed)
    n, e = s.latent or N, s.n_expert

    def draw(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)

    made = {"ffn_norm.weight": 1 + 0.1 * draw(N), "ffn_gate_inp.weight": 3 * draw(e, N)}
    inner = s.inner
    made |= {f"ffn_{x}_exps.weight": draw(e, s.n_ff, n) for x in inner}
    made["ffn_down_exps.weight"] = draw(e, n, s.n_ff)
    if bias:
        made["exp_probs_b.bias"] = rng.standard_normal(e).astype(np.float32)
    if s.latent:
        made |= {"ffn_latent_down.weight": draw(n, N), "ffn_latent_up.weight": draw(N, n)}
    if s.n_ff_shared:
        made |= {f"ffn_{x}_shexp.weight": draw(s.n_ff_shared, N) for x in inner}
        made["ffn_down_shexp.weight"] = draw(N, s.n_ff_shared)
    if s.shared_gate:
        made["ffn_gate_inp_shexp.weight"] = draw(N)
    return made


def write(path: Path, made: Tensors) -> GGUFFile:
    writer = GGUFWriter(path, "any")
    for name, value in made.items():
        writer.add_tensor_info(f"{P}.{name}", GGMLType.F32, value.shape)
    writer.write(lambda info: iter([made[info.name.removeprefix(f"{P}.")].astype("<f4").tobytes()]))
    return open_gguf(path)


def folded(made: Tensors) -> Tensors:
    """The same with scales in the weights."""
    out = dict(made)
    for name in [name for name in made if name.endswith(".scale")]:
        weight = name.replace(".scale", ".weight")
        out[weight] = made[weight] * out.pop(name).reshape(-1, *[1] * (made[weight].ndim - 1))
    return out


def binding(w: Weights) -> Binding:
    return bound_at(w, P, 0, N, EPS, KvFormat.both(F16), Ropes(w), norm="ffn_norm")


def bound(w: Weights, s: Experts) -> BoundForward:
    return BoundForward(lambda f, x: s.forward(f, x, x), binding(w), N)


def run(feed: BoundForward, x: torch.Tensor) -> torch.Tensor:
    """x + feed(norm(x)), of which no row looks at a batch."""
    return feed.run(x, None)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def expected(s: Experts, made: Tensors, x: np.ndarray) -> np.ndarray:
    """One row after the other, in float64."""
    t = {name: value.astype(np.float64) for name, value in made.items()}
    out = []
    for row in x.astype(np.float64):
        f = row / np.sqrt((row**2).mean() + EPS) * t["ffn_norm.weight"]
        r = t["ffn_gate_inp.weight"] @ f
        p = sigmoid(r) if s.router == "sigmoid" else np.exp(r - r.max()) / np.exp(r - r.max()).sum()
        chosen = np.argsort(-(p + t.get("exp_probs_b.bias", 0.0)), kind="stable")[: s.n_used]
        w = p[chosen] / (max(p[chosen].sum(), 2**-14) if s.renorm else 1.0) * s.scale
        v = t["ffn_latent_down.weight"] @ f if s.latent else f

        def feed(u: np.ndarray, kind: str, part: tuple[int, ...] = ()) -> np.ndarray:
            up = t[f"ffn_up_{kind}.weight"][part] @ u
            gate = t[f"ffn_gate_{kind}.weight"][part] @ u if s.act == "swiglu" else up
            h = gate * sigmoid(gate) * up if s.act == "swiglu" else np.maximum(up, 0) ** 2
            return t[f"ffn_down_{kind}.weight"][part] @ h

        y = sum(w[i] * feed(v, "exps", (e,)) for i, e in enumerate(chosen))
        y = t["ffn_latent_up.weight"] @ y if s.latent else y
        if s.n_ff_shared:
            gate = sigmoid(t["ffn_gate_inp_shexp.weight"] @ f) if s.shared_gate else 1.0
            y = y + gate * feed(f, "shexp")
        out.append(row + y)
    return np.stack(out)


@pytest.mark.parametrize("dense", [torch.float32, None], ids=["unpacked", "packed"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", SHAPES)
def test_experts_of_every_kind_of_shape_equal_the_formulas(
    kind: str, bias: bool, dense: torch.dtype | None, tmp_path: Path
) -> None:
    s = SHAPES[kind]
    made = tensors(s, bias=bias)
    with write(tmp_path / "m.gguf", made) as file:
        check_tensors(file, s.tensors(Place(file, P, N, EPS)))
        feed = bound(Weights(file, CPU, dense), s)
        x = np.random.default_rng(1).standard_normal((11, N)).astype(np.float32)
        got = run(feed, torch.from_numpy(x))
    assert np.abs(got.numpy() - expected(s, made, x)).max() < 1e-4


@pytest.mark.parametrize("kind", ["qwen", "nano"])
def test_a_shared_expert_of_the_others_types_may_run_with_them(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU is given, in plain torch: the same as apart. Other types, widths and inputs stay apart."""
    s = replace(SHAPES[kind], n_ff=32, n_ff_shared=64)
    made = tensors(s)
    with write(tmp_path / "m.gguf", made) as file:
        w, x = Weights(file, CPU, None), torch.randn(5, N)
        apart = run(bound(w, s), x)
        monkeypatch.setattr(Binding, "streams", True)
        monkeypatch.setattr(Binding, "takes", lambda *_: True)
        at = binding(w)
        assert s.spec(at).pieces == 2
        for other in ({"n_ff": 48}, {"latent": 16, "shared_gate": False}, {"n_ff_shared": 0}):
            assert not replace(s, **other).spec(at).pieces
        assert torch.allclose(run(bound(w, s), x), apart, atol=1e-5)
        rng = np.random.default_rng(2)
        beside = {
            f"ffn_{m}_exps.scale": rng.uniform(-2, 2, 8).astype(np.float32) for m in ("up", "down")
        }
        beside |= {f"ffn_{m}_shexp.scale": np.full(1, 0.7, np.float32) for m in ("up", "down")}
        with write(tmp_path / "s.gguf", made | beside) as scaled:
            both = run(bound(Weights(scaled, CPU, None), s), x)
        monkeypatch.setattr(Binding, "streams", False)
        with write(tmp_path / "f.gguf", folded(made | beside)) as one:
            assert torch.allclose(both, run(bound(Weights(one, CPU, None), s), x), atol=1e-5)
        monkeypatch.setattr(Binding, "streams", True)
        own = Binding.type_of
        for name in ("ffn_down_shexp.weight", "ffn_up_shexp.weight"):
            types = {name: GGMLType.Q8_0}
            monkeypatch.setattr(Binding, "type_of", lambda at, x, t=types: t.get(x) or own(at, x))
            assert not s.spec(at).pieces


def test_gates_and_ups_in_one_tensor(tmp_path: Path) -> None:
    made = tensors(QWEN)
    joined = {k: v for k, v in made.items() if k not in ("ffn_gate_exps.weight", "ffn_up_exps.weight")}
    joined["ffn_gate_up_exps.weight"] = np.concatenate(
        (made["ffn_gate_exps.weight"], made["ffn_up_exps.weight"]), 1
    )
    x = torch.randn(5, N)
    for dense in (torch.float32, None):
        with write(tmp_path / "a.gguf", made) as apart, write(tmp_path / "b.gguf", joined) as one:
            check_tensors(one, QWEN.tensors(Place(one, P, N, EPS)))
            a, b = (run(bound(Weights(f, CPU, dense), QWEN), x) for f in (apart, one))
        assert torch.equal(a, b)


def test_the_shared_gate_may_be_a_row(tmp_path: Path) -> None:
    made = tensors(QWEN)
    row = made | {"ffn_gate_inp_shexp.weight": made["ffn_gate_inp_shexp.weight"][None]}
    x = torch.randn(5, N)
    with write(tmp_path / "a.gguf", made) as vector, write(tmp_path / "b.gguf", row) as matrix:
        check_tensors(matrix, QWEN.tensors(Place(matrix, P, N, EPS)))
        a, b = (run(bound(Weights(f, CPU, torch.float32), QWEN), x) for f in (vector, matrix))
    assert torch.equal(a, b)


def test_the_router_stays_f32_when_matrices_are_not(tmp_path: Path) -> None:
    """Two experts that differ in the twentieth bit: bfloat16 would not tell them apart."""
    made = tensors(QWEN)
    made["ffn_gate_inp.weight"][5] = made["ffn_gate_inp.weight"][2]
    made["ffn_gate_inp.weight"][5, 0] *= 1 + 2**-18
    with write(tmp_path / "m.gguf", made) as file:
        feed = bound(Weights(file, CPU, torch.bfloat16), QWEN)
    (router,) = (t for w, t in feed.sources.weights.items() if "ffn_gate_inp.weight" in w.names)
    assert router.dtype == torch.float32 and not torch.equal(router[2], router[5])


def test_factors_of_scores_are_the_routers(tmp_path: Path) -> None:
    """They were passed over."""
    made = tensors(QWEN)
    scales = {f"ffn_gate_inp{x}.scale": np.full(1, 0.3, np.float32) for x in ("", "_shexp")}
    x = torch.randn(7, N)
    with (
        write(tmp_path / "a.gguf", folded(made | scales)) as a,
        write(tmp_path / "b.gguf", made | scales) as b,
    ):
        one, two, without = (
            run(bound(Weights(f, CPU, None), QWEN), x) for f in (a, b, write(tmp_path / "c.gguf", made))
        )
    assert torch.allclose(one, two, atol=1e-5) and not torch.allclose(one, without, atol=1e-2)


SCALED = {
    "relu2": (NEMOTRON, {"up": 8, "down": 8}),
    "a gate, one number for all": (QWEN, {"gate": 1, "down": 1}),
    "weights of inputs": (replace(SHAPES["alone"], weighs_input=True), {"down": 6}),
    "biases": (replace(SHAPES["alone"], act="swiglu_oai", shifted=True), {"up": 6, "down": 6}),
}


@pytest.mark.parametrize("kind", SCALED)
def test_second_level_scales_of_experts(kind: str, tmp_path: Path) -> None:
    """`.scale` [expert] beside a stack multiplies its products, zeros and numbers below it, too; folding it into the weights gives the same. That
    of outputs is the rows' weights', unless those multiply inputs or a bias stands between."""
    s, scales = SCALED[kind]
    made, rng = tensors(s), np.random.default_rng(5)
    if s.shifted:
        made |= {f"ffn_{x}_exps.bias": rng.standard_normal((6, 16)) for x in ("gate", "up")}
        made |= {
            "ffn_down_exps.bias": rng.standard_normal((6, N)),
            "ffn_gate_inp.bias": rng.standard_normal(6),
        }
    made |= {f"ffn_{x}_exps.scale": rng.uniform(-2, 2, n).astype(np.float32) for x, n in scales.items()}
    made["ffn_down_exps.scale"][0] = 0.0 if len(made["ffn_down_exps.scale"]) > 1 else -0.5
    x = torch.randn(7, N)
    with write(tmp_path / "a.gguf", folded(made)) as a, write(tmp_path / "b.gguf", made) as b:
        is_factored = not (s.shifted or s.weighs_input)
        assert s.factored(Place(b, P, N, EPS)) == is_factored
        assert s.spec(binding(Weights(b, CPU, None))).scaled == (len(scales) > 1 or not is_factored)
        for dense in (torch.float32, None):
            one, two = (run(bound(Weights(f, CPU, dense), s), x) for f in (a, b))
            assert torch.allclose(one, two, atol=1e-4)


def test_a_wrong_stack_is_named(tmp_path: Path) -> None:
    made = tensors(NEMOTRON)
    made["ffn_up_exps.weight"] = made["ffn_up_exps.weight"][:, :, :8].copy()
    says = r"blk\.0\.ffn_up_exps\.weight: want \[8, 48, 16\], file has \[8, 48, 8\]"
    with write(tmp_path / "m.gguf", made) as file, pytest.raises(BadTensors, match=says):
        check_tensors(file, NEMOTRON.tensors(Place(file, P, N, EPS)))


@pytest.mark.parametrize(("n_expert", "n_used", "n_ff"), [(8, 9, 16), (8, 0, 16), (0, 0, 16), (8, 2, 0)])
def test_impossible_shapes_are_refused(n_expert: int, n_used: int, n_ff: int) -> None:
    with pytest.raises(ModelError, match="expert"):
        Experts(n_expert, n_used, n_ff)


def test_a_gated_shared_expert_beside_experts_of_another_width_is_refused() -> None:
    with pytest.raises(ModelError, match="another width"):
        replace(QWEN, latent=16)
