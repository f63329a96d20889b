"""Draw reports of `pyspec bench -o json`: rates over streams, plain and speculative, with the range of turns.

    python tools/bench_picture.py A.json [B.json ...] -o rates.svg

Needs matplotlib (the extra `plots`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("rates.svg"))
    how = parser.parse_args()

    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for path in how.reports:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        for kind in ("plain", "spec"):
            found = [row for row in rows if row[kind] > 0]
            streams, rates = [row["np"] for row in found], [row[kind] for row in found]
            below = [row[kind] - row[f"{kind}_low"] for row in found]
            above = [row[f"{kind}_high"] - row[kind] for row in found]
            axes.errorbar(
                streams, rates, yerr=(below, above), marker="o", capsize=3, label=f"{path.stem}, {kind}"
            )
    axes.set(xlabel="streams", ylabel="tokens a second", ylim=(0, None), title="pyspec bench")
    axes.legend()
    figure.savefig(how.output)


if __name__ == "__main__":
    main()
