"""Make tests/text/llama_cpp_pre.json: ids that llama.cpp gives for the demo's vocabulary, by the name of the pre-tokenizer.

    python tools/fixture_pre.py path/to/oracle/python

The oracle is a Python with `xllamacpp` (2026.10), whose server is asked. Names with the same ids for all texts share them.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import tempfile
from pathlib import Path

from make_fixtures import TEXTS

from pyspec.text.pretokenize import PRE

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "pyspec" / "demo" / "pyspec-demo.gguf"
OWN = [
    "I'll count: 123 4567, 89012345 and $5.50 <= x^2 | ~y + `z`",
    "HTTPServer's getElementById DON'T x=1;//comment/\n\n  next",
    "a\r\n\r\n\tb  \n   c",
    "$$$ ((( )))!!! 1a2b3c ___ --flag=value",
]
ASK = """
import json, os, sys, urllib.request
import xllamacpp as x

p = x.CommonParams()
p.model.path, p.n_ctx, p.n_parallel, p.warmup, p.port, p.verbosity = sys.argv[1], 256, 1, False, 0, 0
server = x.Server(p)
found = []
for text in json.loads(sys.argv[2]):
    body = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
    asked = urllib.request.Request(server.listening_address + "/tokenize", body, {"Content-Type": "application/json"})
    found.append(json.load(urllib.request.urlopen(asked))["tokens"])
print("RESULT" + json.dumps(found), flush=True)
os._exit(0)
"""


def with_pre(to: Path, name: str) -> None:
    """The demo with another pre-tokenizer's name: the key is replaced where it stands, and padding is kept."""
    data, key = DEMO.read_bytes(), b"tokenizer.ggml.pre"
    at = data.index(struct.pack("<Q", len(key)) + key)
    begin = at + 8 + len(key) + 4
    (n,) = struct.unpack_from("<Q", data, begin)
    filler = b"general.filler"
    added = len(name) - n + 8 + len(filler) + 12
    more = struct.pack("<Q", len(filler)) + filler + struct.pack("<IQ", 8, -added % 32) + b"x" * (-added % 32)
    (n_key,) = struct.unpack_from("<Q", data, 16)
    head = data[:16] + struct.pack("<Q", n_key + 1) + more + data[24:begin]
    to.write_bytes(head + struct.pack("<Q", len(name)) + name.encode() + data[begin + 8 + n :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python")
    args, texts, groups = parser.parse_args(), [*TEXTS, *OWN], dict[str, list[str]]()
    with tempfile.TemporaryDirectory() as folder:
        for name in PRE:
            with_pre(path := Path(folder) / "m.gguf", name)
            given = [args.python, "-c", ASK, str(path), json.dumps(texts)]
            done = subprocess.run(given, capture_output=True, text=True, check=True)
            answer = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
            groups.setdefault(answer.removeprefix("RESULT"), []).append(name)
            print(name, flush=True)
    found = [{"names": names, "ids": json.loads(ids)} for ids, names in groups.items()]
    to = ROOT / "tests" / "text" / "llama_cpp_pre.json"
    to.write_text(json.dumps({"texts": texts, "groups": found}, ensure_ascii=True), encoding="utf-8")


if __name__ == "__main__":
    main()
