"""A file's vocabulary, checked: texts, types, special ids, and the bytes of each token."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, count
from math import inf

from pyspec.errors import BadTokenizer
from pyspec.gguf.fields import Fields
from pyspec.ranges import Real, printable, quoted, shown

UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = KINDS = range(7)
MATCHED = (
    UNKNOWN,
    CONTROL,
    USER_DEFINED,
)  # matched in raw text, before any merge, unless they are too long
MOST_NUMBERED = 1 << 20  # tokens of a file without a vocabulary
# the matcher's time and memory grow with their length; real ones have some thirty characters
MATCHED_CHARS = 1024
SPACE = "\u2581"
GEMMA4 = "gemma4"  # a vocabulary that merges as `gpt2` does and writes text as `llama` does
TOOL_RESPONSE, OLD_END = (
    "<|tool_response>",
    "</s>",
)  # with the first one the second is a word like others
DEEPSEEK_BAR = "\uff5c"

# A file names one end id. llama.cpp finds others by their text, and so does this module. Both treat these tokens and those of
# fill-in-the-middle as control tokens, even if the file gives another type.
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
# names of these ids in older files
_OLD_FIM = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}


def _texts(table: str) -> frozenset[str]:
    """The words of a table. In words with BAR, BAR is DeepSeek's wide bar and _ the SentencePiece space."""
    return frozenset(map(_spelt, table.split()))


def _spelt(word: str) -> str:
    return word.replace("_", SPACE).replace("BAR", DEEPSEEK_BAR) if "BAR" in word else word


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


def places(wanted: Collection[object], values: Sequence[object]) -> list[int]:
    """Indices of the values that are wanted. No Python runs for each: vocabularies have 250,000 tokens, and every start reads one."""
    return list(compress(count(), map(frozenset(wanted).__contains__, values)))


def read_tokens(fields: Fields) -> list[str]:
    """Texts by id, all distinct. Empty texts, which files use as padding, get a name, as in llama.cpp."""
    tokens = list(fields.strings("tokenizer.ggml.tokens"))
    if not tokens:
        raise fields.bad("tokenizer.ggml.tokens", "is empty")
    distinct = set(tokens)
    if "" in distinct:
        tokens = [t or f"[EMPTY_{i}]" for i, t in enumerate(tokens)]
        distinct = set(tokens)
    if len(distinct) != len(tokens):
        table = {t: i for i, t in enumerate(tokens)}
        first = next(i for i, t in enumerate(tokens) if table[t] != i)
        text = quoted(tokens[first])
        both = f"tokens {first} and {table[tokens[first]]} of {len(tokens)}"
        raise BadTokenizer(f"{both} are both {text}")
    return tokens


def number_of_tokens(fields: Fields) -> int:
    """The number of tokens of a model whose file has no vocabulary."""
    arch = fields.metadata.get("general.architecture")
    n = fields.metadata.get(f"{arch}.vocab_size")
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MOST_NUMBERED:
        raise BadTokenizer(
            f"the file has no vocabulary, and {printable(str(arch))}.vocab_size is {shown(n)}; "
            f"want 1 to {MOST_NUMBERED}"
        )
    return n


def read_types(fields: Fields, tokens: Sequence[str]) -> list[int]:
    """The type of each token: one of the constants above, UNDEFINED for others. Entries beyond the tokens are not used, as in llama.cpp.

    Tokens with the texts of CONTROL_TEXTS are control tokens.
    """
    name, n = "tokenizer.ggml.token_type", len(tokens)
    kinds = fields.integers(name, n, or_more=True) if name in fields else [NORMAL] * n
    for i in places({*kinds} - {*KINDS}, kinds):
        kinds[i] = UNDEFINED
    for i in places(CONTROL_TEXTS, tokens):
        kinds[i] = CONTROL
    if TOOL_RESPONSE in tokens:
        for i in places((OLD_END,), tokens):
            kinds[i] = NORMAL
    return kinds


def read_scores(fields: Fields, n: int) -> list[float]:
    """The score of each token of an SPM vocabulary, 0 in a file without scores. Entries beyond the tokens are not used, as in llama.cpp."""
    name = "tokenizer.ggml.scores"
    any_size = Real(-inf, inf)  # some are -inf: those join last
    return fields.numbers(name, n, or_more=True, legal=any_size) if name in fields else [0.0] * n


def read_ids(fields: Fields, model: str, n: int) -> dict[str, int | None]:
    """Special ids by name. An id that is absent or outside the vocabulary is None, or SentencePiece's usual id.

    llama.cpp then takes 11 for a `gpt2` vocabulary, a token of GPT-2 itself. No other file means that token, so it is not copied here.
    """
    usual = {"bos": 1, "eos": 2} if model == "llama" and n > 2 else {}
    out: dict[str, int | None] = {}
    fim = ("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep")
    for name in ("bos", "eos", "eot", "eom", *fim):
        value = fields.integer(f"tokenizer.ggml.{name}_token_id", None)
        if value is None and name in _OLD_FIM:
            value = fields.integer(f"tokenizer.ggml.{_OLD_FIM[name]}_token_id", None)
        out[name] = value if value is not None and 0 <= value < n else usual.get(name)
    return out


