"""What runs on this machine: for each op and shape the implementation that is chosen, and why others are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import Any

import torch

from pyspec.cuda.op import Op
from pyspec.cuda.ops.gdn.shape import GdnShape
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.gguf import GGMLType
from pyspec.slots.kv import name_of

OPS = (
    *("attend", "attend_prompt", "attend_blocks", "rope_kv", "gdn", "linear", "rows", "mamba2", "moe_route", "moe"),
    *("best", "ahead", "embed", "angles", "norms"),
    *("streams", "rope_tail", "compress", "index_rows", "sparse_attend"),
)
PACKED = (GGMLType.Q8_0, GGMLType.Q4_0, GGMLType.Q4_K, GGMLType.Q6_K)

Ask = tuple[Op[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class RefusedImpl:
    impl: str
    reason: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One op in one shape. `own`: what runs is not the torch reference."""

    op: str
    shape: str
    choice: str
    own: bool
    refused: tuple[RefusedImpl, ...]


def ops() -> list[Op[Any, Any]]:
    homes = dict.fromkeys(("attend_prompt", "attend_blocks"), "attend.prompt")  # ops that share another one's folder
    return [getattr(import_module(f"pyspec.cuda.ops.{homes.get(name, f'{name}.op')}"), name) for name in OPS]


def standard(device: torch.device) -> list[Ask]:
    """Every op in shapes that models have: 27B and 8B dense ones, Gated DeltaNet of 27B, Nemotron 3 Super, experts, DeepSeek-V4-Flash."""
    from pyspec.cuda.ops.ahead.ref import AheadSpec
    from pyspec.cuda.ops.angles.ref import AnglesSpec
    from pyspec.cuda.ops.attend.ref import AttendSpec
    from pyspec.cuda.ops.best.ref import BestSpec
    from pyspec.cuda.ops.compress.ref import CompressSpec
    from pyspec.cuda.ops.embed.ref import EmbedSpec
    from pyspec.cuda.ops.gdn.ref import GdnSpec
    from pyspec.cuda.ops.index_rows.ref import IndexSpec
    from pyspec.cuda.ops.linear.ref import LinearSpec
    from pyspec.cuda.ops.mamba2.ref import Mamba2Spec
    from pyspec.cuda.ops.moe.ref import MoeSpec, RouteSpec
    from pyspec.cuda.ops.norms.ref import NormsSpec
    from pyspec.cuda.ops.rope_kv.ref import RopeKvSpec
    from pyspec.cuda.ops.rope_tail.ref import RopeTailSpec
    from pyspec.cuda.ops.rows.ref import PrepKind, RowsSpec
    from pyspec.cuda.ops.sparse_attend.ref import SparseSpec
    from pyspec.cuda.ops.streams.ref import StreamsSpec

    attend, attend_prompt, attend_blocks, rope_kv, gdn, linear, rows, mamba2, moe_route, moe, *small = ops()
    best, ahead, embed, angles, norms, streams, rope_tail, compress, index_rows, sparse_attend = small
    delta = GdnShape(n_k_head=16, n_v_head=48, dim=128, n_conv=4, n_channel=(2 * 16 + 48) * 128)
    return [
        *(
            (attend, AttendSpec(device, *heads, heads[2] ** -0.5))
            for heads in ((24, 4, 256), (32, 8, 128), (16, 2, 64))
        ),
        *((attend, AttendSpec(device, 24, 4, 256, 256**-0.5, kv)) for kv in (torch.int8, torch.float8_e4m3fn)),
        *((op, AttendSpec(device, 24, 4, 256, 0.0625)) for op in (attend_prompt, attend_blocks)),
        (rope_kv, RopeKvSpec(device, 24, 4, 256, 64, neox=True, gated=True, has_norm=True, eps=1e-6)),
        (rope_kv, RopeKvSpec(device, 32, 8, 128, 128, neox=True, gated=False, has_norm=True, eps=1e-6)),
        (gdn, GdnSpec(device, delta, 1e-6)),
        *((linear, LinearSpec(device, type, 272, 5120)) for type in PACKED),
        (rows, RowsSpec(device, 5120, PrepKind.NORM)),
        (rows, RowsSpec(device, 6144, PrepKind.HEADS, 128)),
        (rows, RowsSpec(device, 6144, PrepKind.GATE, 256)),
        (rows, RowsSpec(device, 17408, PrepKind.GLU)),
        (rope_kv, RopeKvSpec(device, 32, 2, 128, 0, neox=False, gated=False, has_norm=False, eps=1e-5)),
        (rows, RowsSpec(device, 8192, PrepKind.GROUPS, 1024)),
        (mamba2, Mamba2Spec(device, Mamba2Shape(n_head=128, head_dim=64, n_group=8, n_state=128, n_conv=4))),
        (moe_route, RouteSpec(device, 3072, 256, 8, gated=True)),
        (moe_route, RouteSpec(device, 4096, 512, 22, "sigmoid", scale=5.0, biased=True)),
        (moe, MoeSpec(device, 8, 3072, 1024, "swiglu", GGMLType.Q4_K, GGMLType.Q6_K)),
        (moe, MoeSpec(device, 8, 2048, 512, "swiglu", GGMLType.Q8_0, GGMLType.Q8_0, pieces=1)),
        (moe, MoeSpec(device, 6, 2688, 1856, "relu2", GGMLType.Q8_0, GGMLType.Q8_0, pieces=2)),
        (best, BestSpec(device)),
        (ahead, AheadSpec(device)),
        *((embed, EmbedSpec(device, type, 5120)) for type in PACKED),
        (angles, AnglesSpec(device)),
        (norms, NormsSpec(device, 5120, 1e-6)),
        (streams, StreamsSpec(device, 4, 4096, 20, 1e-6, 1e-6)),
        (rope_tail, RopeTailSpec(device, 512, 64, True, 1e-6)),
        (compress, CompressSpec(device, 4, 512, True, 64, 1e-6, torch.float16)),
        (compress, CompressSpec(device, 128, 512, False, 64, 1e-6, torch.float16)),
        (index_rows, IndexSpec(device, 64, 128, 512, 4, torch.float16, 64)),
        (sparse_attend, SparseSpec(device, 64, 512, 128, 4, torch.float16, 64, 1e-6)),
    ]


