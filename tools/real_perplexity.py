"""Perplexity of real texts beside llama.cpp's recorded one, and the KL divergence that each type of keys and values costs: a part of `make real`.

    python tools/real_perplexity.py --model FILE.gguf [--kernels TIER] [--chunks 4] [--pairs f16,q8_0,q8_0/q4_0]

The texts are licences that Debian ships. They are read from this machine, and skipped if they are missing or others: their SHA-256 stands
in tests/real/perplexity.json beside llama.cpp's sums (tools/record_perplexity.py), one a sequence of 512 tokens, so that any number of
sequences can be compared. Two sums are recorded, as for texts: of the same weights as F32, which bind, and of the file as it is, where
llama.cpp rounds rows to 8 bits. The second is shown, and nothing follows from it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from real_compare import FOLDER

from pyspec.config import EngineSettings
from pyspec.errors import PyspecError
from pyspec.logits import LogitReader
from pyspec.perplexity import Compared, chunks_of, compare

RECORDED = FOLDER / "perplexity.json"
N_CHUNK = 4  # sequences of a text that `make real` reads
PAIRS = ("f16", "q8_0", "q8_0/q4_0", "q4_0")
BOUND = 0.01
"""Of a perplexity against llama.cpp's, as a share, where it is no larger than the noise of rounded keys (`allowed`)."""


@dataclass(frozen=True)
class Text:
    """A text of this machine and its record.

    ids   SHA-256 of its token ids as int32
    sums  by pair of types, llama.cpp's sum of negative log probabilities of each sequence
    f32   the same with the weights as F32
    """

    name: str
    path: str
    sha256: str
    ids: str
    sums: Mapping[str, Sequence[float]]
    f32: Mapping[str, Sequence[float]]

    def read(self) -> str | None:
        """The text; None if it is not here, or is another."""
        try:
            data = Path(self.path).read_bytes()
        except OSError:
            return None
        return data.decode("utf-8") if hashlib.sha256(data).hexdigest() == self.sha256 else None


@dataclass(frozen=True)
class Record:
    """The recorded sums. program: computed them."""

    program: str
    n_ctx: int
    texts: tuple[Text, ...]


def read(path: Path = RECORDED) -> Record:
    """Raises FileNotFoundError."""
    found = json.loads(path.read_text(encoding="utf-8"))
    texts = tuple(
        Text(**{name: one[name] for name in Text.__dataclass_fields__}) for one in found["texts"]
    )
    return Record(found["program"], found["n_ctx"], texts)


def ids_hash(chunks: Sequence[Sequence[int]]) -> str:
    """SHA-256 of the ids of all sequences."""
    return hashlib.sha256(np.asarray(chunks, np.int32).tobytes()).hexdigest()


def recorded_perplexity(sums: Sequence[float], n_chunk: int, n_ctx: int) -> float:
    """Of the first sequences, by their sums."""
    return math.exp(sum(sums[:n_chunk]) / (n_chunk * (n_ctx - 1 - n_ctx // 2)))


def allowed(found: Compared) -> float:
    """How far two programs' perplexities may be apart, as a share: 1 %, or the noise of types that round more.

    Two programs that round the same keys differently differ in a token's log probability by about the root of twice the divergence from
    unrounded ones. The mean over n tokens has 1/sqrt(n) of that, but for tokens of a sequence that share keys: three times it is allowed.
    """
    return max(BOUND, 3 * math.sqrt(2 * 2 * found.mean / found.own.n))


def readers_of(
    model: Path, pairs: Sequence[str], n_ctx: int, kernels: str, device: str
) -> list[LogitReader]:
    """A load for each pair of types."""
    found = []
    for pair in pairs:
        k, _, v = pair.partition("/")
        settings = EngineSettings(
            ctx=n_ctx + 1,
            batch=n_ctx,
            ubatch=n_ctx,
            kv_type=k,
            kv_type_v=v or None,
            kernels=kernels,
            device=device,
        )
        found.append(LogitReader(model, settings))
    return found


def measure(
    model: Path,
    record: Record,
    pairs: Sequence[str],
    *,
    n_chunk: int,
    kernels: str = "auto",
    device: str = "auto",
) -> int:
    """Print a table for each text that is here. The number of perplexities that are too far from llama.cpp's, and of texts with other ids."""
    n_bad, readers = 0, []
    for text in record.texts:
        content = text.read()
        if content is None:
            print(f"\nskipped {text.name}: {text.path} is missing or another text")
            continue
        readers = readers or readers_of(model, ("f32", *pairs), record.n_ctx, kernels, device)
        base, *others = readers
        chunks = chunks_of(base.tokenizer, content, record.n_ctx)
        if ids_hash(chunks) != text.ids:
            print(f"\n{text.name}: WRONG token ids")
            n_bad += 1
            continue
        chunks = chunks[:n_chunk] if n_chunk > 0 else chunks
        begun = time.monotonic()
        found = compare(base, others, chunks)
        took = time.monotonic() - begun
        print(f"\n{text.name}: {found[0].own.n} tokens of {len(chunks)} sequences, {took:.0f} s")
        n_bad += show(text, pairs, found, len(chunks), record.n_ctx)
    return n_bad


def show(text: Text, pairs: Sequence[str], found: Sequence[Compared], n_chunk: int, n_ctx: int) -> int:
    """A line for each pair. The number of perplexities that are too far from the recorded ones."""
    n_bad = 0
    print(
        f"{'':<13}{'':>11}{'llama.cpp':>13}{'':>9}{'llama.cpp,':>13}{'KL from':>11}{'99 % are':>10}{'same':>9}"
    )
    print(
        f"{'keys/values':<13}{'perplexity':>11}{'F32 weights':>13}{'apart':>9}{'8-bit rows':>13}{'f32':>11}{'below':>10}{'best':>9}"
    )
    print(f"{'f32':<13}{found[0].base.perplexity:>11.4f}")
    for pair, one in zip(pairs, found, strict=True):
        line, verdict = f"{pair:<13}{one.own.perplexity:>11.4f}", ""
        exact, rounded = (
            recorded_perplexity(sums[pair], n_chunk, n_ctx) if pair in sums else None
            for sums in (text.f32, text.sums)
        )
        line += f"{'':>22}" if exact is None else f"{exact:>13.4f}{one.own.perplexity / exact - 1:>9.2%}"
        line += f"{'':>13}" if rounded is None else f"{rounded:>13.4f}"
        if exact is not None and abs(one.own.perplexity / exact - 1) > allowed(one):
            verdict = f"  WRONG: more than {allowed(one):.1%} apart"
            n_bad += 1
        print(f"{line}{one.mean:>11.6f}{one.quantile(0.99):>10.5f}{one.same:>9.2%}{verdict}", flush=True)
    return n_bad


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--kernels", default="auto", help="as of pyspec server")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--chunks", type=int, default=N_CHUNK, help="sequences of a text; 0: all")
    parser.add_argument(
        "--pairs", default=",".join(PAIRS), help="types of keys and values: f16,q8_0/q4_0"
    )
    given = parser.parse_args()
    try:
        n_bad = measure(
            given.model,
            read(),
            given.pairs.split(","),
            n_chunk=given.chunks,
            kernels=given.kernels,
            device=given.device,
        )
    except PyspecError as e:
        print(f"real_perplexity: {e}", file=sys.stderr)
        return 2
    return 1 if n_bad else 0


if __name__ == "__main__":
    sys.exit(main())