def read_suppressed(fields: Fields, n: int) -> frozenset[int]:
    """Ids that are never generated. Those outside the vocabulary are left out."""
    name = "tokenizer.ggml.suppress_tokens"
    return frozenset(i for i in fields.integers(name) if 0 <= i < n) if name in fields else frozenset()


def vocabulary_flaws(fields: Fields, model: str, pre: str, n: int, *, has_end: bool) -> list[str]:
    """Sentences about a vocabulary's fields that are not used, and missing ones.

    model, pre  as they are read, defaults included; n: tokens; has_end: some token ends a generation
    """
    flaws = _stray_ids(fields, n)
    if model == "gpt2" and not fields.label("tokenizer.ggml.pre", ""):
        flaws.insert(
            0,
            f"tokenizer.ggml.pre names no pre-tokenizer: {pre!r} is taken, as llama.cpp does; the model may have learnt another",
        )
    if not has_end:
        flaws.append("no token ends a generation: texts end at their limit, and no grammar can be kept")
    return flaws


def _stray_ids(fields: Fields, n: int) -> list[str]:
    """A sentence about each special id outside the vocabulary. Files write -1, also as an unsigned 32-bit number, for no token."""
    names = sorted(name for name in fields.known if name.endswith("_token_id"))
    ids = {name: fields.integer(name, None) for name in names}
    none = (-1, 2**32 - 1)
    return [
        f"{name} is {i}, and the vocabulary has {n} tokens: it is not used"
        for name, i in ids.items()
        if i is not None and i not in none and not 0 <= i < n
    ]


@dataclass(frozen=True)
class FimMarks:
    """Ids of the tokens that mark the parts of a fill-in-the-middle prompt. None: the vocabulary has no such token."""

    pre: int | None = None  # before the text in front of the gap
    suf: int | None = None  # before the text behind it
    mid: int | None = None  # before the text that fills it
    rep: int | None = None  # before a repository's name
    sep: int | None = None  # before a file's name


def fim_marks(tokens: Sequence[str], control: Iterable[int], ids: Mapping[str, int | None]) -> FimMarks:
    """The file's ids, else the first token with a known text. control: of `read_types`, ascending."""
    found = {name: ids.get(f"fim_{name}") for name in FIM_TEXTS}
    for i in control:
        for name, texts in FIM_TEXTS.items():
            if found[name] is None and tokens[i] in texts:
                found[name] = i
    return FimMarks(**found)


def eog_ids(
    tokens: Sequence[str], control: Iterable[int], ids: Mapping[str, int | None]
) -> frozenset[int]:
    """Ids that end generation. `<|end|>` ends only a message if the vocabulary has tokens that end the answer, and so does `<|eom|>` if
    messages have headers.

    control: as of `fim_marks`
    """
    named = {ids.get(k) for k in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")}
    own = {tokens[i]: i for i in control}
    texts = {text: i for text, i in own.items() if text in EOG_TEXTS}
    if {"<|return|>", "<|call|>"} <= texts.keys() or {"<|calls|>", "<|flush|>"} <= texts.keys():
        named.discard(texts.pop("<|end|>", None))  # whatever the file says
    if {"<|start|>", "<|message|>", "<|eot|>"} <= own.keys():
        named.discard(own.get("<|eom|>"))
    return frozenset(i for i in named | set(texts.values()) if i is not None)


def byte_value(text: str) -> int:
    """The value of a byte token, written <0xNN> or as GPT-2's character."""
    if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", text):
        return int(text[3:5], 16)
    if text in CHAR_BYTES:
        return CHAR_BYTES[text]
    raise BadTokenizer(f"byte token {quoted(text)} is not of the form <0xNN>")


def token_bytes(text: str, kind: int, model: str) -> bytes:
    """The bytes of a token in text: control and user-defined tokens give their own text, unused and undefined tokens nothing."""
    if kind in (UNUSED, UNDEFINED):
        return b""
    if kind == BYTE:
        return bytes([byte_value(text)])
    if kind == NORMAL and model in ("llama", GEMMA4):
        text = text.replace(SPACE, " ")
    elif kind == NORMAL:
        try:
            return bytes(map(CHAR_BYTES.__getitem__, text))
        except KeyError:
            pass  # a normal token with characters outside the byte alphabet gives its own text
    return text.encode("utf-8", "surrogateescape")


# -- runs of line ends -----------------------------------------------------------------------------------------------
# Runs of line ends in vocabularies of `gemma4`: one that is a token is that token, whatever its merges give.


class LineEnds:
    """The tokens that are nothing but line ends, without those that are matched in raw text, which need no merges."""

    def __init__(self, table: Mapping[str, int], types: Sequence[int]) -> None:
        self._tokens = {
            len(text): i
            for text, i in table.items()
            if types[i] == NORMAL and text and not text.strip("\n")
        }
        self._lengths = {i: n for n, i in self._tokens.items()}

    def whole(self, ids: list[int]) -> list[int]:
        """Ids of a text, with one token for each run of line ends that is one."""
        if sum(map(self._lengths.__contains__, ids)) < 2:
            return ids
        found: list[int] = []
        run: list[int] = []
        for token in [*ids, None]:
            if token in self._lengths:
                run.append(token)
                continue
            whole = self._tokens.get(sum(self._lengths[i] for i in run)) if len(run) > 1 else None
            found += run if whole is None else [whole]
            run = []
            if token is not None:
                found.append(token)
        return found
