"""Restore slot files with one wrong field in the head and a valid signature, as an attacker would write: each is refused, or right.

    python tests/long_runs/fuzz_slots.py --number 2000 --seed 1          (part of: make fuzz)

A slot of the demo pair, and one of a recurrent model with its MTP block, is saved. Every value of the file's head is replaced by every wrong
one, every key and item left out or said twice; `--number` of all these are drawn, and as many files are cut, joined or damaged in
their content. Each is restored in a child process: it is refused in one short line, or restored; then the text that the slot was
about is asked for and is the one it was, and the cache's books are in order. All else is a finding. Exit status 1 if there are any.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import random
import signal
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pyspec.engine.api import Engine
from pyspec.errors import BadSlotFile
from pyspec.slots.span_file import CHUNK, DIGEST, SLOT, VERSION, digest

ROOT = Path(__file__).resolve().parents[2]
PAIRS = {"demo": ("demo", "auto"), "qwen35 with MTP": (str(ROOT / "tests" / "fixtures" / "qwen35.gguf"),) * 2}  # fmt: skip
WRONG: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 7, 63, 65_535, 1 << 31, 1 << 32, 1 << 63, 1 << 64, 0.5, -0.0, 1e308, "", "x", "\x00", "\x1b[2J", "x" * 100_000,
    "\ud800", [], [None], [-1], [[]], {}, {"": None}, [1 << 40], [1] * 100_000,
)  # fmt: skip
PROMPT, N_SAID, N_ON = list(range(40, 110)), 6, 12
CHILD = 100  # files that one child restores
SILENT_S = 300
LINE = 400


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything in a head; of long lists the first, the last and one between."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for i in sorted({0, len(value) // 2, len(value) - 1}) if value else ():
            yield from places(value[i], (*path, i))


def changed(
    head: dict[str, Any], path: tuple[Any, ...], rng: random.Random
) -> tuple[str, dict[str, Any]]:
    """The fault, and the head with it."""
    head = copy.deepcopy(head)
    inside: Any = head
    for step in path[:-1]:
        inside = inside[step]
    last, how = path[-1], rng.randrange(6)
    was = inside[last]
    if how == 0:
        del inside[last]
        return f"{path} left out", head
    if how == 1 and isinstance(inside, list):
        inside.insert(last, was)
        return f"{path} twice", head
    if how <= 2 and isinstance(was, int) and not isinstance(was, bool):
        inside[last] = was + rng.choice((-1, 1, 8, 64, -was * 2))
    elif how <= 2 and isinstance(was, list):
        inside[last] = rng.choice((was[:-1], was + was[-1:], was[::-1], was * 2))
    else:
        inside[last] = rng.choice(WRONG)
    return f"{path} = {str(inside[last])[:40]!r}, was {str(was)[:40]!r}", head


def signed(head: dict[str, Any] | bytes, content: bytes) -> bytes:
    """A file whose digests are right."""
    text = (
        head
        if isinstance(head, bytes)
        else json.dumps(head, separators=(",", ":")).encode("utf-8", "surrogatepass")
    )
    start = struct.pack("<8sII", SLOT.magic, VERSION, len(text)) + text
    key = digest(start)
    chunks = (content[i : i + CHUNK] for i in range(0, len(content), CHUNK))
    return start + key + b"".join(c + digest(c, key, i) for i, c in enumerate(chunks))


def parted(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Head and content of a file."""
    (n,) = struct.unpack_from("<I", data, 12)
    rest, step = data[16 + n + DIGEST :], CHUNK + DIGEST
    return json.loads(data[16 : 16 + n]), b"".join(
        rest[i : i + step][:-DIGEST] for i in range(0, len(rest), step)
    )


