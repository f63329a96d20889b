"""Show the time of forwards on a GPU, kernel by kernel, and its floors by memory and arithmetic.

    python tools/profile_rounds.py qwen3.6-27b --layers 8 -np 64 --cases plain:16 verify:64x4 prompt:2048@32768 rounds:32
    ... -ctk q8_0 -ctv q4_0                          keys and values of other types
    ... --tp 2                                       two ranks; times and floors are those of the first one
    ... --draft mtp|FILE --spec-len 3 --n-draft 3    with a drafter: `rounds` draft
    ... --set pyspec.cuda.streamed:FEW_ROWS=16       another number in a module; --exact: as the engine's

plain:N[@P]      N streams with a row each, behind P keys
verify:NxW[@P]   N streams with W rows each; needs a drafter that drafts W - 1
prompt:W[@P]     W rows of one prompt, behind P keys
rounds:N         whole rounds of the engine, N streams, drafts included: the time beyond their verify is the drafter's

The model is synthetic and has only its first N layers; a file is taken as it is. Head and embedding count once, and the rest is extrapolated to
all layers. A kernel counts from the end of all kernels that began before it (bench/parts.py). Floors: bytes over 4.3 TB/s,
operations over 790 TFLOP/s. `wall` is without a profiler, `idle` the device's wait for the host in it.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from pyspec.bench.measure import Turn
from pyspec.bench.parts import Record, own_times, part_of, watch_kernels
from pyspec.bench.prompts import make_prompts
from pyspec.engine.api import Engine
from pyspec.gguf import open_gguf
from pyspec.models.blocks.moe import Experts
from pyspec.models.weight_bytes import repacked_bytes
from pyspec.models.weights import HEADS
from pyspec.slots.batch import Batch, Seq, SeqMode, lay_out
from pyspec.slots.memory import Memory
from pyspec.slots.round import LogitsNeed
from pyspec.synth import find, write

BYTES, OPS = 4.3e12, 790e12  # a second, of one H200
REPEATS, N_LINE = 4, 14
CASE = re.compile(r"(plain|verify|prompt|rounds):(\d+)(?:x(\d+))?(?:@(\d+))?")


@dataclass(frozen=True)
class Case:
    """One kind of forward: see above."""

    kind: str
    n_seq: int
    width: int
    n_past: int

    @classmethod
    def read(cls, text: str) -> Case:
        found = CASE.fullmatch(text)
        if found is None:
            raise SystemExit(f"{text!r} is no case")
        kind, n, width, past = found[1], int(found[2]), int(found[3] or 1), int(found[4] or 300)
        return cls(kind, 1, n, int(found[4] or 0)) if kind == "prompt" else cls(kind, n, width, past)

    @property
    def n_row(self) -> int:
        return self.n_seq * self.width

    def seqs(self, n_vocab: int, n_late: int) -> list[Seq]:
        """Different tokens everywhere, or all rows would take the same experts. n_late: rows of a slot that wait before it writes its state."""
        tokens = torch.randint(
            n_vocab, (self.n_seq, self.width), generator=torch.Generator().manual_seed(0)
        ).tolist()
        if self.kind == "prompt":
            return [Seq(0, self.n_past, tokens[0], mode=SeqMode.KEEP)]
        n_fold = (self.width + 2) // 2 if self.width < 8 else 6
        if self.width == 1:
            turns = [i % (n_late + 1) for i in range(self.n_seq)]
            return [
                Seq(
                    i,
                    self.n_past,
                    tokens[i],
                    SeqMode.LATE if t < n_late else SeqMode.KEEP if t == n_late else SeqMode.VERIFY,
                    1,
                    t,
                )
                for i, t in enumerate(turns)
            ]
        return [
            Seq(i, self.n_past, row, n_out=self.width, n_fold=n_fold) for i, row in enumerate(tokens)
        ]


@dataclass(frozen=True)
class Floors:
    """Bytes and operations of a forward, for the present layers and for the others."""

    tensors: dict[str, Any]  # of the file
    n_used: int
    memory: Memory
    tp: int = 1

    def of(self, case: Case, n_layer: int) -> tuple[dict[str, float], float]:
        """(microseconds by part for the layers, those of the head)."""
        n_byte = n_op = head = 0.0
        for name, t in self.tensors.items():
            is_head = name == HEADS[0] or (name == HEADS[1] and HEADS[0] not in self.tensors)
            rows = case.n_row if not is_head else 0 if case.kind == "prompt" else case.n_row
            if is_head:
                head = max(repacked_bytes(t) / BYTES, 2 * rows * t.n_elements / OPS) if rows else 0.0
            elif len(t.shape) == 2 and name.startswith("blk.") and int(name.split(".")[1]) < n_layer:
                n_byte, n_op = n_byte + repacked_bytes(t), n_op + 2 * rows * t.n_elements
            elif len(t.shape) == 3 and int(name.split(".")[1]) < n_layer:
                share = self.n_used / t.shape[0]
                n_byte += repacked_bytes(t) * (1 - (1 - share) ** rows)
                n_op += 2 * rows * t.n_elements * share
        parts = {"linear": max(n_byte / BYTES, n_op / OPS) * 1e6}
        states = sum(layer.state[0].numel() for layer in self.memory.states.values())
        written = 1 / (self.memory.n_late + 1) if case.width == 1 else 1.0
        parts["state"] = case.n_seq * states * 4 * (1 + written) / BYTES * 1e6
        keys = case.n_seq * (case.n_past + case.width)
        kv_bytes = sum(plane[0].nbytes for pool in self.memory.kv.values() for plane in pool.planes)
        pairs = case.n_row * (case.n_past + (case.width + 1) / 2)
        parts["attention"] = 1e6 * max(keys * kv_bytes / BYTES, pairs * self._attend_ops(n_layer) / OPS)
        # A rank's states are its share already
        parts["linear"], parts["attention"] = (
            parts["linear"] / self.tp,
            parts["attention"] / self.tp,
        )
        return parts, head * 1e6 / self.tp

    def _attend_ops(self, n_layer: int) -> float:
        """Of a row and a key, so many layers."""
        outs = [self.tensors.get(f"blk.{i}.attn_output.weight") for i in range(n_layer)]
        return sum(4.0 * t.shape[1] for t in outs if t is not None)


def records_of(worker: Any, batch: Batch) -> tuple[list[list[Record]], float]:
    """(kernels of each of some forwards, milliseconds of one without the profiler)."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    def run() -> None:
        worker.results(batch, LogitsNeed(logits=False))  # as a greedy round

    for _ in range(3):
        run()
    if worker.device.type != "cuda":
        return [], 0.0
    torch.cuda.synchronize()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(REPEATS):
            run()
            torch.cuda.synchronize()
    kernels = sorted(
        (e.time_range.start, e.time_range.end, e.name)
        for e in found.events()
        if e.device_type == DeviceType.CUDA
    )
    n = len(kernels) // REPEATS
    return [kernels[i * n : (i + 1) * n] for i in range(REPEATS)], sorted(times)[2]


