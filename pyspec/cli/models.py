"""`pyspec models`: the catalogue."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from pyspec.cli import verbose_option


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@verbose_option
def models(as_json: bool) -> None:
    """List the models that can be given by name."""
    from pyspec.catalog import catalogue

    entries = catalogue().values()
    if as_json:
        click.echo(json.dumps([asdict(e) | {"runs": e.runs} for e in entries], indent=2))
        return
    from pyspec.cli.tables import show, table

    t = table("name", "model", "arch", "drafter", "runs")
    for e in entries:
        drafters = [e.draft.kind] if e.draft else []
        t.add_row(e.name, e.title, e.arch, ", ".join(drafters + ["mtp"] * e.mtp) or "-", "yes" if e.runs else "not yet")
    show(t)
