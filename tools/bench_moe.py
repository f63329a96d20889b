"""Time a layer's whole feed-forward of experts on this GPU: norm, router, experts, shared expert, sums. Graphs over six layers' weights.

`python tools/bench_moe.py [rows ...] [--models q35,nano] [--old FOLDER] [--stage 10 20] [--registers 80 128] [--stages 3 2]`

`apart` has the shared expert as products of their own, `together` in the experts' launches; `--old` times an earlier moe.cu,
moe_pairs.cu and moe_cuda.py (and headers) that lie in a folder, and all are compared. `--f16` times types whose rows are whole numbers
with f16 rows, too. `--stage` (KB of weights), `--registers` of a thread (neither is for rows of whole numbers) and `--stages` (at least,
before more CTAs) are tried in all combinations, for few rows, in `together` alone where there is one; and so are
`--parts`, registers of types whose columns are summed in parts (100,80: a build for each).
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from bench_linear import DEVICE, FLOOR, graph_us

from pyspec.cuda import jit, streamed
from pyspec.cuda.context import context_of
from pyspec.cuda.ops.linear.cuda import random_packed
from pyspec.cuda.ops.linear.pack import packed_bytes
from pyspec.cuda.ops.moe import builds as moe_builds
from pyspec.cuda.ops.moe import cuda as moe_cuda
from pyspec.cuda.ops.moe.cuda import Experts
from pyspec.cuda.ops.moe.ref import NOTHING, Added, ExpertsRun, MoeSpec, RouteSpec, Stack, Stacks
from pyspec.cuda.ops.moe_route import cuda as moe_route_cuda
from pyspec.cuda.ops.rows.ref import RELU2, Norm
from pyspec.cuda.streamed import Streamed
from pyspec.gguf import GGMLType

N_LAYER, DRAWN = 6, 8  # layers; experts with weights of their own, the others have copies of these


@dataclass(frozen=True)
class Model:
    """Shapes of a feed-forward. latent: experts work in that width, between two products."""

    n_embd: int
    n_ff: int
    n_expert: int
    n_used: int
    n_piece: int
    type: GGMLType
    act: str
    latent: int = 0
    down: GGMLType | None = None  # another type than `type`

    def route(self) -> RouteSpec:
        is_qwen = self.act == "swiglu"
        how = {"router": "softmax", "gated": True} if is_qwen else {"router": "sigmoid", "scale": 2.5, "biased": True}
        return RouteSpec(DEVICE, self.n_embd, self.n_expert, self.n_used, **how)  # type: ignore[arg-type]

    def spec(self, pieces: int) -> MoeSpec:
        n, kind = self.latent or self.n_embd, self.type
        scaled = kind is GGMLType.NVFP4
        return MoeSpec(DEVICE, self.n_used, n, self.n_ff, self.act, kind, self.down or kind, scaled, pieces)  # type: ignore[arg-type]


MODELS = {
    "q35": Model(2048, 512, 256, 8, 1, GGMLType.Q8_0, "swiglu"),
    "nano": Model(2688, 1856, 128, 6, 2, GGMLType.Q8_0, "relu2"),
    "super": Model(4096, 2688, 512, 22, 2, GGMLType.NVFP4, "relu2", 1024),
    "122b": Model(3072, 1024, 256, 8, 1, GGMLType.Q4_K, "swiglu"),
    "flash": Model(4096, 2048, 256, 6, 0, GGMLType.IQ2_XXS, "swiglu", 0, GGMLType.Q2_K),
}


class Weights:
    """Of one layer, as in a file."""

    def __init__(self, m: Model, seed: int) -> None:
        gen = torch.Generator().manual_seed(seed)
        few = moe_cuda.random_stacks(m.spec(0 if m.latent else m.n_piece), DRAWN, gen)
        n_copy = m.n_expert // DRAWN
        gate = None if few.gate is None else copies(few.gate, n_copy)
        self.stacks = Stacks(gate, copies(few.up, n_copy), copies(few.down, n_copy))
        self.shared = few.shared
        self.router = (torch.randn(m.n_expert + m.route().gated, m.n_embd, generator=gen) / m.n_embd**0.5).to(DEVICE)
        self.bias = torch.rand(m.n_expert, generator=gen).to(DEVICE) if m.route().biased else None
        self.norm = Norm((0.5 + torch.rand(m.n_embd, generator=gen)).to(DEVICE), 1e-6)
        self.latent = [
            random_packed(m.type, *size, DEVICE) for size in ((m.latent, m.n_embd), (m.n_embd, m.latent)) if m.latent
        ]


def copies(s: Stack, n: int) -> Stack:
    return replace(s, data=s.data.repeat(n, 1), scale=None if s.scale is None else s.scale.repeat(n))


def shared_apart(m: Model, w: Weights) -> tuple[Streamed, Streamed]:
    """The shared expert as two products."""
    n_ff, is_gated = m.n_piece * m.n_ff, m.act == "swiglu"
    if w.shared is None:
        up, down = random_packed(m.type, n_ff, m.n_embd, DEVICE), random_packed(m.type, m.n_embd, n_ff, DEVICE)
    else:
        sides = [s.data.view(s.n_out, -1) for s in (w.shared.gate, w.shared.up) if s is not None]
        raw = moe_cuda.interleave(*sides) if is_gated else sides[0]
        up = moe_cuda.repack(raw.contiguous(), m.type, (len(raw), m.n_embd))
        down = moe_cuda.repack(w.shared.down.data.view(m.n_embd, -1), m.type, (m.n_embd, n_ff))
    return Streamed(up, DEVICE, is_gated, None), Streamed(down, DEVICE, False, None)


Feed = Callable[[Tensor], Tensor]


def feed(m: Model, w: Weights, experts: ExpertsRun, shared: tuple[Streamed, Streamed] | None) -> Feed:
    """As MoeFeed runs it."""
    route = moe_route_cuda.bind(m.route())
    down, up = [Streamed(p, DEVICE, False, None) for p in w.latent] or (None, None)

    def run(x: Tensor) -> Tensor:
        is_new = hasattr(experts, "prepare")  # old ones are of a class of their own
        routes = None if is_new else route(x, w.norm.weight, w.router, w.bias)  # it came first
        together = shared_of(x) if shared is not None else None
        n, prep = (x, w.norm) if down is None else (down(x, w.norm), None)
        into = experts.room(len(x)) if hasattr(experts, "room") and prep is not None else None
        ready = (into or experts.prepare(n, prep),) if is_new else ()  # type: ignore[attr-defined]
        if routes is None:
            routes = route(x, w.norm.weight, w.router, w.bias, into=into, power=w.norm.power)
        added = Added(x, None, routes.gate)
        if together is not None:
            added = Added(together) if routes.gate is None else Added(x, together, routes.gate)
        if up is None:
            return experts(n, routes.ids, routes.weights, prep, added, *ready)
        return up(experts(n, routes.ids, routes.weights, None, NOTHING, *ready), residual=added.residual)

    def shared_of(x: Tensor) -> Tensor:
        assert shared is not None
        prep = RELU2 if m.act == "relu2" else None
        return shared[1](shared[0](x, w.norm), prep, residual=None if m.route().gated else x)

    return run


def old_module(folder: Path) -> ModuleType:
    """An earlier moe_cuda.py that compiles the kernels beside it."""
    spec = importlib.util.spec_from_file_location("old_moe_cuda", folder / "moe_cuda.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    real, include = jit.source, Path(jit.__file__).parent / "include"

    def pasted(text: str, seen: set[str]) -> str:
        def paste(match: re.Match[str]) -> str:
            if match[1] in seen:
                return ""
            seen.add(match[1])
            own = folder / match[1]  # headers of that time, if they lie there, too
            path = own if own.exists() else include / match[1]
            return pasted(path.read_text().replace("#pragma once", ""), seen)

        return re.sub(r'#include "([\w.]+)"\n?', paste, text)

    def compile_old(stem: str, *args: object, **kwargs: object) -> object:
        jit.source = lambda name: pasted((folder / f"{name}.cu").read_text(), set())  # type: ignore[assignment]
        try:
            return jit.compile_cubin(stem, *args, **kwargs)  # type: ignore[arg-type]
        finally:
            jit.source = real

    module.compile_cubin = compile_old  # type: ignore[attr-defined]
    return module


def bytes_read(m: Model, weights: list[Weights], x: Tensor) -> float:
    """Of a layer, in the mean: experts that some row took, the shared one, the router, products around."""
    route, total = moe_route_cuda.bind(m.route()), 0
    n, kind = m.latent or m.n_embd, m.type
    one = (2 if m.act == "swiglu" else 1) * packed_bytes(kind, m.n_ff, n) + packed_bytes(m.down or kind, n, m.n_ff)
    for w in weights:
        taken = len(route(x, w.norm.weight, w.router, w.bias).ids.unique())
        total += taken * one + m.n_piece * one * m.n_embd // n + w.router.numel() * 4
        total += sum(p.data.numel() for p in w.latent)
    return total / len(weights)


def worst(got: list[Tensor], want: list[Tensor], x: Tensor) -> float:
    """Of all layers the row that is off most, of what the layer adds to it."""
    return max(float(((a - b).norm(dim=-1) / (b - x).norm(dim=-1)).amax()) for a, b in zip(got, want, strict=True))


@dataclass(frozen=True)
class How:
    """KB of weights in a stage; registers of a thread; least stages; registers of types with parts."""

    stage: int
    registers: int
    stages: int
    parts: tuple[int, ...]

    @classmethod
    def usual(cls) -> How:
        """As it is."""
        b = moe_builds
        return cls(b.STAGE // 1024, b.REGISTERS[b.FEW_PAIRS], b.LEAST_STAGES, b.PARTS_REGISTERS[b.BUILDS[1]])

    def use(self) -> None:
        """What is compiled next is built so."""
        b = moe_builds
        b.STAGE, b.LEAST_STAGES, b.REGISTERS[b.FEW_PAIRS] = self.stage * 1024, self.stages, self.registers
        b.PARTS_REGISTERS[b.BUILDS[1]] = self.parts

    def __str__(self) -> str:
        parts = ",".join(map(str, self.parts))
        return f"stage {self.stage} registers {self.registers} stages {self.stages} parts {parts}"


def forget_builds() -> None:
    """The next product compiles its kernels as `moe_builds` says now."""
    made = context_of(DEVICE)._made
    for key in [k for k in made if k[0] is moe_cuda._step.__wrapped__]:  # type: ignore[index, attr-defined]
        del made[key]


def built(experts: Experts, how: How) -> Experts:
    """The same weights with kernels that are built another way."""
    how.use()
    forget_builds()
    own, act = copy(experts), moe_cuda.ACTS[experts.spec.act]
    own.inner, own.down = copy(experts.inner), copy(experts.down)
    for part, a, next in ((own.inner, act, own.down.stack.type), (own.down, moe_cuda.NONE, None)):
        few = [(n, listed) for n, listed in moe_cuda.BUILDS if n == moe_cuda.FEW_PAIRS]
        part.steps = part.steps | {key: moe_cuda._step(DEVICE, part.stack.type, key[0], a, next, key[1]) for key in few}
    return own


def variants_of(
    m: Model, weights: list[Weights], old: ModuleType | None, hows: list[How], f16: bool
) -> list[tuple[str, list[Feed]]]:
    apart = [shared_apart(m, w) if m.n_piece else None for w in weights]

    def feeds(made: Sequence[ExpertsRun], is_apart: bool) -> list[Feed]:
        return [feed(m, w, e, s if is_apart else None) for w, e, s in zip(weights, made, apart, strict=True)]

    found = []
    if old is not None:
        found.append(("old apart", feeds([old.bind(m.spec(0))(w.stacks) for w in weights], True)))
    if old is not None and not m.latent:
        both = [replace(w.stacks, shared=w.shared) for w in weights]
        found.append(("old together", feeds([old.bind(m.spec(m.n_piece))(s) for s in both], False)))
    made = [Experts(m.spec(0), w.stacks) for w in weights]
    found.append(("apart", feeds(made, True)))
    if not m.latent and m.n_piece:
        made = [Experts(m.spec(m.n_piece), replace(w.stacks, shared=w.shared)) for w in weights]
        found.append(("together", feeds(made, False)))
    if f16:
        kept = moe_builds.INTEGER, moe_builds.HALVED
        moe_builds.INTEGER = moe_builds.HALVED = frozenset()
        forget_builds()
        found.append(("apart, f16", feeds([Experts(m.spec(0), w.stacks) for w in weights], True)))
        moe_builds.INTEGER, moe_builds.HALVED = kept
        forget_builds()
    usual = How.usual()
    for how in hows:
        try:
            others = [built(e, how) for e in made] if how != usual else []
        except Exception as e:  # noqa: BLE001 - a combination that can not be built is said, and the others go on
            print(f"{how}: {e}")
            others = []
        if others:
            found.append((f"{found[-1][0].split()[0]} {how}", feeds(others, bool(m.latent))))
    built(made[0], usual)  # what is built next is as it was
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=int, nargs="*", default=[1, 4, 8, 32])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--old", type=Path)
    usual = How.usual()
    parser.add_argument("--stage", type=int, nargs="*", default=[usual.stage])
    parser.add_argument("--stages", type=int, nargs="*", default=[usual.stages])
    parser.add_argument("--registers", type=int, nargs="*", default=[usual.registers])
    parser.add_argument("--parts", type=lambda x: tuple(map(int, x.split(","))), nargs="*", default=[usual.parts])
    parser.add_argument("--f16", action="store_true")
    parser.add_argument("--layers", type=int, default=N_LAYER)
    args = parser.parse_args()
    old = None if args.old is None else old_module(args.old)
    streamed._tall = lambda spec: None  # rows here are few: nothing to be checked in a child process
    for name in args.models.split(","):
        m = MODELS[name]
        hows = [How(*each) for each in product(args.stage, args.registers, args.stages, args.parts)]
        weights = [Weights(m, seed) for seed in range(args.layers)]
        variants = variants_of(m, weights, old, hows, args.f16)
        for rows in args.rows:
            x = torch.randn(rows, m.n_embd, generator=torch.Generator().manual_seed(rows)).to(DEVICE)
            print(f"{name} {rows:3} rows: floor {bytes_read(m, weights, x) / FLOOR * 1e6:.1f} us", flush=True)
            want = [f(x) for f in variants[0][1]]
            for label, feeds in variants:
                off = worst([f(x) for f in feeds], want, x)
                us = graph_us([partial(f, x) for f in feeds])  # type: ignore[misc]
                print(f"  {label:56} {us:7.1f} us, off {off:.1g}", flush=True)


if __name__ == "__main__":
    main()
