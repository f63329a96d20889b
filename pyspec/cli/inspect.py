"""`pyspec inspect`: metadata, tensors and sizes of a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from pyspec.cli import verbose_option

WIDE = 100  # characters of a metadata value shown


@click.command()
@click.argument("file", metavar="FILE")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--tensors/--no-tensors", default=True, help="List tensors.")
@verbose_option
def inspect(file: str, as_json: bool, tensors: bool) -> None:
    """Show metadata, tensors and sizes of a GGUF file.

    FILE may also be a catalogue name; of a remote file only the head is downloaded."""
    from pyspec.catalog import resolve
    from pyspec.gguf import has_head, open_gguf
    from pyspec.gguf.inspect import describe
    from pyspec.hub import heads_only

    with TemporaryDirectory(prefix="pyspec-inspect-") as folder, heads_only(Path(folder), has_head):
        about = describe(open_gguf(resolve(file)[0]))
    if not tensors:
        del about["tensors"]
    if as_json:
        click.echo(json.dumps(about, ensure_ascii=False))
    else:
        _show(about)


def _show(about: dict) -> None:
    from pyspec.cli.tables import row, show, table
    from pyspec.ranges import printable

    totals = about["totals"]
    click.echo(f"{Path(about['path']).name}: GGUF v{about['version']}, {about['architecture']}")
    click.echo(
        f"{totals['tensors']} tensors, {totals['parameters'] / 1e6:,.2f} M parameters, "
        f"{totals['tensor_bytes'] / 1e6:,.1f} MB of {totals['file_bytes'] / 1e6:,.1f} MB "
        f"in {len(about['paths'])} file(s)"
    )
    by_type = totals["bytes_by_type"].items()
    click.echo(", ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in by_type))
    meta = table("key", "value")
    for key, value in about["metadata"].items():
        row(meta, printable(key, WIDE), printable(json.dumps(value, ensure_ascii=False), WIDE))
    show(meta)
    if "tensors" in about:
        rows = table("tensor", "type", "shape", "bytes", right=("bytes",))
        for t in about["tensors"]:
            shape = " x ".join(map(str, t["shape"]))
            row(rows, printable(t["name"]), t["type"], shape, f"{t['bytes']:,}")
        show(rows)
