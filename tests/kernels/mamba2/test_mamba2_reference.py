"""`mamba2`: a state does not depend on how its tokens came; extremes; its self-check. Needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from machines import CPU, same
from recurrent_cases import Op, kept, played, seq, verified
from torch import Tensor

from pyspec.cuda.ops.mamba2 import ref as mamba2_ref
from pyspec.cuda.ops.mamba2.ref import Mamba2Spec
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.slots.recurrent import StateLayer

SHAPES = [Mamba2Shape(4, 16, 2, 16, 4), Mamba2Shape(8, 64, 2, 128, 4), Mamba2Shape(6, 32, 3, 96, 3)]


def op_of(shape: Mamba2Shape) -> Op:
    return Op(shape, kernels=mamba2_ref)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_state_is_bit_equal_however_its_tokens_came(shape: Mamba2Shape) -> None:
    plans = *map(verified, ((12,), (1,) * 12, (5, 1, 6), (2, 8, 2))), kept(*[1] * 12)
    assert same(*(played(op_of(shape), plan, 13, 12) for plan in plans))


@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_give_the_sequential_state_to_rounding(shape: Mamba2Shape) -> None:
    whole, single = (played(op_of(shape), plan, 150, 12) for plan in (kept(150), kept(*[1] * 150)))
    for a, b in zip(whole, single, strict=True):
        assert (a - b).norm() < 1e-5 * b.norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_formulas_in_f64_agree(shape: Mamba2Shape) -> None:
    """The recurrence written out once more, head by head."""
    n, op = 9, op_of(shape)
    (p,), (m, dt) = op.weights(), (t.double() for t in op.rows(n, torch.Generator().manual_seed(2)))
    before = torch.cat([torch.zeros(shape.n_conv - 1, shape.n_channel), m])
    v = sum(before[t : t + n] * p.conv_w[:, t] for t in range(shape.n_conv)) + p.conv_b
    v = v * torch.sigmoid(v)
    inner, wide = shape.n_head * shape.head_dim, shape.n_group * shape.n_state
    out = torch.zeros(n, shape.n_head, shape.head_dim, dtype=torch.float64)
    for h in range(shape.n_head):
        x = v[:, h * shape.head_dim : (h + 1) * shape.head_dim]
        g = h // (shape.n_head // shape.n_group)
        b, c = (v[:, at + g * shape.n_state :][:, : shape.n_state] for at in (inner, inner + wide))
        state = torch.zeros(shape.head_dim, shape.n_state, dtype=torch.float64)
        for t in range(n):
            step = torch.log1p(torch.exp(dt[t, h] + p.dt_bias[h]))
            state = state * torch.exp(step * p.a[h]) + torch.outer(step * x[t], b[t])
            out[t, h] = state @ c[t] + p.d[h] * x[t]
    got = played(op, verified([9]), n, 12, folds=True)[0]
    assert (got.double() - out).norm() < 1e-6 * out.norm()


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("raw", [50.0, -50.0, 1e4, -1e30])
def test_extreme_steps_forget_all_or_nothing_and_never_give_nan(keep: bool, raw: float) -> None:
    op = op_of(SHAPES[0])
    launch, layer, (m, dt), (p,) = op.bind(), op.layer(1, 40), op.rows(40), op.weights()
    layer.state.normal_()
    old = layer.state.clone()
    dt[:] = raw
    out = launch(m, dt, p, layer, op.laid([seq(0, 40, keep)], 1))
    mamba2_ref.flush(layer, 0, 0 if keep else 40)
    assert out.isfinite().all() and layer.state.isfinite().all()
    if raw < 0:
        assert torch.allclose(layer.state, old)
    else:
        spoilt, want = op.layer(1, 40), layer.state.clone()
        spoilt.state.fill_(1e6)
        launch(m, dt, replace(p, a=p.a.clamp(max=-5.0)), spoilt, op.laid([seq(0, 40, True)], 1))
        assert spoilt.state.abs().max() < 10 * want.abs().max() + 1e3 * raw


def test_one_token_that_forgets_all_does_not_blur_the_decays_after_it() -> None:
    """In chunks decays are differences of sums: a log decay of -1e6 among them must not cost the others their digits."""
    op, results = op_of(SHAPES[0]), []
    (m, dt), (p,) = op.rows(64), op.weights()
    dt[3] = 3e3  # times a of down to -300
    for cuts in ((64,), (1,) * 64):
        launch, layer, at = op.bind(), op.layer(1, 4), 0
        for n in cuts:
            launch(m[at : at + n], dt[at : at + n], p, layer, op.laid([seq(0, n, True)], 1))
            at += n
        results.append(layer.state)
    assert (results[0] - results[1]).norm() < 1e-5 * results[1].norm()


# -- the op's own check ----------------------------------------------------------------------------------------------


def checked(change: Callable[[Tensor, StateLayer], None]) -> str | None:
    """The check's answer on the reference with `change(outputs, layer)`."""
    spec = Mamba2Spec(CPU, SHAPES[0])
    reference = mamba2_ref.bind(spec)

    def launch(*args: object) -> Tensor:
        out = reference(*args)  # type: ignore[arg-type]
        change(out, args[3])  # type: ignore[arg-type]
        return out

    return mamba2_ref.check(launch, reference, spec)


def test_the_check_lets_the_reference_pass_and_nothing_that_is_off() -> None:
    assert checked(lambda out, layer: None) is None
    assert "outputs differ" in (checked(lambda out, layer: out[-1, -1].mul_(1.01)) or "")
    assert "outputs differ" in (checked(lambda out, layer: out[0, 0, :1].fill_(float("nan"))) or "")
    assert "states differ" in (checked(lambda out, layer: layer.dt[:, -1].add_(0.1)) or "")
    assert checked(lambda out, layer: layer.state.mul_(1.001)) is not None
    assert checked(lambda out, layer: layer.conv[:, 0].add_(0.1)) is not None
