"""Load files in which one field is wrong, as target and as drafter, and report every wrong end.

    python tests/long_runs/fuzz.py --number 3000 --seed 1          (or: make fuzz)

Every metadata field and every tensor entry of the fixtures and of the demo pair is made wrong in every way that
tests/long_runs/fuzz_mutants.py knows; `--number` of all these mutants are drawn. A mutant is loaded in a child process with a limit of
memory and of processor time. It may load, and then has to draft, answer and describe itself; or loading fails with an error of
pyspec's own, in one short line that a terminal can show. All else is a finding: a traceback, a long or wild line, a signal,
too much memory, too much time. Exit status 1 if there are any; `--only N` runs mutant N of a seed alone and shows its traceback.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from itertools import cycle
from pathlib import Path

import torch
from fuzz_mutants import Change, Parsed, field_mutants, made, parse, tensor_mutants

from pyspec import registry, synth
from pyspec.engine.api import Engine
from pyspec.errors import PyspecError, RequestError, SlotError

ROOT = Path(__file__).resolve().parents[2]
FIXTURES, DEMO = ROOT / "tests" / "fixtures", ROOT / "pyspec" / "demo"
LINE = 600  # characters of an error
MEMORY = 2 << 30  # bytes of address space beyond the child's first
CHILD = 64  # mutants a child judges before it makes room for a fresh one
CPU_S = 10  # of processor time for one mutant
SILENT_S = 300  # for a child that sleeps for ever
HELLO = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True)
class Base:
    """A file that is made wrong, and the one that is loaded with it: its drafter, or the target it drafts for."""

    path: Path
    is_drafter: bool = False
    other: Path | None = None

    @property
    def name(self) -> str:
        return f"{self.path.stem}{' as drafter' if self.is_drafter else ''}"


WRITTEN = (("qwen3", "eagle3"), ("qwen35", "dflash2"), ("qwen35", "dspark"), ("deepseek4", "dspark"))


@cache
def written() -> list[Base]:
    """Drafters of other kinds than the fixtures', with their targets, in a folder of their own."""
    folder, found = Path(tempfile.mkdtemp(prefix="pyspec-fuzz-")), []
    for arch, kind in WRITTEN:
        target, path = folder / f"{arch}.gguf", folder / f"{kind}-{arch}.gguf"
        synth.write(arch, target, quant="f32", tiny=True)
        synth.write(arch, path, quant="f32", tiny=True, drafter=True, kind=kind)
        found.append(Base(path, True, target))
    return found


def bases() -> list[Base]:
    demo, dflash = DEMO / "pyspec-demo.gguf", DEMO / "pyspec-demo-dflash.gguf"
    sidecars = [FIXTURES / f"{name}.gguf" for name in ("qwen35", "qwen35moe", "nemotron_moe")]
    return [
        *(Base(path) for path in sorted(FIXTURES.glob("*.gguf"))),
        Base(demo, other=dflash),
        Base(dflash, True, demo),
        *(Base(path, True, path) for path in sidecars),
        *written(),
        Base(FIXTURES / "gemma4-assistant.gguf", True, FIXTURES / "gemma4-e.gguf"),
    ]


@dataclass(frozen=True)
class Case:
    """One mutant."""

    base: Base
    what: str
    change: Change
    seed: str


def cases(seed: int, number: int, of: str = "") -> tuple[list[Case], dict[Base, Parsed]]:
    """So many mutants of all there are, every second with a wrong metadata field; round and round if there are too few. of: in the names
    of their files."""
    files, rng = {base: parse(base.path) for base in bases() if of in base.name}, random.Random(seed)
    kinds = []
    for list_mutants in (field_mutants, tensor_mutants):
        named = [
            (base, what, change) for base, file in files.items() for what, change in list_mutants(file)
        ]
        rng.shuffle(named)
        kinds.append(cycle(named))
    drawn = ((i, next(kinds[i % 2])) for i in range(number))
    return [Case(base, what, change, f"{seed} {i}") for i, (base, what, change) in drawn], files


def ask(engine: Engine) -> None:
    """Use a loaded model as a server would. A request may be refused, or end because its logits are NaN; the engine must live."""
    json.dumps(asdict(engine.info), ensure_ascii=False).encode()
    tokenizer = engine.tokenizer
    ids = tokenizer.encode("Hello <s> world")
    tokenizer.decode(ids).encode()
    [tokenizer.piece(i) for i in range(tokenizer.n_vocab)]
    drawn = {"ignore_eos": True, "logprobs": 3, "dry_multiplier": 0.8, "repeat_penalty": 1.1, "seed": 1}
    for prompt, how in (
        ([1, 2, 3], {"temperature": 0}),
        (ids[:16], {"temperature": 0}),
        ([4, 5], drawn),
    ):
        try:
            engine.generate(prompt, max_tokens=6, **how).text.encode()
        except (RequestError, SlotError):
            continue
    if engine.template is not None:
        try:
            engine.chat([{"role": "user", "content": "Hello <|im_start|>"}], max_tokens=2, temperature=0)
        except (RequestError, SlotError):
            return


class Unfit(Exception):
    """A file that loaded and can not be used: it should have been refused."""


