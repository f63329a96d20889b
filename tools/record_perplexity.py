"""Records llama.cpp's perplexities that `make real` compares with: tests/real/perplexity.json.

    python tools/record_perplexity.py MODEL.gguf MODEL-F32.gguf     with a Python that has xllamacpp and numpy, and nothing of pyspec
    python tools/real_f32.py MODEL.gguf MODEL-F32.gguf              writes the second file

The wheel's library is called by its C interface. The texts are cut and scored as llama-perplexity does it: sequences of 512 tokens, the
first one BOS, the second half scored. The places of fields in its parameters are those of the wheel 2026.10.11549; their defaults are
looked at first, and another layout is refused.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import struct
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import xllamacpp
from real_compare import FOLDER

N_CTX = 512
TEXTS = ("GPL-3", "GFDL-1.3")
PLACE = "/usr/share/common-licenses/"
F32_PAIRS = ("f16", "q8_0", "q8_0/q4_0", "q4_0")
PAIRS = ("f16", "q8_0", "q5_1", "q4_0", "q8_0/q4_0", "q4_0/f16", "f16/q4_0")
TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8}
N_FIELD = (("4I", 0, (512, 2048, 512, 1)), ("2i", 0x1C, (4, 4)), ("2i", 0x68, (1, 1)))
"""Defaults of a context: sizes, threads, types of keys and values, with their places."""
POINTER = ctypes.c_void_p


class Parameters(ctypes.Structure):
    """Larger than any of the library's, which reads its own first bytes."""

    _fields_ = (("bytes", ctypes.c_ubyte * 512),)


class Rows(ctypes.Structure):
    """The tokens of a forward."""

    _fields_ = (
        ("n", ctypes.c_int32),
        ("token", POINTER),
        ("embd", POINTER),
        ("pos", POINTER),
        ("n_seq_id", POINTER),
        ("seq_id", POINTER),
        ("logits", POINTER),
    )


class Library:
    """llama.cpp's functions in the wheel."""

    def __init__(self) -> None:
        self.so = ctypes.CDLL(str(next(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so"))))

    def call(self, name: str, result: Any, *arguments: tuple[Any, Any]) -> Any:
        """`name` with pairs of C type and value."""
        function = getattr(self.so, name)
        function.restype, function.argtypes = result, [kind for kind, _ in arguments]
        return function(*(value for _, value in arguments))


class Oracle:
    """A model on one thread."""

    def __init__(self, model: Path) -> None:
        self.llama = Library()
        self.call = self.llama.call
        self.call("llama_backend_init", None)
        self.defaults = bytes(self.call("llama_context_default_params", Parameters).bytes)
        for form, at, wanted in N_FIELD:
            if struct.unpack_from(form, self.defaults, at) != wanted:
                sys.exit(
                    f"another layout of llama_context_params at byte {at}: use the wheel 2026.10.11549"
                )
        given = self.call("llama_model_default_params", Parameters)
        name = str(model).encode()
        self.model = self.call(
            "llama_model_load_from_file", POINTER, (ctypes.c_char_p, name), (Parameters, given)
        )
        self.vocab = self.call("llama_model_get_vocab", POINTER, (POINTER, self.model))
        self.n_vocab = self.call("llama_vocab_n_tokens", ctypes.c_int32, (POINTER, self.vocab))

    def ids(self, text: bytes) -> np.ndarray:
        """[token] int32, with BOS."""
        room = np.empty(len(text) + 8, np.int32)
        n = self.call(
            "llama_tokenize",
            ctypes.c_int32,
            (POINTER, self.vocab),
            (ctypes.c_char_p, text),
            (ctypes.c_int32, len(text)),
            (POINTER, room.ctypes.data),
            (ctypes.c_int32, len(room)),
            (ctypes.c_bool, True),
            (ctypes.c_bool, False),
        )
        return room[:n]

    def chunks(self, ids: np.ndarray) -> np.ndarray:
        """[sequence, token] int32, each with BOS in front."""
        found = ids[: len(ids) // N_CTX * N_CTX].reshape(-1, N_CTX).copy()
        found[:, 0] = self.call("llama_vocab_bos", ctypes.c_int32, (POINTER, self.vocab))
        return found

    def sums(self, chunks: np.ndarray, pair: str) -> list[float]:
        """Of each sequence, the sum of negative log probabilities of its second half."""
        k, _, v = pair.partition("/")
        given = bytearray(self.defaults)
        struct.pack_into("4I", given, 0, N_CTX, N_CTX, N_CTX, 1)
        struct.pack_into("2i", given, 0x1C, 1, 1)
        struct.pack_into("2i", given, 0x68, TYPES[k], TYPES[v or k])
        context = self.call(
            "llama_init_from_model",
            POINTER,
            (POINTER, self.model),
            (Parameters, Parameters.from_buffer(given)),
        )
        found = [self._sum(context, one) for one in chunks]
        self.call("llama_free", None, (POINTER, context))
        return found

    def _sum(self, context: int, ids: np.ndarray) -> float:
        memory = self.call("llama_get_memory", POINTER, (POINTER, context))
        self.call("llama_memory_clear", None, (POINTER, memory), (ctypes.c_bool, True))
        first, zero, one = N_CTX // 2, np.zeros(1, np.int32), np.ones(N_CTX, np.int32)
        places = np.arange(N_CTX, dtype=np.int32)
        names = np.full(N_CTX, zero.ctypes.data, np.int64)
        wanted = (places >= first).astype(np.int8)
        arrays = (ids, None, places, one, names, wanted)
        rows = Rows(N_CTX, *(None if a is None else a.ctypes.data for a in arrays))
        if self.call("llama_decode", ctypes.c_int32, (POINTER, context), (Rows, rows)) != 0:
            sys.exit("llama_decode failed")
        at = self.call("llama_get_logits", POINTER, (POINTER, context))
        logits = np.ctypeslib.as_array(
            ctypes.cast(at, ctypes.POINTER(ctypes.c_float)), (N_CTX - first, self.n_vocab)
        )
        total = 0.0
        for row, token in zip(logits[:-1].astype(np.float64), ids[first + 1 :], strict=True):
            most = row.max()
            total += most + np.log(np.exp(row - most).sum()) - row[token]
        return total


def record(model: Path, pairs: Sequence[str]) -> dict[str, tuple[np.ndarray, dict[str, list[float]]]]:
    """By text, its sequences and the sums of each pair."""
    oracle, found = Oracle(model), {}
    for name in TEXTS:
        chunks, sums = oracle.chunks(oracle.ids(Path(PLACE + name).read_bytes())), {}
        for pair in pairs:
            sums[pair] = [round(x, 3) for x in oracle.sums(chunks, pair)]
            n = chunks.shape[0] * (N_CTX - 1 - N_CTX // 2)
            print(f"{model.name}, {name}, {pair}: {np.exp(sum(sums[pair]) / n):.4f}", flush=True)
        found[name] = chunks, sums
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("f32", type=Path)
    given = parser.parse_args()
    own, f32, texts = record(given.model, PAIRS), record(given.f32, F32_PAIRS), []
    for name, (chunks, sums) in own.items():
        texts.append(
            {
                "name": name,
                "path": PLACE + name,
                "sha256": hashlib.sha256(Path(PLACE + name).read_bytes()).hexdigest(),
                "ids": hashlib.sha256(chunks.tobytes()).hexdigest(),
                "sums": sums,
                "f32": f32[name][1],
            }
        )
    program = f"xllamacpp {version('xllamacpp')} (llama.cpp)"
    found = {"program": program, "n_ctx": N_CTX, "texts": texts}
    (FOLDER / "perplexity.json").write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
