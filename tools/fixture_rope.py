"""Make tests/fixtures/rope_scaling.npz: what llama.cpp says of the tiny models when their files stretch rope.

    python tools/fixture_rope.py path/to/oracle/python

The oracle is a Python with `xllamacpp` (2026.10): its server is asked for the log probabilities behind the fixtures' tokens, which are four times
as many as the context that the files say they were trained on.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pyspec.gguf import open_gguf

FIXTURES = Path(__file__).resolve().parents[1] / "tests" / "fixtures"
YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 32}
UNREAD = {"yarn_beta_fast": 8.0, "yarn_beta_slow": 0.5, "yarn_ext_factor": 0.5, "yarn_log_multiplier": 0.5}
CASES: dict[str, tuple[str, Mapping[str, object]]] = {
    "llama yarn": ("llama", YARN),
    "llama yarn, other context": ("llama", {"type": "yarn", "factor": 2.5}),
    "llama yarn, longer": ("llama", YARN | {"attn_factor": 1.3}),
    "llama yarn, keys that are not read": ("llama", YARN | UNREAD),
    "llama linear": ("llama", {"type": "linear", "factor": 2.5, "attn_factor": 1.3}),
    "llama without a type": ("llama", {"factor": 2.5}),
    "llama none": ("llama", {"type": "none", "factor": 2.5}),
    "llama old name": ("llama", {"../scale_linear": 2.5}),
    "llama both names": ("llama", {"../scale_linear": 2.5, "factor": 1.5}),
    "llama_freqs_tied yarn": ("llama_freqs_tied", YARN),
    "qwen3 yarn": ("qwen3", YARN),
    "qwen3 yarn, shrunk": ("qwen3", YARN | {"factor": 0.5}),
    "qwen35 yarn": ("qwen35", YARN),
    "qwen35 without a type": ("qwen35", {"factor": 2.5}),
    "qwen35moe yarn": ("qwen35moe", YARN),
}
ASK = """
import json, os, sys, urllib.request
import xllamacpp as x

p = x.CommonParams()
p.model.path, p.n_ctx, p.n_parallel, p.n_gpu_layers, p.warmup, p.port = sys.argv[1], 1024, 1, 0, False, 0
p.cache_type_k = p.cache_type_v = x.ggml_type.GGML_TYPE_F32
p.flash_attn_type, p.no_extra_bufts, p.verbosity = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED, True, 0
server = x.Server(p)
body = {"prompt": json.loads(sys.argv[2]), "n_predict": 1, "temperature": 0, "n_probs": 300, "logit_bias": [[int(sys.argv[3]), 0.0]]}
asked = urllib.request.Request(server.listening_address + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
print("RESULT" + json.dumps(json.load(urllib.request.urlopen(asked))["completion_probabilities"][0]["top_logprobs"]), flush=True)
os._exit(0)
"""


def keys_of(arch: str, fields: Mapping[str, object]) -> dict[str, object]:
    """Whole keys of the fields of a case."""
    return {f"{arch}.rope.scaling.{name}".replace("scaling.../", ""): value for name, value in fields.items()}


def with_keys(source: Path, to: Path, keys: Mapping[str, object]) -> None:
    """A copy of a GGUF file with keys before its own; one more fills up to what tensors are aligned to."""
    packed = b"".join(_packed(key, value) for key, value in keys.items())
    filler = b"general.description"
    packed += _packed(filler.decode(), "x" * (-(len(packed) + 8 + len(filler) + 4 + 8) % 32))
    data = source.read_bytes()
    (n_key,) = struct.unpack_from("<Q", data, 16)
    to.write_bytes(data[:16] + struct.pack("<Q", n_key + len(keys) + 1) + packed + data[24:])


def _packed(key: str, value: object) -> bytes:
    name = struct.pack("<Q", len(key)) + key.encode()
    if isinstance(value, str):
        return name + struct.pack("<IQ", 8, len(value)) + value.encode()
    return name + (struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value))


def log_probabilities(python: str, path: Path, tokens: Sequence[int]) -> np.ndarray:
    """[vocab] float32 behind the tokens."""
    given = [python, "-c", ASK, str(path), json.dumps(list(tokens)), "0"]
    done = subprocess.run(given, capture_output=True, text=True, check=True)
    answer = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    rows = json.loads(answer.removeprefix("RESULT"))
    found = np.full(len(rows), np.nan, np.float32)
    for row in rows:
        found[row["id"]] = row["logprob"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python")
    args, found = parser.parse_args(), {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (model, fields) in CASES.items():
            source, path = FIXTURES / f"{model}.gguf", Path(folder) / "m.gguf"
            with open_gguf(source) as file:
                with_keys(source, path, keys_of(file.architecture, fields))
            tokens = np.load(FIXTURES / f"{model}.npz")["tokens"].tolist()
            found[name] = log_probabilities(args.python, path, tokens)
            print(name, found[name].argmax(), found[name].max(), flush=True)
    np.savez_compressed(FIXTURES / "rope_scaling.npz", **found)


if __name__ == "__main__":
    main()
