"""attend_latent.cu and rope_latent.cu for every architecture, and their launchers' plans and refusals. Needs a compiler, no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from machines import compiled

from pyspec.cuda import jit
from pyspec.cuda.ops.attend import cuda as attend_cuda
from pyspec.cuda.ops.attend import latent
from pyspec.cuda.ops.attend.ref import AttendSpec
from pyspec.cuda.ops.attend.shared import room_of
from pyspec.cuda.ops.rope_latent import cuda as rope_latent_cuda
from pyspec.cuda.ops.rope_latent.ref import RopeLatentSpec
from pyspec.slots.kv_types import F16, F32, Q8_0, TYPES, KvFormat

pytest.importorskip("cuda.core")

GPU = torch.device("cuda")
V3 = AttendSpec(GPU, 128, 1, 576, 192**-0.5, n_value=512)


@pytest.mark.slow
@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("kv", ["f16", "bf16", "q8_0", "f8_e4m3", "q4_0", "q5_1"])
@pytest.mark.parametrize("arch", jit.ARCHS)
def test_every_build_compiles_without_spills_and_fits_a_multiprocessor(arch: str, kv: str) -> None:
    choices = latent.builds(replace(V3, kv=KvFormat.named(kv)), arch)
    assert choices
    for build in choices:
        made = compiled("attend_latent", arch, build.defines())
        assert set(made) == {"attend_latent_parts", "attend_latent_merge"}
        assert build.shared_bytes <= room_of(arch) - 1024


@pytest.mark.slow
@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("kv", TYPES)
@pytest.mark.parametrize("arch", jit.ARCHS)
def test_keys_compile_without_spills(arch: str, kv: str) -> None:
    spec = RopeLatentSpec(GPU, 128, 128, 512, 64, False, 1e-6, KvFormat.named(kv))
    compiled("rope_latent", arch, rope_latent_cuda.defines(spec))


def test_builds_have_as_many_columns_and_buffers_as_fit() -> None:
    def of(arch: str, spec: AttendSpec = V3) -> list[tuple[int, int]]:
        return [(b.columns, b.buffers) for b in latent.builds(spec, arch)]

    assert of("sm_90a") == [(16, 2), (32, 2), (64, 2)]
    assert of("sm_80") == [(16, 1), (32, 1), (64, 1)]
    assert of("sm_120f") == of("sm_89") == [(16, 1)]
    assert of("sm_90a", replace(V3, kv=KvFormat.both(Q8_0))) == [(16, 1), (32, 1), (64, 1)]
    assert of("sm_89", replace(V3, head_dim=768)) == []
    choices = latent.builds(V3, "sm_90a")
    widths = [latent.build_for(choices, n).columns for n in (1, 16, 17, 33, 128)]
    assert widths == [16, 16, 32, 64, 64]
    assert [latent.parts_of(replace(V3, n_head=n)) for n in (16, 64, 65, 128, 1024)] == [
        64,
        64,
        32,
        32,
        16,
    ]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"n_kv_head": 2}, "one head, no sinks and no cap"),
        ({"has_sinks": True}, "one head, no sinks and no cap"),
        ({"cap": 50.0}, "one head, no sinks and no cap"),
        ({"kv": KvFormat.both(F32)}, "keys that are values are f32"),
        ({"kv": KvFormat(F16, Q8_0)}, "keys that are values are f16/q8_0"),
        ({"head_dim": 580}, "keys are 580 wide; the kernel takes multiples of 8"),
        ({"n_value": 500}, "values are 500 wide; the kernel takes multiples of 16"),
        ({"head_dim": 2048}, "16 queries and 64 keys of 2048 do not fit 228 KB"),
    ],
)
def test_specs_it_is_not_built_for_are_refused_with_their_numbers(
    changed: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert attend_cuda.limits(V3) is None
    assert says in (attend_cuda.limits(replace(V3, **changed)) or "")  # type: ignore[arg-type]


def test_the_planned_workspace_holds_every_launch_of_few_rows() -> None:
    """Up to what runs some tiles at a time: 256 MiB."""
    spec = replace(V3, n_head=16)
    for n_seq, n_key, n_row in ((1, 4096, 1), (8, 9000, 17), (3, 200, 5)):
        planned = latent.most_floats(spec, "sm_90a", n_seq, n_key, n_row)
        assert attend_cuda.bytes_on("sm_90a", 132, spec, n_seq, n_key, n_row) == 4 * planned
        build = latent.build_for(latent.builds(spec, "sm_90a"), n_row * 16)
        size = min(latent.parts_of(spec), -(-n_key // latent.LEAST)) * build.n_float
        n_tile = n_seq * -(-n_row * 16 // build.columns)
        assert planned <= latent.MOST_FLOATS
        assert planned >= min(n_tile * size, latent.MOST_FLOATS - size)
    assert latent.most_floats(replace(V3, head_dim=768), "sm_89", 8, 4096, 17) == 0
