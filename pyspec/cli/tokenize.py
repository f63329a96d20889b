"""`pyspec tokenize`: text to token ids, with the tokenizer of a GGUF file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

import click

from pyspec.cli.options import ModelChoice, model_options


def _words(ctx: click.Context, param: click.Parameter, words: tuple[str, ...]) -> tuple[str, ...]:
    """The words after the model, or the only word if a flag names the model and no flag has a text."""
    own = ctx.params
    is_named = own.get("model") or own.get("hf_repo")
    if not words and is_named and own.get("name") and own.get("prompt") is own.get("file") is None:
        words, own["name"] = (own["name"],), ""
    return words


def _text(words: tuple[str, ...], prompt: str | None, file: BinaryIO | None) -> str:
    """The text to tokenize. Raises UsageError."""
    given = [what for what in (words or None, prompt, file) if what is not None]
    if len(given) > 1:
        raise click.UsageError("a text after the model, -p and -f exclude each other")
    if len(words) > 1:
        raise click.UsageError(f"a text of several words needs quotes: {' '.join(words)!r}")
    if words or prompt is not None:
        return words[0] if words else prompt or ""
    if file is None and sys.stdin.isatty():
        raise click.UsageError("no text: give one after the model, -p TEXT or -f FILE")
    source = click.open_file("-", "rb") if file is None else file
    try:
        text = source.read().decode("utf-8")  # bytes, so that line ends stay as they are
    except UnicodeDecodeError as e:
        raise click.UsageError(f"{source.name} is not UTF-8: byte {e.start}") from e
    if file is None and not text:
        raise click.UsageError("nothing on stdin; give a text after the model, -p TEXT or -f FILE")
    return text


@click.command()
@model_options
@click.argument("words", nargs=-1, metavar="[TEXT]", callback=_words)
@click.option("-p", "--prompt", "--text", default=None, metavar="TEXT", help="Text to tokenize.")
@click.option("-f", "--file", type=click.File("rb"), help="File with the text; - is stdin.")
@click.option("--bos/--no-bos", default=True, help="Add the begin-of-text token, if any.")
@click.option("--parse-special/--no-parse-special", default=True, help="Parse special tokens.")
@click.option("--json", "as_json", is_flag=True, help="Print {tokens, pieces, n_tokens}.")
def tokenize(
    choice: ModelChoice,
    words: tuple[str, ...],
    prompt: str | None,
    file: BinaryIO | None,
    bos: bool,
    parse_special: bool,
    as_json: bool,
) -> None:
    """Print the token ids of a text.

    One line per token, with its piece. The text is the word after the model, -p, -f, or piped in. The file needs only a vocabulary.

    Example: pyspec tokenize demo "Hello, world"
    """
    text = _text(words, prompt, file)
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
