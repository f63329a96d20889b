"""A few ragged rounds of small models, short enough for a sanitizer to follow every access.

    compute-sanitizer --tool memcheck --report-api-errors no --target-processes application-only \\
        python tools/sanitize.py --models qwen35:mtp      (or: make sanitize)

Prompts of different lengths join and leave, drafts are refused from the first to the last or kept as if drawn by lot, one
slot goes on from the cache: everything a busy server does, on weights of a few megabytes whose shapes our kernels take.
The first run compiles them; without a sanitizer that is quicker. `--device cpu` tries the tool itself.

initcheck needs `--weights packed`. With f16 copies of weights the library multiplies more than 128 rows. initcheck does not see
the stores of its kernels through the copy engine, so it counts every reader of such a product as a reader of
uninitialised memory (docs/log.md, 2026-11-22).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from pyspec import synth
from pyspec.cuda import survey
from pyspec.cuda.ops.linear import pair as linear_pair
from pyspec.engine.api import Engine
from pyspec.synth.dims import Dims, find, widened

MODELS = (  # architecture, drafter, mean tokens of a round; 0: the model's own acceptance, next to nothing
    ("qwen35", "mtp", 0.0),
    ("qwen35", "dflash", 3.0),
    ("qwen35moe", "mtp", 2.0),
    ("nemotron_h_moe", "mtp", 2.0),
    ("llama", "ngram", 0.0),
)
ALONE = (
    (3, 3),
    (200, 3),
    (200, 2),
)  # (tokens of a prompt, tokens wanted); the last prompt is the one before again
TOGETHER, WANTED = (3, 70, 33, 140, 1), 6


def dims_of(model: str) -> Dims:
    """As few layers as have one of every kind, in shapes that no kernel refuses; rows hold whole blocks of every type."""
    dims = widened(find(model, tiny=True))
    if dims.arch.startswith("qwen35"):
        return replace(dims, n_layer=2, interval=2, n_k_head=1, n_v_head=2, state=128)
    if dims.arch == "nemotron_h_moe":
        return replace(dims, n_layer=3, pattern="ME*", state=64)
    return replace(dims, n_layer=1)


def run(
    model: str,
    draft: str,
    mean: float,
    quant: str,
    folder: Path,
    device: str = "cuda",
    weights: str = "auto",
    kernels: str = "auto",
) -> str:
    dims = dims_of(model)
    path = synth.write(dims, folder / f"{model}-{quant}.gguf", quant=quant)
    drafter: str | Path = draft
    if draft == "dflash":
        drafter = synth.write(dims, folder / f"{model}-{quant}-drafter.gguf", quant=quant, drafter=True)
    settings = {
        "np": 3,
        "ctx": 256,
        "device": device,
        "weights": weights,
        "kernels": kernels,
        "check_tap_shift": False,
        "warm_up": False,
        "n_draft_fixed": True,
        "ngram_match": 1,
        "synth_len": mean,
    }
    gen, began, before = torch.Generator().manual_seed(0), time.monotonic(), survey.asked()

    def tell(what: str) -> None:
        print(f"  {model}: {what}, {time.monotonic() - began:.0f} s", flush=True)

    with Engine.load(path, drafter, **settings) as engine:
        asked = [ask for ask in survey.asked() if ask not in before]
        in_torch = [f"{f.op} {f.shape}" for f in survey.findings(asked) if not f.own]
        tell(f"loaded, in torch: {'; '.join(in_torch) or 'nothing'}")
        texts = {n: tuple(torch.randint(5, 200, (n,), generator=gen).tolist()) for n in (200, *TOGETHER)}
        n = 0
        for length, wanted in ALONE:
            n += len(
                engine.generate(
                    texts[length], max_tokens=wanted, temperature=0.0, ignore_eos=True
                ).tokens
            )
            tell(f"{n} tokens")
        for temperature in (0.0, 0.8):
            prompts = [texts[length] for length in TOGETHER]
            results = engine.generate_many(
                prompts, max_tokens=WANTED, temperature=temperature, seed=1, ignore_eos=True
            )
            n += sum(len(r.tokens) for r in results)
            tell(f"{n} tokens")
        counts = engine.metrics()
    assert counts.guard_trips == 0, f"{model}: {counts.guard_trips} guards tripped"
    drafts = f"{counts.accepted_tokens} of {counts.draft_tokens} drafts kept"
    return f"{model} {quant} with {draft}: {n} tokens, {drafts}, {counts.prompt_tokens_cached} tokens from the cache"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--quants", nargs="*", default=["q8_0"], help="of the weights, e.g. q8_0 q4_k nvfp4"
    )
    parser.add_argument(
        "--models", nargs="*", default=[m for m, _, _ in MODELS], help="e.g. llama qwen35:dflash"
    )
    parser.add_argument(
        "--weights", default="auto", help="packed: no f16 copies for the library's products"
    )
    parser.add_argument("--kernels", default="auto", help="triton: its tier instead of ours")
    parser.add_argument(
        "--no-pairs", action="store_true", help="matrices this small, too, as large ones are multiplied"
    )
    args = parser.parse_args()
    if args.no_pairs:
        linear_pair.MOST_BYTES = -1
    torch.zeros(
        1, device=args.device
    )  # a sanitizer gives up on a process that does not use the GPU within seconds
    with tempfile.TemporaryDirectory() as folder:
        for quant in args.quants:
            for model, draft, mean in MODELS:
                if model in args.models or f"{model}:{draft}" in args.models:
                    how = args.device, args.weights, args.kernels
                    print(run(model, draft, mean, quant, Path(folder), *how), flush=True)


if __name__ == "__main__":
    main()
