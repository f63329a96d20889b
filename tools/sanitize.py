"""A few ragged rounds of tiny models, short enough for a sanitizer to follow every access.

    compute-sanitizer --tool racecheck --report-api-errors no python tools/sanitize.py      (or: make sanitize)

Prompts of different lengths join and leave, drafts are refused from the first to the last, one slot goes on from the
cache: everything a busy server does, on weights of a few hundred kilobytes. `--device cpu` tries the tool itself.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from pyspec import synth
from pyspec.engine import Engine

MODELS = (("qwen35", "mtp"), ("qwen35", "dflash"), ("qwen35moe", "mtp"), ("nemotron_h_moe", "mtp"), ("llama", "ngram"))
LENGTHS, TOKENS = (3, 70, 33, 200, 1), (6, 2, 5, 3, 4)


def run(model: str, draft: str, quant: str, folder: Path, device: str) -> str:
    path = synth.write(model, folder / f"{model}-{quant}.gguf", quant=quant, tiny=True)
    drafter: str | Path = draft
    if draft == "dflash":
        drafter = synth.write(model, folder / f"{model}-{quant}-drafter.gguf", quant=quant, tiny=True, drafter=True)
    settings = {
        "np": 3,
        "ctx": 256,
        "device": device,
        "check_tap_shift": False,
        "warm_up": False,
        "n_draft_fixed": True,
    }
    gen, began = torch.Generator().manual_seed(0), time.monotonic()

    def tell(what: str) -> None:
        print(f"  {model}: {what}, {time.monotonic() - began:.0f} s", flush=True)

    with Engine.load(path, drafter, **settings) as engine:
        tell("loaded")
        prompts = [tuple(torch.randint(5, 200, (n,), generator=gen).tolist()) for n in LENGTHS]
        n = 0
        for prompt, most in zip([*prompts, prompts[3]], [*TOKENS, 3], strict=True):
            n += len(engine.generate(prompt, max_tokens=most, temperature=0.0).tokens)
            tell(f"{n} tokens")
        for temperature in (0.0, 0.8):
            results = engine.generate_many(prompts, max_tokens=6, temperature=temperature, seed=1, ignore_eos=True)
            n += sum(len(r.tokens) for r in results)
            tell(f"{n} tokens")
        trips = engine.metrics().guard_trips
    assert trips == 0, f"{model}: {trips} guards tripped"
    return f"{model} {quant} with {draft}: {n} tokens"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quants", nargs="*", default=["q8_0"], help="of the weights, e.g. q8_0 q4_k nvfp4")
    parser.add_argument("--models", nargs="*", default=[m for m, _ in MODELS])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for quant in args.quants:
            for model, draft in MODELS:
                if model in args.models:
                    print(run(model, draft, quant, Path(folder), args.device), flush=True)


if __name__ == "__main__":
    main()