def mutant(data: bytes, i: int, seed: int) -> tuple[str, bytes]:
    """The fault of file number `i` of a seed, and the file. Every second has a wrong head; the others a wrong content or length."""
    rng, (head, content) = random.Random(f"{seed} {i}"), parted(data)
    if i % 2 == 0:
        every = list(places(head))
        what, wrong = changed(head, every[i // 2 % len(every)], rng)
        return what, signed(wrong, content)
    at, n = rng.randrange(len(content)), rng.choice((1, 8, 4096))
    how = rng.randrange(6)
    if how == 0:
        return f"cut at {at}", data[:at]
    if how == 1:
        return f"content cut at {at}", signed(head, content[:at])
    if how == 2:
        return f"{n} more bytes of content", signed(head, content + rng.randbytes(n))
    if how == 3:
        return f"byte {at} flipped", data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[
            at + 1 :
        ]
    if how == 4:
        raw = json.dumps(head).encode()
        return "a head of noise", signed(raw[: rng.randrange(len(raw))] + rng.randbytes(n), content)
    return f"{n} bytes between files", data + rng.randbytes(n) + data


def said(engine: Engine) -> tuple[int, ...]:
    """The text that the slot is about, and how it goes on."""
    return engine.generate(PROMPT, max_tokens=N_SAID + N_ON, temperature=0, ignore_eos=True).tokens


def verdict(engine: Engine, path: Path, want: tuple[int, ...]) -> tuple[str, str]:
    """The verdict of one file."""
    try:
        engine.restore_slot(0, path)
    except BadSlotFile as e:
        line = str(e)
        ok = 0 < len(line) <= LINE and line.isprintable()
        return ("refused" if ok else "FOUND"), line[:200]
    except Exception as e:  # noqa: BLE001 - any error is a finding
        return "FOUND", f"{type(e).__name__}: {str(e)[:200]}"
    try:
        engine.loop.cache.check(now=True)
        got = said(engine)
    except Exception as e:  # noqa: BLE001
        return "FOUND", f"restored, and then {type(e).__name__}: {str(e)[:200]}"
    return ("restored", "") if got == want else ("FOUND", f"restored, and the text is {got}, not {want}")


def load(pair: str) -> Engine:
    target, draft = PAIRS[pair]
    return Engine.load(target, draft, np=1, ctx=256, device="cpu", kv_type="f32", warm_up=False)


def child(pair: str, folder: Path, first: int, last: int, seed: int, out: int) -> None:
    """Restore some of the files, a line for each."""
    path, data = folder / "mutant", (folder / pair.replace(" ", "_")).read_bytes()
    with load(pair) as engine:
        want = said(engine)
        for i in range(first, last):
            what, wrong = mutant(data, i, seed)
            path.write_bytes(wrong)
            engine.erase_slot(0)
            os.write(out, json.dumps([i, what, *verdict(engine, path, want)]).encode() + b"\n")


def judged(pair: str, folder: Path, number: int, seed: int) -> Iterator[tuple[int, str, str, str]]:
    """(number, fault, verdict, reason) of every file, by children that are replaced when one dies."""
    done = 0
    while done < number:
        read, write = os.pipe()
        last = min(done + CHILD, number)
        if (pid := os.fork()) == 0:
            os.close(read)
            try:
                signal.alarm(SILENT_S)
                child(pair, folder, done, last, seed, write)
                os._exit(0)
            finally:
                os._exit(1)
        os.close(write)
        with os.fdopen(read, "rb") as lines:
            for line in lines:
                yield tuple(json.loads(line))
                done += 1
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status and done < last:
            yield done, "", "FOUND", f"the process ended with {status}"
            done += 1


def save(pair: str, folder: Path) -> None:
    """The file that is made wrong: written by a child, so that no thread is here when others are forked."""
    if (pid := os.fork()) == 0:
        try:
            with load(pair) as engine:
                engine.generate(PROMPT, max_tokens=N_SAID, temperature=0, ignore_eos=True)
                path = folder / pair.replace(" ", "_")
                if engine.save_slot(0, path).n_tokens < len(PROMPT):
                    raise SystemExit("the slot does not hold what was said")
            os._exit(0)
        except BaseException as e:  # noqa: BLE001 - printed here, because no caller receives it
            print(f"{type(e).__name__}: {e}", flush=True)
        finally:
            os._exit(1)
    if os.waitpid(pid, 0)[1]:
        raise SystemExit(f"no slot of {pair} could be saved")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--number", type=int, default=1000, help="of files, of each pair")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lines", action="store_true", help="print every file and what became of it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        for pair in PAIRS:
            save(pair, Path(name))
            for i, what, kind, why in judged(pair, Path(name), args.number, args.seed):
                counts[kind] += 1
                if kind == "FOUND" or args.lines:
                    print(f"{pair} {i}: {what}: {kind} {why}", flush=True)
    print(
        f"{counts['restored']} are restored and right, {counts['refused']} are refused, {counts['FOUND']} are findings (seed {args.seed})"
    )
    return 1 if counts["FOUND"] else 0


if __name__ == "__main__":
    sys.exit(main())