def products(device: torch.device) -> list[Ask]:
    """Matrices of every type that kernels stream, whatever is done behind their products."""
    from pyspec.cuda.ops.linear.op import linear, linear_tall
    from pyspec.cuda.ops.linear.pack import FORMATS
    from pyspec.cuda.ops.linear.ref import Epilogue, LinearSpec

    specs = [LinearSpec(device, type, 272, 5120, epilogue) for type in FORMATS for epilogue in Epilogue]
    return [(op, spec) for op in (linear, linear_tall) for spec in specs]


def asked() -> list[Ask]:
    """What was decided so far for what this thread wants ops to run as: after a load, everything the model and its drafter run with."""
    return [(op, spec) for op in ops() for spec in op.decided]


def findings(asks: Iterable[Ask]) -> list[Finding]:
    """Have each checked, as a load does, and tell what came of it."""
    out = []
    for op, spec in asks:
        chosen = op.chosen(spec)
        refused = []
        for name, why in op.choices(spec):
            if name == chosen.name:
                break
            refused.append(RefusedImpl(name, why or ""))
        out.append(Finding(op.name, shape_of(spec), chosen.name, chosen is not op.reference, tuple(refused)))
    return out


def shape_of(spec: Any) -> str:
    """A spec in words, without its device."""
    parts = []
    for field in dataclasses.fields(spec):
        if not field.repr:  # sizes of one engine, for which nothing is chosen
            continue
        value = getattr(spec, field.name)
        if isinstance(value, Enum):
            parts.append(value.name)
        elif dataclasses.is_dataclass(value):
            parts.append(shape_of(value))
        elif isinstance(value, bool):
            parts += [field.name] * value
        elif isinstance(value, float):
            parts.append(f"{field.name} {value:.4g}")
        elif isinstance(value, torch.dtype):
            parts.append(f"{field.name} {name_of(value)}")
        elif not isinstance(value, torch.device):
            parts.append(f"{field.name} {value}")
    return ", ".join(parts)
