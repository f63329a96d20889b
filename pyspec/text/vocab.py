"""A file's vocabulary as read and checked: texts, types, special ids, and the bytes each token stands for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pyspec.errors import BadTokenizer

UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(7)
SPACE = "\u2581"
DEEPSEEK_BAR = "\uff5c"

# A file names one end id; llama.cpp finds the others by their text, and so do we. It also makes control tokens of them,
# and of the fill-in-the-middle tokens, whatever type the file gives.
_EOG = """<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|>
<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <BARend_of_sentenceBAR> [e~[
<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>"""
_FIM = """<|fim_prefix|> <fim-prefix> <fim_prefix> <PRE> <|code_prefix|> <BARfim_beginBAR> <|fim_suffix|> <fim-suffix>
<fim_suffix> <SUF> <|code_suffix|> <BARfim_holeBAR> <|fim_middle|> <fim-middle> <fim_middle> <MID> <|code_middle|>
<BARfim_endBAR>"""


def _texts(table: str) -> frozenset[str]:
    """The words of a table; in DeepSeek's, BAR is its wide bar and _ the SentencePiece space."""
    spelt = [w.replace("_", SPACE).replace("BAR", DEEPSEEK_BAR) if "BAR" in w else w for w in table.split()]
    return frozenset(spelt)


EOG_TEXTS = _texts(_EOG)
CONTROL_TEXTS = EOG_TEXTS | _texts(_FIM) | {SPACE + "<PRE>", SPACE + "<SUF>", SPACE + "<MID>"}


def byte_chars() -> dict[int, str]:
    """GPT-2's printable character for every byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(rest)}


BYTE_CHARS = byte_chars()
CHAR_BYTES = {c: b for b, c in BYTE_CHARS.items()}


def read_strings(meta: Mapping[str, object], key: str) -> list[str]:
    value = meta.get(key)
    if not isinstance(value, list) or not all(type(x) is str for x in value):
        raise BadTokenizer(f"the file has no list of strings '{key}'")
    return value


def read_tokens(meta: Mapping[str, object]) -> list[str]:
    """Texts by id, all different. Empty ones get a name, as in llama.cpp: files pad with them."""
    tokens = [t or f"[EMPTY_{i}]" for i, t in enumerate(read_strings(meta, "tokenizer.ggml.tokens"))]
    if len(set(tokens)) != len(tokens):
        table = {t: i for i, t in enumerate(tokens)}
        first = next(i for i, t in enumerate(tokens) if table[t] != i)
        text = ascii(tokens[first])[:80]
        raise BadTokenizer(f"tokens {first} and {table[tokens[first]]} of {len(tokens)} are both {text}")
    return tokens


def read_types(meta: Mapping[str, object], tokens: Sequence[str]) -> list[int]:
    """One of the constants above per token."""
    n = len(tokens)
    types = _numbers(meta, "token_type", n, "token types")
    if types is None:
        types = [NORMAL] * n
    kinds = [int(x) for x in types]
    if wrong := sorted(set(kinds) - set(range(7))):
        raise BadTokenizer(f"token type {wrong[0]} of token {kinds.index(wrong[0])} is unknown; known: 0..6")
    for i, text in enumerate(tokens):
        if text in CONTROL_TEXTS:
            kinds[i] = CONTROL
    return kinds


def read_scores(meta: Mapping[str, object], n: int) -> list[float]:
    scores = _numbers(meta, "scores", n, "scores")
    if scores is None:
        raise BadTokenizer(f"an SPM vocabulary needs a score for each of its {n} tokens; the file has none")
    return [float(x) for x in scores]


def _numbers(meta: Mapping[str, object], key: str, n: int, what: str) -> Sequence[float] | None:
    value = meta.get(f"tokenizer.ggml.{key}")
    if value is None:
        return None
    try:
        numbers = [float(x) for x in value]  # type: ignore[attr-defined]
    except (TypeError, ValueError) as e:
        raise BadTokenizer(f"'tokenizer.ggml.{key}' is no list of numbers") from e
    if len(numbers) != n:
        raise BadTokenizer(f"{len(numbers)} {what} for {n} tokens")
    return numbers


def read_ids(meta: Mapping[str, object], model: str, n: int) -> dict[str, int | None]:
    """Special ids by name. One that is absent or outside the vocabulary is None, or SentencePiece's usual one.

    For `gpt2` llama.cpp takes 11 then, a token of GPT-2's own vocabulary; no other file means that, so we do not.
    """
    usual = {"bos": 1, "eos": 2} if model == "llama" and n > 2 else {}
    names = ("bos", "eos", "eot", "eom", "padding", "mask", "fim_pad", "fim_rep", "fim_sep")
    out: dict[str, int | None] = {}
    for name in names:
        value = meta.get(f"tokenizer.ggml.{name}_token_id")
        good = isinstance(value, int) and 0 <= value < n
        out[name] = int(value) if good else usual.get(name)  # type: ignore[call-overload]
    return out


def eog_ids(tokens: Sequence[str], ids: Mapping[str, int | None]) -> frozenset[int]:
    """Ids that end generation. `<|end|>` only ends a message, not the turn, where a vocabulary has finer ends."""
    named = {ids.get(k) for k in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")}
    texts = {t: i for i, t in enumerate(tokens) if t in EOG_TEXTS}
    if {"<|return|>", "<|call|>"} <= texts.keys() or {"<|calls|>", "<|flush|>"} <= texts.keys():
        texts.pop("<|end|>", None)
    return frozenset(i for i in named | set(texts.values()) if i is not None)


def byte_value(text: str) -> int:
    """The value of a byte token, written <0xNN>."""
    if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", text):
        return int(text[3:5], 16)
    if text in CHAR_BYTES:
        return CHAR_BYTES[text]
    raise BadTokenizer(f"byte token {ascii(text)[:80]} is not of the form <0xNN>")


def token_bytes(text: str, kind: int, model: str) -> bytes:
    """What a token stands for in text; control and user-defined tokens stand for themselves, fillers for nothing."""
    if kind == UNUSED:
        return b""
    if kind == BYTE:
        return bytes([byte_value(text)])
    if kind == NORMAL and model == "llama":
        text = text.replace(SPACE, " ")
    elif kind == NORMAL:
        try:
            return bytes(map(CHAR_BYTES.__getitem__, text))
        except KeyError:
            pass  # a normal token that is not in the byte alphabet stands for itself
    return text.encode("utf-8", "surrogateescape")
