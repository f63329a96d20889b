"""Prompts of `/infill`: a text with a gap, marked with the model's own tokens as in llama-server.

    [rep]myproject  [sep]file of an extra text, its text ...  [sep]filename  [pre]prefix, prompt  [suf]suffix  [mid]

Without a mark for files, a line separates extra texts. If the text is too long, the prefix and the extra texts lose the tokens
farthest from the gap, and the suffix loses its end. Code is text, so it never becomes a control token.
"""

from __future__ import annotations

from pyspec.errors import NotSupported
from pyspec.server.api.prompts import mixed_ids
from pyspec.server.api.schema import InfillBody
from pyspec.text.tokenizer import Tokenizer

WINDOW = 2048  # tokens around the gap, three quarters of them before it: llama-server's -b
PROJECT, FILE, SNIPPET = "myproject\n", "filename\n", "\n\n--- snippet ---\n\n"


def infill_ids(
    tokenizer: Tokenizer, body: InfillBody, n_ctx: int, n_answer: int, *, suffix_first: bool
) -> list[int]:
    """The prompt's tokens, leaving room in `n_ctx` for `n_answer` tokens (-1: unknown)."""
    fim = tokenizer.fim
    names = (("prefix", fim.pre), ("suffix", fim.suf), ("middle", fim.mid))
    missing = [name for name, mark in names if mark is None]
    if missing or fim.pre is None or fim.suf is None or fim.mid is None:
        raise NotSupported(
            f"Infill is not supported by this model: it has no token for {', '.join(missing)}",
        )
    prompt = _plain(tokenizer, body.prompt)
    before = mixed_ids(tokenizer, body.input_prefix, add_special=False, parse_special=False)
    behind = mixed_ids(tokenizer, body.input_suffix, add_special=False, parse_special=False)
    # of the up to four added tokens, `window // 4 - 2` covers two
    room = max(0, n_ctx - max(0, n_answer) - 2)
    window = min(WINDOW, room)
    before = before[len(before) - min(len(before), 3 * (window // 4)) :]
    behind = behind[: max(0, window // 4 - 2 - len(prompt))]
    parts = [[fim.pre, *before, *prompt], [fim.suf, *behind]]
    first, second = reversed(parts) if suffix_first else parts
    bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    gap = [*bos, *first, *second, fim.mid]
    left = n_ctx - max(min(WINDOW, n_ctx // 2), len(gap)) - 2 * max(0, n_answer)
    extra = _extra(tokenizer, body)
    return extra[len(extra) - max(0, min(len(extra), left)) :] + gap


def _extra(tokenizer: Tokenizer, body: InfillBody) -> list[int]:
    """Extra texts, each after its file's name."""
    fim = tokenizer.fim
    ids = [] if fim.rep is None else [fim.rep, *_plain(tokenizer, PROJECT)]
    for item in body.input_extra or ():
        mark = _plain(tokenizer, f"{item.filename or 'tmp'}\n")
        name = [] if fim.sep is None else [fim.sep, *mark]
        ids += (name or _plain(tokenizer, SNIPPET)) + _plain(tokenizer, item.text)
    return ids if fim.sep is None else [*ids, fim.sep, *_plain(tokenizer, FILE)]


def _plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special=False, parse_special=False)) if text else []
