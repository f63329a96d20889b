"""A file's vocabulary as read and checked: texts, types, special ids, and the bytes each token stands for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspec.errors import BadTokenizer
from pyspec.gguf.fields import Fields
from pyspec.ranges import printable, quoted, shown

UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(7)
MATCHED = (UNKNOWN, CONTROL, USER_DEFINED)  # found in the text as they are, before anything is merged
MOST_NUMBERED = 1 << 20  # tokens of a file without a vocabulary
MATCHED_CHARS = 1024  # what looks for them takes time and memory by their length; real ones have some thirty
SPACE = "\u2581"
DEEPSEEK_BAR = "\uff5c"

# A file names one end id; llama.cpp finds the others by their text, and so do we. It also makes control tokens of them,
# and of the fill-in-the-middle tokens, whatever type the file gives.
_EOG = """<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|>
<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <BARend_of_sentenceBAR> [e~[
<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>"""
_FIM = {
    "pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <PRE> <|code_prefix|> <BARfim_beginBAR>",
    "suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <SUF> <|code_suffix|> <BARfim_holeBAR>",
    "mid": "<|fim_middle|> <fim-middle> <fim_middle> <MID> <|code_middle|> <BARfim_endBAR>",
    "rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "sep": "<|file_sep|>",
}
_OLD_FIM = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}  # older files call the ids so


def _texts(table: str) -> frozenset[str]:
    """The words of a table; in DeepSeek's, BAR is its wide bar and _ the SentencePiece space."""
    spelt = [w.replace("_", SPACE).replace("BAR", DEEPSEEK_BAR) if "BAR" in w else w for w in table.split()]
    return frozenset(spelt)


EOG_TEXTS = _texts(_EOG)
FIM_TEXTS = {name: _texts(table) for name, table in _FIM.items()}
for _name, _text in (("pre", "<PRE>"), ("suf", "<SUF>"), ("mid", "<MID>")):
    FIM_TEXTS[_name] |= {SPACE + _text}
CONTROL_TEXTS = EOG_TEXTS.union(*FIM_TEXTS.values())


def byte_chars() -> dict[int, str]:
    """GPT-2's printable character for every byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(rest)}


BYTE_CHARS = byte_chars()
CHAR_BYTES = {c: b for b, c in BYTE_CHARS.items()}


def read_tokens(fields: Fields) -> list[str]:
    """Texts by id, all different. Empty ones get a name, as in llama.cpp: files pad with them."""
    tokens = [t or f"[EMPTY_{i}]" for i, t in enumerate(fields.strings("tokenizer.ggml.tokens"))]
    if not tokens:
        raise fields.bad("tokenizer.ggml.tokens", "is empty")
    if len(set(tokens)) != len(tokens):
        table = {t: i for i, t in enumerate(tokens)}
        first = next(i for i, t in enumerate(tokens) if table[t] != i)
        text = quoted(tokens[first])
        raise BadTokenizer(f"tokens {first} and {table[tokens[first]]} of {len(tokens)} are both {text}")
    return tokens


def number_of_tokens(fields: Fields) -> int:
    """Of a model whose file has no vocabulary."""
    arch = fields.metadata.get("general.architecture")
    n = fields.metadata.get(f"{arch}.vocab_size")
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MOST_NUMBERED:
        raise BadTokenizer(
            f"the file has no vocabulary, and {printable(str(arch))}.vocab_size is {shown(n)}; want 1 to {MOST_NUMBERED}"
        )
    return n


def read_types(fields: Fields, tokens: Sequence[str]) -> list[int]:
    """One of the constants above per token."""
    name, n = "tokenizer.ggml.token_type", len(tokens)
    kinds = fields.integers(name, n) if name in fields else [NORMAL] * n
    for i, text in enumerate(tokens):
        if text in CONTROL_TEXTS:
            kinds[i] = CONTROL
        if kinds[i] in MATCHED and len(text) > MATCHED_CHARS:
            raise BadTokenizer(
                f"token {i} is matched in the text as it is and has {len(text)} characters; at most {MATCHED_CHARS} are supported"
            )
    return kinds


def read_scores(fields: Fields, n: int) -> list[float]:
    """One per token; an SPM vocabulary has them."""
    return fields.numbers("tokenizer.ggml.scores", n)


def read_ids(fields: Fields, model: str, n: int) -> dict[str, int | None]:
    """Special ids by name. One that is absent or outside the vocabulary is None, or SentencePiece's usual one.

    For `gpt2` llama.cpp takes 11 then, a token of GPT-2's own vocabulary; no other file means that, so we do not.
    """
    usual = {"bos": 1, "eos": 2} if model == "llama" and n > 2 else {}
    out: dict[str, int | None] = {}
    for name in ("bos", "eos", "eot", "eom", "fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep"):
        value = fields.integer(f"tokenizer.ggml.{name}_token_id", None)
        if value is None and name in _OLD_FIM:
            value = fields.integer(f"tokenizer.ggml.{_OLD_FIM[name]}_token_id", None)
        out[name] = value if value is not None and 0 <= value < n else usual.get(name)
    return out


def stray_ids(fields: Fields, n: int) -> list[str]:
    """A sentence about each special id that no token of the vocabulary has. -1, in 32 bits without a sign, too, is how files say none."""
    names = sorted(name for name in fields.known if name.endswith("_token_id"))
    ids = {name: fields.integer(name, None) for name in names}
    strays = {name: i for name, i in ids.items() if i is not None and not 0 <= i < n and i not in (-1, 2**32 - 1)}
    return [f"{name} is {i}, and the vocabulary has {n} tokens: it is not used" for name, i in strays.items()]


@dataclass(frozen=True)
class FimMarks:
    """Ids of the tokens that say where a text to be filled in has its parts. None: the vocabulary has no such token."""

    pre: int | None = None  # before what stands in front of the gap
    suf: int | None = None  # before what stands behind it
    mid: int | None = None  # before what fills it
    rep: int | None = None  # before a repository's name
    sep: int | None = None  # before a file's name


def fim_marks(tokens: Sequence[str], ids: Mapping[str, int | None]) -> FimMarks:
    """As the file says, else the first token with a text that is known for it."""
    found = {name: ids.get(f"fim_{name}") for name in FIM_TEXTS}
    for i, text in enumerate(tokens):
        if text in CONTROL_TEXTS:
            for name, texts in FIM_TEXTS.items():
                if found[name] is None and text in texts:
                    found[name] = i
    return FimMarks(**found)


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
    raise BadTokenizer(f"byte token {quoted(text)} is not of the form <0xNN>")


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
