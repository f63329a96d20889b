"""What a load will ask of ops, read from its description: so that kernels are compiled and checked before layers wait for them.

In the order in which a load comes to them. What is missing here is compiled and checked when it is asked for, as everything was before; an
ask too many costs a check in a child. `tests/engine/test_asks.py` holds the list against what loads ask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyspec.config import EngineSettings
from pyspec.cuda.op import Op
from pyspec.cuda.ops.ahead.op import ahead
from pyspec.cuda.ops.ahead.ref import AheadSpec
from pyspec.cuda.ops.angles.op import angles
from pyspec.cuda.ops.angles.ref import AnglesSpec
from pyspec.cuda.ops.attend.op import attend
from pyspec.cuda.ops.attend.prompt import attend_blocks, attend_prompt
from pyspec.cuda.ops.attend.ref import AttendSpec
from pyspec.cuda.ops.best.op import best
from pyspec.cuda.ops.best.ref import BestSpec
from pyspec.cuda.ops.embed.op import embed
from pyspec.cuda.ops.embed.ref import EmbedSpec
from pyspec.cuda.ops.gdn.op import gdn
from pyspec.cuda.ops.gdn.ref import GdnSpec
from pyspec.cuda.ops.gdn.shape import GdnShape
from pyspec.cuda.ops.linear.op import linear, linear_tall
from pyspec.cuda.ops.linear.pack import FORMATS
from pyspec.cuda.ops.linear.ref import PROBE_ROWS, Epilogue, LinearSpec
from pyspec.cuda.ops.mamba2.op import mamba2
from pyspec.cuda.ops.mamba2.ref import Mamba2Spec
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.cuda.ops.moe.op import moe
from pyspec.cuda.ops.moe.ref import MoeSpec, RouteSpec
from pyspec.cuda.ops.moe_route.op import moe_route
from pyspec.cuda.ops.norms.op import norms
from pyspec.cuda.ops.norms.ref import NormsSpec
from pyspec.cuda.ops.rope_kv.op import rope_kv
from pyspec.cuda.ops.rope_kv.ref import RopeKvSpec
from pyspec.cuda.ops.rows.op import rows
from pyspec.cuda.ops.rows.ref import PrepKind, RowsSpec
from pyspec.draft.dflash_file import DFlashConfig
from pyspec.draft.dflash_file import read_config as read_dflash
from pyspec.engine.plan.describe import Description, describe
from pyspec.engine.plan.memory_plan import AssumedGpu
from pyspec.gguf import GGMLType, GGUFFile, TensorInfo
from pyspec.models.decoder import DecoderConfig, Layer
from pyspec.models.layers import SINKS, AttentionShape
from pyspec.models.moe import MoeShape
from pyspec.models.wants import scale_of
from pyspec.models.weights import PLAIN

Ask = tuple[Op[Any, Any], Any]
ORDER = {
    attend_prompt.name: -1,
    attend_blocks.name: 1,
}  # a library is loaded for either; and for the last no load waits


def asks_of(d: Description) -> list[Ask]:
    """(op, spec), each once. Of architectures with a forward of their own only products, and what every model has."""
    found = _target(d)
    found += [ask for file in _draft_files(d) for ask in _products(file, d)]
    if d.head is not None:
        n_in = d.head.info.shape[1]
        found += [
            (linear, LinearSpec(d.device, d.head.to, PROBE_ROWS, n_in, e)) for e in (Epilogue.PLAIN, Epilogue.RESIDUAL)
        ]
    if d.draft.kind == "dflash" and d.draft.file is not None:
        found += _dflash(read_dflash(d.draft.file), d)
    elif d.draft.kind == "mtp" and isinstance(d.own, DecoderConfig):
        found += _layer(d.own.mtp_layer, f"blk.{d.own.n_layer}", d.draft.file or d.file, d)
    found += [(best, BestSpec(d.device)), (ahead, AheadSpec(d.device))]
    found.sort(key=lambda ask: ORDER.get(ask[0].name, 0))
    return list({(op.name, spec): (op, spec) for op, spec in found}.values())


def asks_of_file(path: Path, draft_path: Path | None, kv_type: str = "f16") -> list[Ask]:
    """Those of a model as a server would load it on a GPU with memory enough; there need not be one. A drafter of the file's own is used."""
    settings = EngineSettings(draft_path=draft_path, kv_type=kv_type)
    return asks_of(describe(path, settings, AssumedGpu(free=1 << 50)))


