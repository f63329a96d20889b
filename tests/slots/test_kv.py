"""Types of keys and values: their values by plain formulas, and their bytes."""

from dataclasses import replace

import pytest
import torch

from pyspec.config import KV_TYPES
from pyspec.cuda.ops.gdn.shape import GdnShape
from pyspec.engine.plan.memory_plan import checkpoint_bytes, memory_bytes
from pyspec.errors import ModelError
from pyspec.slots.kv import KvFormat, KVPool
from pyspec.slots.kv_codes import dequantized, quantized
from pyspec.slots.kv_types import F8, Q4_0, Q4_1, Q5_0, Q5_1, TYPES, KvType, row_bytes
from pyspec.slots.memory import allocate, copy_page
from pyspec.slots.parts import CacheSizes, Paged, Recurrent

CPU = torch.device("cpu")
STEP = {F8: 0.13, Q5_1: 0.11, Q5_0: 0.12, Q4_1: 0.22, Q4_0: 0.28}  # of the largest of such rows


def test_every_type_of_the_flags_has_its_data() -> None:
    assert tuple(TYPES) == KV_TYPES


def test_q8_0_is_the_nearest_of_255_multiples_of_the_blocks_scale() -> None:
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(50, 3, 64, generator=gen) * torch.logspace(-3, 2, 50)[:, None, None]
    codes, scale = quantized(x)
    assert codes.dtype is torch.int8 and scale.dtype is torch.float16 and scale.shape == (50, 3, 2)
    blocks = x.double().unflatten(-1, (2, 32))
    top = blocks.abs().amax(-1)
    assert ((scale.double() - top / 127).abs() <= top / 127 * 2**-11 + 2**-25).all()
    nearest = (blocks / scale.double()[..., None]).round().clamp(-127, 127).flatten(-2)
    assert ((codes - nearest).abs() <= 1).all() and (codes == nearest).double().mean() > 0.9999, (
        "ties alone may differ"
    )
    off = (dequantized(codes, scale, torch.float64).unflatten(-1, (2, 32)) - blocks).abs().amax(-1)
    assert (off <= 0.5004 * scale.double() + 127 * 2**-25).all()


def test_ties_go_to_the_even_code() -> None:
    x = torch.tensor([127.0, 0.5, 1.5, -0.5, -2.5, 3.5] + [0.0] * 26)
    codes, scale = quantized(x)
    assert scale.tolist() == [1.0] and codes[:6].tolist() == [127, 0, 2, 0, -2, 4]


def test_q8_0_of_extreme_blocks() -> None:
    rows = torch.zeros(6, 32)
    rows[1, 3] = 1e-9  # no scale is so small
    rows[2, :2] = torch.tensor([torch.inf, -1.0])
    rows[3, 0] = torch.nan
    rows[4, 0] = 3e5
    rows[5, :2] = torch.tensor([6e-6, -3e-6])  # scales of few bits
    codes, scale = quantized(rows)
    y = dequantized(codes, scale, torch.float32)
    assert not y[:2].any() and y[2, 0] == 127 * 515.5 == y[4, 0] and y[2, 1] == 0
    assert y[3].isnan().all() and not codes[3].any()
    assert y[[2, 4]].half().isfinite().all(), "finite where kernels compute"
    assert (y[5] - rows[5]).abs().max() <= 2**-25


def test_f8_saturates_and_rounds_to_even() -> None:
    pool = KVPool(2, 1, 8, KvFormat.both(F8), CPU)
    x = torch.tensor([1e9, -torch.inf, 17.0, 19.0, 2**-10, 3 * 2**-10, 0.3, torch.nan])
    pool.write(torch.tensor([1]), x.view(1, 1, 8), -x.view(1, 1, 8))
    k, v = (t.flatten() for t in pool.read(torch.tensor([1]), torch.float32))
    assert k[:7].tolist() == [448.0, -448.0, 16.0, 20.0, 0.0, 2**-8, 0.3125] and k[7].isnan()
    assert torch.equal(v[:7], -k[:7])


