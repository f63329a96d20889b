"""Compiles the launches of launchers, for GPUs that are not here: `python triton_targets.py OP...` in a process of its own.

Not in the interpreter's process: there the same functions are no kernels. A launcher is given tensors of the CPU; instead of running
its kernels `tri.launch` compiles them for every target. Prints a line for each; exits with 1 if one does not compile, or does not fit,
or if its machine code is wrong in a way that can be told (machine_code.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import triton
from machine_code import broken_sums, disassembled
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pyspec.cuda import tri
from pyspec.cuda.ops.ahead import cuda as ahead_cuda
from pyspec.cuda.ops.ahead import triton as ahead_triton
from pyspec.cuda.ops.ahead.ref import MAX_ENDS, AheadSpec
from pyspec.cuda.ops.attend import triton as attend_triton
from pyspec.cuda.ops.attend.cases import Case, make, spec_of
from pyspec.cuda.ops.best import triton as best_triton
from pyspec.cuda.ops.best.ref import BestSpec
from pyspec.cuda.ops.gdn import triton as gdn_triton
from pyspec.cuda.ops.gdn.ref import GdnSpec
from pyspec.cuda.ops.gdn.shape import GdnShape
from pyspec.cuda.ops.heads import triton as heads_triton
from pyspec.cuda.ops.heads.ref import HeadsSpec
from pyspec.cuda.ops.linear import tiles
from pyspec.cuda.ops.linear import triton as linear_triton
from pyspec.cuda.ops.linear.cuda import random_rows
from pyspec.cuda.ops.linear.ref import Epilogue, LinearSpec
from pyspec.cuda.ops.mamba2 import triton as mamba2_triton
from pyspec.cuda.ops.mamba2.ref import Mamba2Spec, make_params
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.cuda.ops.moe import check as moe_check
from pyspec.cuda.ops.moe import triton as moe_triton
from pyspec.cuda.ops.moe.ref import Added, MoeSpec, RouteSpec
from pyspec.cuda.ops.moe_route import triton as moe_route_triton
from pyspec.cuda.ops.norms import triton as norms_triton
from pyspec.cuda.ops.norms.ref import NormsSpec
from pyspec.cuda.ops.rope_kv import triton as rope_kv_triton
from pyspec.cuda.ops.rope_kv.ref import RopeKvSpec
from pyspec.cuda.ops.rope_latent import triton as rope_latent_triton
from pyspec.cuda.ops.rope_latent.ref import RopeLatentSpec
from pyspec.cuda.ops.rows import op as rows_op
from pyspec.cuda.ops.rows import triton as rows_triton
from pyspec.cuda.ops.rows.ref import PrepKind, RowsSpec
from pyspec.cuda.ops.short_conv import triton as short_conv_triton
from pyspec.cuda.ops.short_conv.ref import ShortConvSpec
from pyspec.cuda.ops.short_conv.shape import ShortConvShape
from pyspec.gguf import GGMLType
from pyspec.slots.batch import Seq, SeqMode, lay_out
from pyspec.slots.kv import KvFormat, KVPool
from pyspec.slots.kv_types import TYPES as KV_TYPES
from pyspec.slots.recurrent import StateLayer
from pyspec.slots.table import SlotTable

sys.path.append(str(Path(__file__).parents[1]))
from attend_cases import MIXED

CPU = torch.device("cpu")
# KB a program may have
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99, 121: 99, "gfx942": 64, "gfx1100": 64}
"""By target: NVIDIA's compute capabilities, AMD's names."""
LARGE = (80, 90, 100)
NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
NUMBERS = [t for t in KV_TYPES.values() if not t.is_packed]
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float64: "fp64",
}


def target_of(name: int | str) -> GPUTarget:
    if isinstance(name, int):
        return GPUTarget("cuda", name, 32)
    return GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32)


def compiled(name, kernel, args, constants, warps) -> str:
    """The result as text; RuntimeError if it takes more shared memory than there is, or its machine code is wrong."""
    signature, attributes = {}, {}
    given = iter(args)
    for i, parameter in enumerate(kernel.arg_names):
        if parameter in constants:
            signature[parameter] = "constexpr"
            continue
        value = next(given)
        if isinstance(value, torch.Tensor):
            signature[parameter] = "*" + TYPES[value.dtype]
            if value.data_ptr() % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter] = "fp32" if isinstance(value, float) else "i32"
    assert next(given, None) is None, f"{kernel.__name__} is given more than it takes"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    build = triton.compile(source, target=target_of(name), options={"num_warps": warps})
    shared = build.metadata.shared
    if "cubin" in build.asm and (wrong := broken_sums(disassembled(build.asm["cubin"], NVDISASM))):
        raise RuntimeError(f"{kernel.__name__}: the compiler has mixed the halves of addresses: {wrong}")
    if shared > SHARED[name] * 1024:
        raise RuntimeError(f"{shared} bytes of shared memory, there are {SHARED[name]} KB")
    return f"{kernel.__name__} {name}: {shared} bytes of shared memory"


def attend() -> Iterator[Callable[[], object]]:
    for kv in NUMBERS:
        for heads in ((24, 4, 256), (32, 2, 128), (8, 8, 64)):
            for width in (1, 4, 17):
                case = Case(*heads, kv, [(300, width)], 64, sinks=heads[2] == 64)
                yield lambda case=case: _attend(case)
    yield from (lambda case=case: _attend(case) for case in MIXED.values())
    yield lambda: _attend(Case(64, 1, 512, torch.float16, [(40, 2)], 32, sinks=True, keys_only=True))
    for kv in NUMBERS:
        yield lambda kv=kv: _attend(Case(16, 8, 256, kv, [(300, 4)], 64, cap=50.0))
    for kv in NUMBERS:
        for n_head, width in ((128, 1), (16, 17), (5, 2)):
            latent = Case(n_head, 1, 576, kv, [(300, width)], 64, n_value=512)
            yield lambda case=latent: _attend(case)
    yield lambda: _attend(Case(5, 1, 24, torch.float16, [(40, 2)], 16, n_value=16))


def _attend(case: Case) -> None:
    made = make(case, CPU)
    run = attend_triton.bind(spec_of(case, CPU))
    run(made.q, made.pool, made.batch, case.window, made.sinks)


def gdn() -> Iterator[Callable[[], object]]:
    def run(shape: GdnShape) -> None:
        n, n_v = 140, shape.n_v_head
        layer = StateLayer(shape, 2, 6, CPU)
        batch = lay_out(SlotTable(2, 16, 16), [Seq(0, 0, [0] * n, SeqMode.KEEP)], CPU)
        m, alpha, beta = (torch.zeros(n, k) for k in (shape.n_channel, n_v * shape.n_decay, n_v))
        weights = torch.zeros(n_v), alpha[0], torch.zeros(shape.n_channel, 4)
        gdn_triton.bind(GdnSpec(CPU, shape, 1e-6))(m, alpha, beta, *weights, layer, batch)

    yield partial(run, GdnShape(16, 48, 128, 4, (2 * 16 + 48) * 128))
    yield partial(run, GdnShape(32, 32, 128, 4, 96 * 128, by_key=True))


def mamba2() -> Iterator[Callable[[], object]]:
    def run() -> None:
        shape = Mamba2Shape(n_head=128, head_dim=64, n_group=8, n_state=128, n_conv=4)
        layer = StateLayer(shape, 2, 6, CPU)
        batch = lay_out(SlotTable(2, 16, 16), [Seq(0, 0, [0] * 140, SeqMode.KEEP)], CPU)
        p = make_params(shape, torch.Generator().manual_seed(0), CPU)
        m, dt = torch.zeros(140, shape.n_channel), torch.zeros(140, 128)
        mamba2_triton.bind(Mamba2Spec(CPU, shape))(m, dt, p, layer, batch)

    yield run


def short_conv() -> Iterator[Callable[[], object]]:
    def run() -> None:
        shape = ShortConvShape(2048, 3)
        layer = StateLayer(shape, 2, 6, CPU)
        batch = lay_out(SlotTable(2, 16, 16), [Seq(0, 0, [0] * 140, SeqMode.KEEP)], CPU)
        launch = short_conv_triton.bind(ShortConvSpec(CPU, shape))
        launch(torch.zeros(140, 3 * 2048), torch.zeros(2048, 3), layer, batch)

    yield run


def rope_kv() -> Iterator[Callable[[], object]]:
    gemma4 = RopeKvSpec(CPU, 32, 4, 512, 512, neox=True, gated=False, has_norm=True, eps=1e-6)
    for spec in (
        replace(gemma4, norms_v=True, keys_are_values=True),
        replace(gemma4, n_kv=0),
        RopeKvSpec(CPU, 24, 4, 256, 64, neox=True, gated=True, has_norm=True, eps=1e-6),
        RopeKvSpec(CPU, 32, 2, 128, 0, neox=False, gated=False, has_norm=False, eps=1e-5),
        RopeKvSpec(
            CPU, 6, 2, 128, 128, neox=True, gated=False, has_norm=True, eps=1e-5, norm_behind=True
        ),
        RopeKvSpec(CPU, 0, 8, 96, 96, neox=False, gated=False, has_norm=True, eps=1e-5),
    ):
        for kv in [*map(KvFormat.both, NUMBERS), KvFormat.named("f16", "q8_0")]:
            own = replace(spec, kv=kv)
            yield lambda own=own: _rope_kv(own)


def _rope_kv(spec: RopeKvSpec) -> None:
    norm, angle = torch.ones(spec.dim) if spec.has_norm else None, torch.zeros(2, 1, spec.n_rot // 2)
    pool = KVPool(32, max(1, spec.n_kv), spec.dim, spec.kv, CPU)
    rope_kv_triton.bind(spec)(
        torch.zeros(2, spec.n_column),
        norm if spec.n_q else None,
        norm,
        (angle, angle),
        pool,
        torch.arange(2),
    )


def rows() -> Iterator[Callable[[], object]]:
    for kind, n_in, dim in (
        (PrepKind.PLAIN, 5120, 0),
        (PrepKind.NORM, 5120, 0),
        (PrepKind.HEADS, 6144, 128),
        (PrepKind.GATE, 6144, 256),
        (PrepKind.GLU, 17408, 0),
        (PrepKind.GEGLU, 21504, 0),
        (PrepKind.GROUPS, 8192, 1024),
        (PrepKind.RELU2, 2688, 0),
    ):
        spec = RowsSpec(CPU, n_in, kind, dim)
        yield lambda spec=spec: rows_triton.bind(spec)(
            *rows_op.make(spec, 2, torch.Generator().manual_seed(0))
        )


def norms() -> Iterator[Callable[[], object]]:
    x, weight = torch.zeros(2, 5120), torch.zeros(5120)
    for layer in (False, True):
        spec = NormsSpec(CPU, 5120, 1e-6, layer)
        yield lambda spec=spec: norms_triton.bind(spec).picked(
            x, weight, torch.zeros(1, dtype=torch.int64)
        )
        yield lambda spec=spec: norms_triton.bind(spec).paired(x, weight, x, weight)
        yield lambda spec=spec: norms_triton.bind(spec).added(x, weight, x, 0.5)


def best() -> Iterator[Callable[[], object]]:
    yield lambda: best_triton.bind(BestSpec(CPU)).tokens(torch.zeros(2, 248_320))
    yield lambda: best_triton.bind(BestSpec(CPU)).pairs(torch.zeros(2, 248_320))


def ahead() -> Iterator[Callable[[], object]]:
    batch, _, _ = ahead_cuda.verify((2, 3), CPU, torch.Generator().manual_seed(0))
    op, found = ahead_triton.bind(AheadSpec(CPU)), torch.zeros(2, 8, dtype=torch.float64)
    ends, forced = torch.zeros(2, MAX_ENDS, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    for beside in ((None, None), (ends, None), (None, forced), (ends, forced)):
        yield lambda beside=beside: op.accept(found, batch, *beside)
    for drafts in (None, torch.zeros(2, 4, dtype=torch.int64)):
        yield lambda drafts=drafts: op.move(batch, op.accept(found, batch), drafts)
    yield lambda: op.follow(batch, op.accept(found, batch))
    yield lambda: op.step(batch)


def linear() -> Iterator[Callable[[], object]]:
    for type in tiles.FORMATS:
        for epilogue in Epilogue:
            for n_row in (1, 17, 64) if epilogue is Epilogue.PLAIN else (1,):
                spec = LinearSpec(CPU, type, 64, 512, epilogue)
                yield lambda spec=spec, n_row=n_row: _linear(spec, n_row)


def _linear(spec: LinearSpec, n_row: int) -> None:
    shape = spec.n_weight_row, spec.n_in
    raw, scales = random_rows(spec.type, *shape, torch.Generator().manual_seed(0), CPU)
    run, out = linear_triton.bind(spec), torch.zeros(n_row, spec.n_out)
    x = torch.zeros(n_row, spec.n_in).half()
    residual = out if spec.epilogue is Epilogue.RESIDUAL else None
    run.multiply(x, torch.ones(n_row), run.pack(raw, spec.type, shape, scales), out, residual)


def moe() -> Iterator[Callable[[], object]]:
    types = [
        GGMLType[n]
        for n in ("Q8_0", "Q4_K", "Q6_K", "MXFP4", "NVFP4", "IQ4_NL", "Q2_K", "Q5_0", "IQ2_XXS")
    ]
    for type in types:
        for n_row in (1, 3, 40, 200) if type is GGMLType.Q4_K else (1, 40):
            gated = type is not GGMLType.NVFP4
            spec = MoeSpec(
                CPU, 2, 256, 256, "swiglu" if gated else "relu2", type, type, not gated, pieces=1
            )
            yield lambda spec=spec, n_row=n_row: _moe(spec, n_row)
    type = GGMLType.MXFP4
    biased = MoeSpec(CPU, 2, 256, 256, "swiglu_oai", type, type, limit=7.0, biased=True)
    for n_row in (1, 40):
        yield lambda n_row=n_row: _moe(biased, n_row)


def _moe(spec: MoeSpec, n_row: int) -> None:
    experts = moe_triton.bind(spec)(moe_check.random_stacks(spec, 4, torch.Generator().manual_seed(0)))
    x, ids = torch.zeros(n_row, spec.n_in), torch.zeros(n_row, 2, dtype=torch.int32)
    gate = torch.zeros(n_row, 1) if spec.pieces else None
    experts(x, ids, torch.zeros(n_row, 2), None, Added(x, None, gate))


def moe_route() -> Iterator[Callable[[], object]]:
    for spec in (
        RouteSpec(CPU, 3072, 256, 8, gated=True),
        RouteSpec(CPU, 4096, 512, 22, "sigmoid", scale=5.0, biased=True),
        RouteSpec(CPU, 4096, 256, 6, "sqrtsoftplus", given=True),
        RouteSpec(CPU, 2880, 32, 4, "chosen", False, shifted=True),
        RouteSpec(CPU, 7168, 256, 8, "sigmoid", scale=2.5, biased=True, n_group=8, n_group_used=4),
        RouteSpec(CPU, 128, 60, 7, "sigmoid", n_group=5, n_group_used=2),
        RouteSpec(CPU, 2816, 128, 8, factored=True),
    ):
        yield lambda spec=spec: _moe_route(spec)


def _moe_route(spec: RouteSpec) -> None:
    bias = torch.zeros(spec.n_expert) if spec.biased else None
    given = torch.zeros(2, spec.n_used, dtype=torch.int32) if spec.given else None
    matrix = torch.zeros(spec.n_expert + spec.gated, spec.n_in)
    shift, factors = (
        torch.zeros(spec.n_expert) if has else None for has in (spec.shifted, spec.factored)
    )
    rows = torch.zeros(2, spec.n_in), torch.ones(spec.n_in)
    moe_route_triton.bind(spec)(*rows, matrix, bias, given, shift, factors)


def heads() -> Iterator[Callable[[], object]]:
    for type in (GGMLType.F16, GGMLType.BF16, GGMLType.F32):
        for sizes in ((128, 512, 128), (20, 256, 512), (5, 12, 16)):
            spec = HeadsSpec(CPU, type, *sizes)
            yield lambda spec=spec: _heads(spec)


def _heads(spec: HeadsSpec) -> None:
    data = torch.zeros(spec.n_head * spec.n_out * spec.row_bytes, dtype=torch.uint8)
    heads_triton.bind(spec)(data)(torch.zeros(2, spec.n_head, spec.n_in))


def rope_latent() -> Iterator[Callable[[], object]]:
    for kv in NUMBERS:
        for neox in (False, True):
            spec = RopeLatentSpec(CPU, 128, 128, 512, 64, neox, 1e-6, KvFormat(kv, kv))
            yield lambda spec=spec: _rope_latent(spec)


def _rope_latent(spec: RopeLatentSpec) -> None:
    pool = KVPool(16, 1, spec.dim, spec.kv, CPU, keys_only=True)
    q, plain = torch.zeros(2, spec.n_head * 192), torch.zeros(2, spec.n_head, spec.rank)
    angles, rows = (torch.zeros(2, 1, 32), torch.zeros(2, 1, 32)), torch.zeros(2, dtype=torch.int64)
    kv, norm = torch.zeros(2, spec.dim), torch.ones(spec.rank)
    rope_latent_triton.bind(spec)(kv, q, plain, norm, angles, pool, rows)


OPS = {
    "heads": heads,
    "rope_latent": rope_latent,
    "moe_route": moe_route,
    "moe": moe,
    "linear": linear,
    "attend": attend,
    "gdn": gdn,
    "mamba2": mamba2,
    "short_conv": short_conv,
    "rope_kv": rope_kv,
    "rows": rows,
    "norms": norms,
    "best": best,
    "ahead": ahead,
}


def main(names: list[str], targets: list[int | str]) -> int:
    n_bad = 0
    for name in targets:
        tri.has_f8 = lambda device, name=name: name in (89, 90, 100, 120, 121)
        tri.has_ptx = lambda device, name=name: isinstance(name, int)
        tri.has_large_shared = lambda device, name=name: name in LARGE
        done = set()

        def launch(kernel, grid, args, constants, warps, name=name, done=done) -> None:
            key = (
                kernel.__name__,
                repr(constants),
                warps,
                tuple(getattr(a, "dtype", None) for a in args),
            )
            if key not in done:
                done.add(key)
                print(compiled(name, kernel, args, constants, warps), flush=True)

        tri.launch = launch
        for op in names:
            for run in OPS[op]():
                try:
                    run()
                except Exception as e:
                    n_bad += 1
                    print(f"{op} {name}: {type(e).__name__}: {str(e)[:300]}", flush=True)
    return int(n_bad > 0)


if __name__ == "__main__":
    args = sys.argv[1:]
    chosen = [t for t in SHARED if str(t) in args] or list(SHARED)
    sys.exit(main([op for op in OPS if op in args] or list(OPS), chosen))