def table(
    forwards: Sequence[Sequence[Record]], n_line: int
) -> tuple[list[str], dict[str, float], float, float]:
    """(a line a kernel, microseconds by part of the layers, those outside of them, idle ones), of one forward."""
    each, inside = defaultdict[str, list[float]](list), defaultdict[str, float](float)
    outside = idle = 0.0
    for records in forwards:
        times = list(own_times(records))
        norms = [i for i, (name, _, _) in enumerate(times) if name.startswith("norms")]
        first = next((i + 1 for i, (name, _, _) in enumerate(times[:8]) if name.startswith("embed")), 0)
        last = norms[-1] if norms and norms[-1] > len(times) // 2 else len(times)
        before = "-"
        for i, (name, us, waited) in enumerate(times):
            each[f"{name[:44]} < {before[:20]}"].append(us)
            idle += waited if i else 0.0
            if first <= i < last:
                inside[part_of(name)] += us
            else:
                outside += us
            before = name
    n = len(forwards)
    total = sum(map(sum, each.values()))
    lines = [
        f"    {sum(us) / n:8.1f} us {100 * sum(us) / total:4.1f} %  {len(us) / n:6.1f} of {sum(us) / len(us):7.1f}  {name}"
        for name, us in sorted(each.items(), key=lambda i: -sum(i[1]))[:n_line]
    ]
    return lines, {k: v / n for k, v in inside.items()}, outside / n, idle / n


def show(engine: Engine, case: Case, floors: Floors, layers: tuple[int, int], n_line: int) -> None:
    """layers: that are there, of the whole model."""
    worker = engine.core.loop.worker  # type: ignore[attr-defined]
    with torch.inference_mode(), worker.lock:
        batch = lay_out(
            worker.table,
            case.seqs(worker.target.n_vocab, worker.memory.n_late),
            worker.device,
            arena=worker.arena,
        )
        forwards, wall = records_of(worker, batch)
        for slot in worker.table.slots:
            worker.table.drop(slot)
    if not forwards:
        print(f"{case}: no kernels to tell apart on {worker.device}")
        return
    there, whole = layers
    lines, inside, outside, idle = table(forwards, n_line)
    floor, head_floor = floors.of(case, there)
    more, layers_us, floor_us = whole / there, sum(inside.values()), sum(floor.values())
    how = "a graph" if batch.bucket is not None else "kernel by kernel"
    print(
        f"\n{case.kind} {case.n_seq} x {case.width} behind {case.n_past}, {how}: wall {wall:.2f} ms, busy {(layers_us + outside) / 1e3:.2f}, "
        f"idle {idle / 1e3:.2f}; of all {whole} layers busy {(layers_us * more + outside) / 1e3:.2f} ms, "
        f"floor {(floor_us * more + head_floor) / 1e3:.2f}"
    )
    parts = [
        f"{p} {us * more / 1e3:.2f} (floor {floor.get(p, 0) * more / 1e3:.2f})"
        for p, us in sorted(inside.items(), key=lambda i: -i[1])
    ]
    print(
        f"    all layers, ms: {', '.join(parts)}, head and embedding {outside / 1e3:.2f} ({head_floor / 1e3:.2f})"
    )
    print("\n".join(lines), flush=True)