@pytest.mark.parametrize("of", TYPES.values(), ids=str)
def test_rows_are_written_and_copied_alone(of: KvType) -> None:
    gen, pool = torch.Generator().manual_seed(1), KVPool(12, 2, 32, KvFormat.both(of), CPU)
    k, v = (torch.randn(5, 2, 32, generator=gen) for _ in "kv")
    rows = torch.tensor([9, 1, 4, 0, 7])
    pool.write(rows, k, v)
    got = pool.read(rows, torch.float32)
    for i in range(5):  # bits do not depend on what else was written
        alone = KVPool(1, 2, 32, KvFormat.both(of), CPU)
        alone.write(torch.tensor([0]), k[i : i + 1], v[i : i + 1])
        one = alone.read(torch.tensor([0]), torch.float32)
        assert all(torch.equal(a[i], b[0]) for a, b in zip(got, one, strict=True))
    copy_page([pool], 2, 1, 0)
    everything = pool.read(torch.arange(12), torch.float32)
    for t in everything:
        assert torch.equal(t[2:4], t[0:2]) and not t[[5, 6, 8, 10, 11]].any()
    assert (everything[0][rows] - k).abs().max() < STEP.get(of, 0.02)


@pytest.mark.parametrize(
    ("kv", "want"),
    [
        ("f16", 4096),
        ("q8_0", 2176),
        ("f8_e4m3", 2048),
        ("f32", 8192),
        ("q5_1", 1536),
        ("q5_0", 1408),
        ("q4_1", 1280),
        ("q4_0", 1152),
    ],
)
def test_the_plan_counts_every_byte(kv: str, want: int) -> None:
    assert row_bytes(4, 256, KvFormat.named(kv)) == want, "K and V of 4 heads of 256"
    state = GdnShape(n_k_head=2, n_v_head=2, dim=16, n_conv=4, n_channel=96)
    layers = [{"kv": Paged(2, 64)}, {"state": Recurrent(state)}, {"kv": Paged(1, 96)}, {}]
    sizes = CacheSizes(n_slot=2, n_row=48, page_size=16, width=3, kv=KvFormat.named(kv))
    memory = allocate(layers, sizes, CPU)
    one = checkpoint_bytes(layers, sizes)
    assert memory_bytes(layers, sizes) == (memory.kv_bytes, memory.state_bytes + 2 * one)
    assert one == sum(t.numel() * t.element_size() for t in memory.checkpoint(0, 5).tensors)
    assert memory.kv_format == sizes.kv and sorted(memory.kv) == [0, 2] and sorted(memory.states) == [1]


def test_heads_that_are_no_whole_blocks_are_refused_with_their_width() -> None:
    with pytest.raises(ModelError, match="blocks of 32 dims; the heads are 80 wide"):
        row_bytes(2, 80, KvFormat.named("q8_0"))
    assert row_bytes(2, 80, KvFormat.both(F8)) == 320


def test_keys_and_values_of_different_types_are_kept_apart() -> None:
    gen, kv = torch.Generator().manual_seed(2), KvFormat.named("q8_0", "f16")
    pool = KVPool(4, 2, 32, kv, CPU)
    alone = [KVPool(4, 2, 32, KvFormat.both(of), CPU) for of in (kv.k, kv.v)]
    k, v = (torch.randn(3, 2, 32, generator=gen) for _ in "kv")
    rows = torch.tensor([2, 0, 3])
    for each in (pool, *alone):
        each.write(rows, k, v)
    got, of_k, of_v = (each.read(rows, torch.float32) for each in (pool, *alone))
    assert torch.equal(got[0], of_k[0]) and torch.equal(got[1], of_v[1])
    assert len(pool.planes) == 3 and pool.k_scale is not None and pool.v_scale is None
    assert sum(t[0].nbytes for t in pool.planes) == row_bytes(2, 32, kv) == 2 * 34 + 2 * 64


def test_a_format_is_named_as_its_flags() -> None:
    assert KvFormat.named("f16") == KvFormat.named("f16") and KvFormat.named("f16").name == "f16"
    mixed = KvFormat.named("bf16", "q8_0")
    assert mixed.name == "bf16/q8_0" and not mixed.is_one
    assert mixed.half is torch.bfloat16 and KvFormat.named("q8_0", "f8_e4m3").half is torch.float16


def test_of_different_types_the_one_that_does_not_fit_is_refused_by_its_flag() -> None:
    with pytest.raises(ModelError, match="the heads are 80 wide: -ctv f16 does"):
        row_bytes(2, 80, KvFormat.named("f16", "q8_0"))


def test_keys_that_are_the_values_have_one_type() -> None:
    sizes = CacheSizes(n_slot=1, n_row=32, page_size=16, width=1, kv=KvFormat.named("f16", "bf16"))
    with pytest.raises(
        ModelError, match=r"keys of this model are its values.*: -ctk f16 and -ctv bf16 differ"
    ):
        Paged(1, 64, keys_only=True).n_bytes(sizes)
    assert Paged(1, 64, keys_only=True).n_bytes(replace(sizes, kv=KvFormat())) == 32 * 128