def load(case: Case, path: Path, warm_up: bool) -> None:
    """Load the mutant by its kind, and generate a little."""
    base = case.base
    target, drafter = (base.other, path) if base.is_drafter else (path, base.other)
    settings = {"ctx": 128, "device": "cpu", "n_draft_fixed": True, "warm_up": warm_up}
    with Engine.load(str(target), "auto" if drafter is None else drafter, **settings) as engine:
        try:
            ask(engine)
        except PyspecError as e:
            raise Unfit(f"{type(e).__name__} after loading: {e}") from e


def verdict(case: Case, path: Path, warm_up: bool) -> tuple[str, str]:
    """("loads" or "refused", the line) if all is right, ("FOUND", why) if not."""
    try:
        load(case, path, warm_up)
    except PyspecError as e:
        line = str(e).replace(str(path), "FILE")
        if len(line) > LINE:
            return "FOUND", f"a line of {len(line)} characters: {line[:200]!r}"
        if not line.isprintable() or not line:
            return "FOUND", f"a wild line: {line[:200]!r}"
        return "refused", f"{type(e).__name__}: {line}"
    except MemoryError:
        return "FOUND", "MemoryError"
    except Exception as e:  # noqa: BLE001 - any error is a finding
        frames = traceback.extract_tb(e.__traceback__)
        where = next((f for f in reversed(frames) if "pyspec" in f.filename), frames[-1])
        return (
            "FOUND",
            f"{type(e).__name__} in {Path(where.filename).name}:{where.name}: {str(e)[:120]!r}",
        )
    return "loads", ""


def _limit(unlimited: bool = False) -> None:
    """Bound the additional memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = resource.RLIM_INFINITY if unlimited else pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def _allow(seconds: float) -> None:
    """Bound the processor time of all threads from now on; SIGXCPU ends the process after it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    resource.setrlimit(
        resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + seconds) + 1, resource.RLIM_INFINITY)
    )


def _child(todo: Sequence[tuple[int, Case]], files: dict[Base, Parsed], folder: Path, out: int) -> None:
    """Judge one mutant after the other, each in a line."""
    path = folder / "mutant.gguf"
    for i, case in todo[:CHILD]:
        _limit(unlimited=True)
        path.write_bytes(made(files[case.base], case.change, random.Random(case.seed)))
        _limit()
        _allow(CPU_S)
        os.write(out, json.dumps([i, *verdict(case, path, warm_up=i % 8 == 0)]).encode() + b"\n")


def judged(
    todo: list[tuple[int, Case]], files: dict[Base, Parsed], folder: Path
) -> Iterator[tuple[int, str, str]]:
    """(number, verdict, why) of every case, by children that are replaced when one dies."""
    while todo:
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(read)
            try:
                _child(todo, files, folder, write)
                os._exit(0)
            finally:
                os._exit(1)
        os.close(write)
        pending, silent = b"", False
        while todo:
            silent = not select.select([read], [], [], SILENT_S)[0]
            chunk = b"" if silent else os.read(read, 1 << 16)
            if not chunk:
                break
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                yield tuple(json.loads(line))
                todo = todo[1:]
        if silent:
            os.kill(pid, signal.SIGKILL)
        os.close(read)
        _, status = os.waitpid(pid, 0)
        number = os.waitstatus_to_exitcode(status)
        if todo and (number or silent):
            name = signal.Signals(-number).name if number < 0 else f"exit status {number}"
            yield todo[0][0], "FOUND", "sleeps" if silent else name
            todo = todo[1:]


def show(case: Case, files: dict[Base, Parsed], folder: Path, number: int) -> None:
    """One mutant here, with its traceback."""
    path = folder / "mutant.gguf"
    path.write_bytes(made(files[case.base], case.change, random.Random(case.seed)))
    print(f"{case.base.name}: {case.what}", flush=True)
    load(case, path, warm_up=number % 8 == 0)
    print("loads")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--number", type=int, default=3000, help="of mutants")
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument(
        "--of", default="", help="of files with this in their names alone, such as eagle3"
    )
    parser.add_argument("--only", type=int, help="this mutant of the seed, with its traceback")
    parser.add_argument("--lines", action="store_true", help="print every mutant and what became of it")
    args = parser.parse_args()
    seed = int(time.time()) % 100_000 if args.seed is None else args.seed
    torch.set_num_threads(1)
    for module in {
        "pyspec.engine.load.load",
        "pyspec.engine.process.core",
        *registry.ARCHITECTURES.values(),
        *registry.DRAFTERS.values(),
    }:
        import_module(module)  # once, and not in every child
    logging.disable(logging.CRITICAL)
    all_cases, files = cases(seed, args.number, args.of)
    print(f"{len(all_cases)} mutants, seed {seed}", flush=True)
    counts: Counter[str] = Counter()
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        if args.only is not None:
            show(all_cases[args.only], files, Path(name), args.only)
            return 0
        for i, kind, why in judged(list(enumerate(all_cases)), files, Path(name)):
            counts[kind] += 1
            if kind == "FOUND" or args.lines:
                found[why.split(": ")[0]] += kind == "FOUND"
                print(f"{i} {all_cases[i].base.name}: {all_cases[i].what}: {kind} {why}", flush=True)
    print(
        f"{counts['loads']} load, {counts['refused']} are refused, {counts['FOUND']} are findings (seed {seed})"
    )
    for why, n in found.most_common():
        print(f"  {n}  {why}")
    return 1 if counts["FOUND"] else 0


if __name__ == "__main__":
    sys.exit(main())
