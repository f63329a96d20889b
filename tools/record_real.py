"""Records the answers of llama.cpp that `make real` compares with: tests/real/answers.json.

    python tools/record_real.py MODEL.gguf MODEL-F32.gguf          with a Python that has xllamacpp and nothing of pyspec
    python tools/real_f32.py MODEL.gguf MODEL-F32.gguf             writes the second file

Each prompt of tests/real/prompts.json is tokenised and continued greedily, once with the file as it is and once with the same weights as F32.
llama.cpp rounds the inputs of products with quantised weights to 8 bits, and does not where weights are F32. So the first record holds the
rounding of llama.cpp, the second does not, and the distance between them says how large it is.
"""

from __future__ import annotations

import argparse
import json
import random
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xllamacpp
from real_compare import FOLDER, N_TOKEN, N_TOP, N_TOP_POSITION

N_CONTEXT = 2048
N_STRING = 240
SEED = 36
ALPHABETS = (
    (0x20, 0x7F), (0xA0, 0x180), (0x370, 0x400), (0x400, 0x500), (0x590, 0x600), (0x600, 0x700), (0x900, 0x980),
    (0x980, 0xA00), (0xB80, 0xC00), (0xE00, 0xE80), (0x10A0, 0x1200), (0x1200, 0x1380), (0x1780, 0x1800),
    (0x2000, 0x2070), (0x3040, 0x3100), (0x4E00, 0x9FA5), (0xAC00, 0xD7A4), (0x1F300, 0x1FA00), (0x10000, 0x10FFFF),
)  # fmt: skip
"""Ranges of Unicode: the first and the last one outside."""
RUNS = " \n\t\r-=_.*#a0/\\eo\u3000\xa0"
WORDS = (
    " ",
    "\n",
    "  ",
    "e",
    "an",
    "the",
    "ing",
    " of",
    "<eos>",
    "<start_of_turn>",
    "<0x41>",
    "\u2581",
    "ß",
    "…",
)


class Oracle:
    """llama.cpp's server in this process, with one slot, an F32 cache and neither flash attention nor rearranged weights."""

    def __init__(self, model: Path) -> None:
        wanted = xllamacpp.CommonParams()
        wanted.model.path = str(model)
        wanted.n_ctx, wanted.n_parallel, wanted.n_gpu_layers = N_CONTEXT, 1, 0
        wanted.no_extra_bufts, wanted.warmup = True, False
        wanted.cpuparams.n_threads = 1  # two wait for each other on a busy machine
        wanted.cache_type_k = wanted.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        wanted.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server = xllamacpp.Server(wanted)

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        data = json.dumps(body).encode()
        request = urllib.request.Request(
            self._server.listening_address + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def ids(self, text: str, parse_special: bool) -> list[int]:
        return self.ask("/tokenize", content=text, add_special=True, parse_special=parse_special)[
            "tokens"
        ]

    def answer(self, ids: list[int]) -> dict[str, Any]:
        """The greedy tokens behind a prompt, with the log probability of each and of the second best, and the best of the first positions."""
        found = self.ask(
            "/completion",
            prompt=ids,
            n_predict=N_TOKEN,
            temperature=0,
            samplers=["temperature"],
            n_probs=N_TOP,
            cache_prompt=False,
            return_tokens=True,
        )
        steps = found["completion_probabilities"]
        tops = [
            [[best["id"], round(best["logprob"], 5)] for best in step["top_logprobs"]] for step in steps
        ]
        return {
            "tokens": [step["id"] for step in steps],
            "ended": found["stop_type"] == "eos",
            "logprobs": [round(step["logprob"], 5) for step in steps],
            "second": [top[1][1] for top in tops],
            "top": tops[:N_TOP_POSITION],
        }


def strings() -> list[str]:
    """Texts of many scripts, runs of one character, and words that repeat and overlap."""
    draw, found = random.Random(SEED), []
    for i in range(N_STRING):
        kind, n = i % 4, draw.randrange(1, 24)
        if kind == 0:
            first, end = ALPHABETS[i // 4 % len(ALPHABETS)]
            parts = [chr(draw.randrange(first, end)) for _ in range(n)]
        elif kind == 1:
            parts = [draw.choice(RUNS) * draw.randrange(1, 40) for _ in range(draw.randrange(1, 6))]
        elif kind == 2:
            parts = [draw.choice(WORDS) if draw.random() < 0.5 else _letter(draw) for _ in range(n)]
        else:
            word = "".join(draw.choice("aeioumnrstlh") for _ in range(draw.randrange(2, 6)))
            parts = [draw.choice((word, word[:2], word[1:], word[::-1])) for _ in range(n // 2 + 1)]
        found.append("".join(parts).encode("utf-8", "replace").decode())
    return found


def _letter(draw: random.Random) -> str:
    first, end = draw.choice(ALPHABETS)
    return chr(draw.randrange(first, end))


def record(model: Path, f32: Path) -> dict[str, Any]:
    prompts = json.loads((FOLDER / "prompts.json").read_text(encoding="utf-8"))
    oracle = Oracle(model)
    texts = [[text, oracle.ids(text, i % 2 == 0)] for i, text in enumerate(strings())]
    rows = []
    for prompt in prompts:
        ids = oracle.ids(prompt["text"], prompt.get("parse_special", True))
        rows.append({"name": prompt["name"], "ids": ids, "quantised": oracle.answer(ids)})
    del oracle
    exact = Oracle(f32)
    for row in rows:
        row["f32"] = exact.answer(row["ids"])
    build = xllamacpp.BUILD_INFO
    program = f"xllamacpp {version('xllamacpp')} (llama.cpp build {build['build_number']}, commit {build['commit']})"
    return {"program": program, "strings": texts, "prompts": rows}


def write(path: Path, found: dict[str, Any]) -> None:
    """One string or one answer a line."""

    def line(value: Any) -> str:
        return json.dumps(value, ensure_ascii=True, separators=(",", ":"))

    texts = ",\n  ".join(map(line, found["strings"]))
    rows = ",\n  ".join(
        "{" + ",\n   ".join(f"{line(name)}:{line(value)}" for name, value in row.items()) + "}"
        for row in found["prompts"]
    )
    path.write_text(
        f'{{"program": {line(found["program"])},\n "strings": [\n  {texts}],\n "prompts": [\n  {rows}]}}\n',
        encoding="ascii",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("f32", type=Path)
    parser.add_argument("--out", type=Path, default=FOLDER / "answers.json")
    arguments = parser.parse_args()
    write(arguments.out, record(arguments.model, arguments.f32))


if __name__ == "__main__":
    main()