def show_rounds(engine: Engine, case: Case, n_line: int) -> None:
    """Of the engine as it runs, the host's gaps included."""
    if not engine.info.device.startswith("cuda"):
        print(f"{case}: no kernels to tell apart on {engine.info.device}")
        return
    mode = "plain" if engine.info.drafter == "none" else "spec"
    how = Turn(mode=mode, turn=0, n_predict=700, ignore_eos=True)  # type: ignore[arg-type]
    records, n_round = watch_kernels(engine, make_prompts(engine, case.n_seq, 64, True), how)
    if not n_round:
        print(f"{case}: the streams ended too soon, or there is no GPU")
        return
    times = list(own_times(records))
    busy, idle = (sum(x[i] for x in times) / n_round / 1e3 for i in (1, 2))
    print(
        f"\nrounds of {case.n_seq} streams, {engine.info.drafter}: busy {busy:.2f} ms, idle {idle:.2f}, {len(times) / n_round:.0f} kernels"
    )
    each, before = defaultdict[str, list[float]](list), "-"
    for name, us, _ in times:
        each[f"{name[:44]} < {before[:20]}"].append(us)
        before = name
    for name, us in sorted(each.items(), key=lambda i: -sum(i[1]))[:n_line]:
        print(
            f"    {sum(us) / n_round:8.1f} us  {len(us) / n_round:6.1f} of {sum(us) / len(us):7.1f}  {name}"
        )
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a synthetic model's name, or a file")
    parser.add_argument("--quant", default="q8_0")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("-np", type=int, default=64)
    parser.add_argument("-c", "--ctx", type=int, default=1024)
    parser.add_argument("-ctk", default="f16", help="type of keys")
    parser.add_argument("-ctv", help="type of values")
    parser.add_argument("--draft", default="none", help="mtp, or a drafter's file")
    parser.add_argument("--spec-len", type=float, default=3.0)
    parser.add_argument("--n-draft", type=int, default=3)
    parser.add_argument("--cases", nargs="*", default=["plain:16", "plain:64"])
    parser.add_argument("--lines", type=int, default=N_LINE)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--set", nargs="*", default=[], metavar="MODULE:NAME=NUMBER")
    parser.add_argument(
        "--tiny", action="store_true", help="a model of a few hundred kilobytes, to try this"
    )
    args = parser.parse_args()
    cases = [Case.read(text) for text in args.cases]
    for text in args.set:
        where, number = text.split("=")
        module, name = where.split(":")
        setattr(import_module(module), name, type(getattr(import_module(module), name))(number))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(args.model)
        if not path.exists():
            n = min(args.layers, find(args.model, tiny=args.tiny).n_layer)
            whole = find(args.model, tiny=args.tiny).n_layer
            path = write(
                args.model,
                Path(folder) / "m.gguf",
                quant=args.quant,
                tiny=args.tiny,
                mtp=args.draft == "mtp",
                n_layer=n,
            )
        settings: dict[str, object] = {
            "np": args.np,
            "ctx": args.ctx,
            "kv_type": args.ctk,
            "kv_type_v": args.ctv,
            "exact": args.exact,
            "tp": args.tp,
        }
        draft = None if args.draft == "none" else args.draft
        if draft is not None:
            settings |= {"synth_len": args.spec_len, "n_draft_fixed": True, "n_draft_max": args.n_draft}
        with Engine.open(str(path), draft, settings) as engine, open_gguf(path) as file:
            config = engine.core.loop.target.config  # type: ignore[attr-defined]
            there = config.n_layer
            parts = [spec for block in config.blocks for spec in block.specs]
            n_used = max((part.n_used for part in parts if isinstance(part, Experts)), default=0)
            floors = Floors(file.tensors, n_used, engine.core.loop.memory, args.tp)  # type: ignore[attr-defined]
            for case in cases:
                if case.kind == "rounds":
                    show_rounds(engine, case, args.lines)
                else:
                    show(
                        engine,
                        case,
                        floors,
                        (there, whole if not Path(args.model).exists() else there),
                        args.lines,
                    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
