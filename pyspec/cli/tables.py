"""Tables on stdout."""

from __future__ import annotations

import shutil
import sys

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table; columns named in `right` hold numbers."""
    t = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        t.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return t


def row(t: Table, *cells: str) -> None:
    """Add a row of plain text; brackets in model output are not markup."""
    t.add_row(*[Text(cell) for cell in cells])


def clipped_row(t: Table, *cells: str) -> None:
    """Add a row that stays one line: longer text ends in an ellipsis."""
    t.add_row(*[Text(" ".join(cell.split()), no_wrap=True, overflow="ellipsis") for cell in cells])


def show(t: Table) -> None:
    """Print a table as wide as the terminal, or 120 columns wide into a pipe."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 120
    Console(file=sys.stdout, width=width, highlight=False).print(t)
