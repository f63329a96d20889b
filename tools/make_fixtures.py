"""Make tests/fixtures: tiny GGUF files and what llama.cpp computes on them.

Run it with a Python that has `gguf` and numpy, and pass the Python that has `llama_cpp`:

    python tools/make_fixtures.py path/to/oracle/python
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import tempfile
import zlib
from pathlib import Path

import fixture_models
import fixture_nemotron
import numpy as np
from fixture_models import VOCAB, Tiny, weights, write_dequantised

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TOKENS = 120
DEMO_FAMILIES = ("code", "story", "json")
DEMO_TOKENS = 64
DEMO_TOP = 32
log = logging.getLogger(__name__)
Arrays = dict[str, np.ndarray]
AnyTiny = Tiny | fixture_nemotron.Tiny

TEXTS = [
    "",
    " ",
    "Hello world",
    " the thing in the tower",
    "Hello   world  \n\n  and on\t\ttabs ",
    "line one\r\nline two\r\n\r\n",
    "it's we'll I'D you'Ve don't",
    "12345 1,234.5 0x1F 2026-11-21",
    "déjà vu, naïve café, Straße",
    "日本語のテキスト and 한국어",
    "हिन्दी नमस्ते ខ្មែរ a\u0301e\u0308",
    "emoji 🙂👩‍👩‍👧 and ½ ² Ⅷ",
    "f(x) = {a: [1, 2], 'b': None};  // done!!!",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<think>\nhm\n</think>\n\nyes<|endoftext|>",
    "<|im_start|><|im_start|> <|im_end| >",
    "\u00a0\u2003wide\u200bzero\ufeff",
    "ends with spaces   ",
]


class Oracle:
    """llama.cpp behind another Python; every call is a process of its own."""

    def __init__(self, python: str, folder: Path) -> None:
        self._python = python
        self._folder = folder

    def _run(self, command: str, model: Path, given: Path, options: list[str]) -> Path:
        output = self._folder / ("out.npz" if command == "logits" else "out.json")
        script = HERE / "fixture_oracle.py"
        done = subprocess.run(
            [self._python, str(script), command, str(model), str(given), str(output), *options],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"llama.cpp failed on {model.name} ({done.returncode}): {done.stderr[-800:]}")
        return output

    def logits(self, model: Path, sequences: list[np.ndarray], *options: str) -> Arrays:
        given = self._folder / "in.npz"
        np.savez(given, **{f"tokens_{i}": tokens for i, tokens in enumerate(sequences)})
        with np.load(self._run("logits", model, given, list(options))) as found:
            return dict(found)

    def tokenize(self, model: Path, texts: list[str]) -> list[list[int]]:
        given = self._folder / "texts.json"
        given.write_text(json.dumps(texts))
        return json.loads(self._run("tokenize", model, given, []).read_text())

    def greedy(self, model: Path, prompts: Path) -> dict[str, float]:
        return json.loads(self._run("greedy", model, prompts, []).read_text())


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Rows (T, V) float32 -> float64 log probabilities."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def mean_divergence(reference: np.ndarray, other: np.ndarray) -> float:
    """KL(reference || other) in nats, averaged over rows."""
    p, q = log_softmax(reference), log_softmax(other)
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def largest_difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a.astype(np.float64) - b).max())


def check_hidden(tiny: Tiny, logits: np.ndarray, hidden: np.ndarray) -> None:
    """The saved hidden must be the row that the head reads, else the fixture would teach a wrong contract."""
    held = weights(tiny)
    head = held.get("output.weight", held["token_embd.weight"])
    assert largest_difference(hidden @ head.T, logits) < 1e-3, tiny.name


def make_tiny(tiny: AnyTiny, oracle: Oracle, out: Path, scratch: Path) -> dict[str, float]:
    """Write one model and its expected values; returns the figures for facts.json."""
    path = out / f"{tiny.name}.gguf"
    if isinstance(tiny, Tiny):
        fixture_models.write(path, tiny)
    else:
        fixture_nemotron.write(path, tiny)
    tokens = np.random.default_rng(zlib.crc32(tiny.name.encode()) + 1).integers(0, VOCAB, TOKENS).astype(np.int32)
    found = oracle.logits(path, [tokens])
    half = oracle.logits(path, [tokens], "--kv", "f16")
    single = oracle.logits(path, [tokens], "--chunk", "1")
    facts = {
        "bytes": path.stat().st_size,
        "largest_logit": largest_difference(found["logits_0"], np.zeros(1)),
        "logit_deviation": float(found["logits_0"].std()),
        "difference_f16_cache": largest_difference(found["logits_0"], half["logits_0"]),
        "difference_one_by_one": largest_difference(found["logits_0"], single["logits_0"]),
    }
    if tiny.quantised:
        copy = scratch / "dequantised.gguf"
        write_dequantised(path, copy)
        plain = oracle.logits(copy, [tokens])
        reference, other = plain["logits_0"], found["logits_0"]
        facts["divergence_quantised_activations"] = mean_divergence(reference, other)
        facts["same_top_1"] = float((reference.argmax(-1) == other.argmax(-1)).mean())
        found = {f"quantised_{key}": value for key, value in found.items() if "logits" in key} | plain
    elif isinstance(tiny, Tiny):
        check_hidden(tiny, found["logits_0"], found["hidden_0"])
    arrays = {key.removesuffix("_0"): value for key, value in found.items()}
    np.savez_compressed(out / f"{tiny.name}.npz", tokens=tokens, **arrays)
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in facts.items()}


def demo_sequences(prompts: Path) -> list[np.ndarray]:
    """Prompt and answer ids of the first clear, long enough conversation of each family, cut to DEMO_TOKENS."""
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    chosen = []
    for family in DEMO_FAMILIES:
        row = next(
            r
            for r in rows
            if r["family"] == family
            and r["min_logit_margin"] >= 0.1
            and len(r["prompt_ids"] + r["answer_ids"]) >= DEMO_TOKENS - 8
        )
        chosen.append(np.array((row["prompt_ids"] + row["answer_ids"])[:DEMO_TOKENS], dtype=np.int32))
    return chosen


def top_rows(logits: np.ndarray, prefix: str, suffix: str) -> Arrays:
    """The DEMO_TOP best ids, their logits and the log-sum-exp of each row, all that KL needs, in little space."""
    ids = np.argsort(-logits, axis=-1, kind="stable")[:, :DEMO_TOP].astype(np.int32)
    best = np.take_along_axis(logits, ids, -1)
    total = (best[:, :1] - log_softmax(logits).max(-1, keepdims=True))[:, 0].astype(np.float32)
    return {f"{prefix}top_ids_{suffix}": ids, f"{prefix}top_logits_{suffix}": best, f"{prefix}lse_{suffix}": total}


def make_demo(oracle: Oracle, demo: Path, out: Path, scratch: Path) -> dict[str, float]:
    """Expected values of the demo target on three teacher-forced conversations."""
    path, sequences = demo / "pyspec-demo.gguf", demo_sequences(demo / "prompts.jsonl")
    copy = scratch / "demo.gguf"
    write_dequantised(path, copy)
    quantised, plain = oracle.logits(path, sequences), oracle.logits(copy, sequences)
    half = oracle.logits(path, sequences, "--kv", "f16")
    arrays: Arrays = {"chain_tokens": plain["chain_tokens"]}
    for i, tokens in enumerate(sequences):
        arrays |= {f"tokens_{i}": tokens, f"quantised_logits_{i}": quantised[f"logits_{i}"].astype(np.float16)}
        arrays |= top_rows(plain[f"logits_{i}"], "", str(i))
    arrays |= top_rows(plain["mtp_logits"], "mtp_", "0") | top_rows(plain["chain_logits"], "chain_", "0")
    np.savez_compressed(out / "demo.npz", **arrays)
    pairs = [(plain[f"logits_{i}"], quantised[f"logits_{i}"], half[f"logits_{i}"]) for i in range(len(sequences))]
    exact, actual, halved = (np.concatenate(column) for column in zip(*pairs, strict=True))
    facts = {
        "largest_logit": largest_difference(actual, np.zeros(1)),
        "logit_deviation": float(actual.std()),
        "difference_f16_cache": largest_difference(actual, halved),
        "divergence_quantised_activations": mean_divergence(exact, actual),
        "same_top_1": float((exact.argmax(-1) == actual.argmax(-1)).mean()),
    }
    return {key: float(f"{value:.4g}") for key, value in facts.items()}


def make_tokens(oracle: Oracle, demo: Path, out: Path) -> None:
    """Ids that llama.cpp gives for TEXTS with each pre-tokenizer."""
    files = {name: out / f"{name}.gguf" for name in ("llama", "qwen3", "qwen35")}
    files["demo"] = demo / "pyspec-demo.gguf"
    ids = {name: oracle.tokenize(path, TEXTS) for name, path in files.items()}
    rows = ",\n".join(
        json.dumps({"text": text} | {name: ids[name][i] for name in files}) for i, text in enumerate(TEXTS)
    )
    (out / "tokens.json").write_text(f"[\n{rows}\n]\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("oracle", help="Python interpreter that has llama_cpp")
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "fixtures")
    parser.add_argument("--demo", type=Path, default=ROOT / "pyspec" / "demo")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these models alone, beside the others")
    parser.add_argument("--greedy", action="store_true", help="only time greedy decoding of the demo target")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("gguf").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        oracle = Oracle(arguments.oracle, scratch)
        if arguments.greedy:
            log.info("%s", oracle.greedy(arguments.demo / "pyspec-demo.gguf", arguments.demo / "prompts.jsonl"))
            return
        known = arguments.out / "facts.json"
        facts = json.loads(known.read_text()) if arguments.only else {}
        for tiny in (*fixture_models.MODELS, *fixture_nemotron.MODELS):
            if arguments.only and tiny.name not in arguments.only:
                continue
            facts[tiny.name] = make_tiny(tiny, oracle, arguments.out, scratch)
            log.info("%s %s", tiny.name, facts[tiny.name])
        if not arguments.only:
            facts["demo"] = make_demo(oracle, arguments.demo, arguments.out, scratch)
            log.info("demo %s", facts["demo"])
            make_tokens(oracle, arguments.demo, arguments.out)
        known.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