def _target(d: Description) -> list[Ask]:
    c, table = d.own, d.file.tensors.get("token_embd.weight")
    found: list[Ask] = [(angles, AnglesSpec(d.device))]
    if table is not None:
        found.append((embed, EmbedSpec(d.device, table.type, table.shape[1])))
    found += _products(d.file, d)
    if isinstance(c, DecoderConfig):
        for i, layer in enumerate(c.layers):
            found += _layer(layer, f"blk.{i}", d.file, d)
        found.append((norms, NormsSpec(d.device, c.n_embd, c.eps)))
    return found


def _draft_files(d: Description) -> list[GGUFFile]:
    return [d.draft.file] if d.draft.file is not None and d.draft.file is not d.file else []


def _products(file: GGUFFile, d: Description) -> list[Ask]:
    """What decides how matrices are packed, and what multiplies many rows with them: asked of small ones (`weights.tier_of`)."""
    if d.dense is not None or not d.is_cuda:
        return []
    matrices = [t for t in file.tensors.values() if _is_streamed(t, file)]
    few: list[Ask] = []
    many: list[Ask] = []
    for t in matrices:
        n_in = _columns(t, d)
        small = LinearSpec(d.device, t.type, PROBE_ROWS, n_in)
        few += [(linear, replace(small, epilogue=e)) for e in Epilogue]
        ways = tuple(Epilogue) if t.type in PLAIN else _epilogues(t.name)
        many += [(linear_tall, replace(small, epilogue=e)) for e in ways]
    return few + many


def _is_streamed(t: TensorInfo, file: GGUFFile) -> bool:
    has_scale = scale_of(t.name) in file.tensors
    return len(t.shape) == 2 and t.type in FORMATS and (not has_scale or FORMATS[t.type].scaled)


def _epilogues(name: str) -> tuple[Epilogue, ...]:
    gates = (".ffn_gate.weight", ".ffn_up.weight", ".ffn_gate_shexp.weight", ".ffn_up_shexp.weight")
    return (Epilogue.GATED,) if name.endswith(gates) else (Epilogue.PLAIN, Epilogue.RESIDUAL)


def _columns(t: TensorInfo, d: Description) -> int:
    """Of a rank's share."""
    cut = d.config.tensors(d.file).get(t.name) if d.settings.tp > 1 else None
    is_cut = cut is not None and cut.cut is not None and cut.cut.axis == 1
    return t.shape[1] // d.settings.tp if is_cut else t.shape[1]


