"""`pyspec tokenize`: text to token ids, with the tokenizer of a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

import click

from pyspec.cli.options import ModelChoice, model_options


@click.command()
@model_options
@click.option("--text", default=None, help="Text to tokenize.")
@click.option("-f", "--file", type=click.File("rb"), help="File with the text; - is stdin.")
@click.option("--bos/--no-bos", default=True, help="Add the begin-of-text token, if any.")
@click.option("--parse-special/--no-parse-special", default=True, help="Parse special tokens.")
@click.option("--json", "as_json", is_flag=True, help="Print {tokens, pieces, n_tokens}.")
def tokenize(
    choice: ModelChoice,
    text: str | None,
    file: BinaryIO | None,
    bos: bool,
    parse_special: bool,
    as_json: bool,
) -> None:
    """Print the token ids of a text.

    One line per token, with its piece. The file needs only a vocabulary."""
    if (text is None) == (file is None):
        raise click.UsageError("want either --text or --file")
    if file is not None:
        try:
            text = file.read().decode("utf-8")  # bytes, so that line ends stay as they are
        except UnicodeDecodeError as e:
            raise click.UsageError(f"{file.name} is not UTF-8: byte {e.start}") from e
    assert text is not None
    from pyspec.catalog import resolve
    from pyspec.gguf import has_head, open_gguf
    from pyspec.hub import heads_only
    from pyspec.text.tokenizer import Tokenizer

    with TemporaryDirectory(prefix="pyspec-tokenize-") as folder, heads_only(Path(folder), has_head):
        tokenizer = Tokenizer.from_metadata(open_gguf(resolve(choice.target())[0]).metadata)
    ids = tokenizer.encode(text, add_special=bos, parse_special=parse_special)
    pieces = [tokenizer.piece(i) for i in ids]
    if as_json:
        found = {"tokens": list(ids), "pieces": pieces, "n_tokens": len(ids)}
        click.echo(json.dumps(found, ensure_ascii=False))
        return
    for i, piece in zip(ids, pieces, strict=True):
        click.echo(f"{i:>7}  {json.dumps(piece, ensure_ascii=False)}")