def _layer(layer: Layer, p: str, file: GGUFFile, d: Description) -> Iterator[Ask]:
    c = d.own
    assert isinstance(c, DecoderConfig)
    if layer.mixer == "attention":
        has_norm = f"{p}.attn_k_norm.weight" in file.tensors
        turned = RopeKvSpec(d.device, *_heads(c.attention), c.n_rot, c.rope_neox, c.attention.gated, has_norm, c.eps)
        yield from _attention(c.attention, turned, f"{p}.{SINKS}" in file.tensors, d)
    elif layer.mixer == "delta":
        assert isinstance(c.state, GdnShape)
        yield gdn, GdnSpec(d.device, c.state, c.eps)
        if _packs(d):
            yield rows, RowsSpec(d.device, c.state.n_v_head * c.state.dim, PrepKind.HEADS, c.state.dim)
    elif layer.mixer == "mamba":
        assert isinstance(c.state, Mamba2Shape)
        inner = c.state.n_head * c.state.head_dim
        yield mamba2, Mamba2Spec(d.device, c.state)
        if _packs(d):
            yield rows, RowsSpec(d.device, inner, PrepKind.GROUPS, inner // c.state.n_group)
    if _packs(d):
        yield rows, RowsSpec(d.device, c.n_embd, PrepKind.NORM)
    if layer.feed == "moe" and layer.moe is not None:
        yield from _experts(layer.moe, p, file, d)
    elif layer.feed == "relu2" and _packs(d):
        yield rows, RowsSpec(d.device, c.n_ff, PrepKind.RELU2)
    elif layer.feed == "swiglu" and _packs(d):
        yield rows, RowsSpec(d.device, c.n_ff, PrepKind.GLU)


def _packs(d: Description) -> bool:
    return d.is_cuda and d.dense is None


def _heads(s: AttentionShape) -> tuple[int, int, int]:
    return s.n_head, s.n_kv_head, s.head_dim


def _attention(s: AttentionShape, turned: RopeKvSpec, has_sinks: bool, d: Description) -> Iterator[Ask]:
    scale = s.head_dim**-0.5 if s.scale is None else s.scale
    spec = AttendSpec(d.device, *_heads(s), scale, d.kv_dtype, has_sinks)
    yield attend, spec
    if d.is_cuda and not has_sinks:
        yield attend_prompt, spec
        yield attend_blocks, spec
    yield rope_kv, turned
    yield rope_kv, replace(turned, n_q=0, gated=False)
    if s.gated and _packs(d):
        yield rows, RowsSpec(d.device, s.n_head * s.head_dim, PrepKind.GATE, s.head_dim)


def _experts(s: MoeShape, p: str, file: GGUFFile, d: Description) -> Iterator[Ask]:
    c = d.own
    biased = f"{p}.exp_probs_b.bias" in file.tensors
    yield (
        moe_route,
        RouteSpec(
            d.device,
            c.n_embd,
            s.n_expert,
            s.n_used,
            s.router,
            s.renorm,
            s.scale,
            biased=biased,
            gated=s.shared_gate,
            eps=c.eps,
        ),
    )
    down = file.tensors.get(f"{p}.ffn_down_exps.weight")
    up = file.tensors.get(f"{p}.ffn_up_exps.weight") or file.tensors.get(f"{p}.ffn_gate_up_exps.weight")
    if down is None or up is None:
        return
    names = [f"{p}.ffn_{x}_exps.weight" for x in ("gate", "up", "down", "gate_up")]
    scaled = any(scale_of(name) in file.tensors for name in names)
    of_up, of_down = (up.type, down.type) if d.dense is None else (None, None)
    spec = MoeSpec(d.device, s.n_used, s.latent or c.n_embd, s.n_ff, s.act, of_up, of_down, scaled, n_expert=s.n_expert)
    yield moe, replace(spec, pieces=_pieces(s, p, file, up.type, down.type) if d.is_cuda and d.dense is None else 0)
    if s.n_ff_shared and s.act == "relu2" and _packs(d):
        yield rows, RowsSpec(d.device, s.n_ff_shared, PrepKind.RELU2)


def _pieces(s: MoeShape, p: str, file: GGUFFile, up: GGMLType, down: GGMLType) -> int:
    """Of the shared expert as further experts of a launch, as `moe.shared_stacks` finds it: of their types, and as wide as a number of them."""
    if not s.n_ff_shared or s.latent or s.n_ff_shared % s.n_ff:
        return 0
    if s.n_ff_shared > s.n_ff and s.n_ff % down.block_size:
        return 0
    wanted = {"up": up, "down": down} | ({"gate": up} if s.act == "swiglu" else {})
    own = {x: file.tensors.get(f"{p}.ffn_{x}_shexp.weight") for x in wanted}
    fits = all(t is not None and t.type is wanted[x] for x, t in own.items())
    return s.n_ff_shared // s.n_ff if fits else 0


def _dflash(c: DFlashConfig, d: Description) -> Iterator[Ask]:
    """The drafter's layers; its products are those of its file."""
    s = c.attention
    has_norm = d.draft.file is not None and any(name.endswith("attn_k_norm.weight") for name in d.draft.file.tensors)
    turned = RopeKvSpec(d.device, *_heads(s), c.n_rot, True, s.gated, has_norm, c.eps)
    yield from _attention(s, turned, False, d)
    yield norms, NormsSpec(d.device, c.n_embd, c.eps)
    if _packs(d):
        yield rows, RowsSpec(d.device, c.n_embd, PrepKind.NORM)
