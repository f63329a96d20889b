"""Tokenizer of a GGUF file, run by Hugging Face `tokenizers`. Its ids are those of llama.cpp.

Where a model's own tokenizer.json differs, llama.cpp decides: no Unicode normalisation, and a set of end-of-generation tokens.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice, repeat
from typing import Literal

from tokenizers import AddedToken, Encoding, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HF

from pyspec.errors import BadTokenizer, RequestError
from pyspec.gguf.fields import Fields
from pyspec.gguf.strings import Strings
from pyspec.ranges import quoted, shown
from pyspec.text.pretokenize import DEFAULT, KINDS, LINES, PRE, PreTokenizer
from pyspec.text.rust import border
from pyspec.text.vocab import (
    BYTE,
    CONTROL,
    GEMMA4,
    MATCHED,
    MATCHED_CHARS,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    LineEnds,
    byte_value,
    eog_ids,
    fim_marks,
    number_of_tokens,
    places,
    read_ids,
    read_scores,
    read_suppressed,
    read_tokens,
    read_types,
    token_bytes,
)

PIECE_CHARS = 1 << 16  # characters to tokenise at once
PIECE_TAIL = 1 << 10  # characters at the end of a piece whose words may continue in the next one
SPM_CHARS = 4096  # of a token
# A vocabulary of 256,000 tokens takes 3e7 steps and has joins of 6e6 characters
SPM_STEPS, SPM_JOINED = 1 << 29, 1 << 25
Make = Callable[[bool, bool], HF]
"""(parse_special, space_prefix) -> what encodes."""
Part = tuple[str, bool] | list[int]
"""Of a prompt: text and its `parse_special`, or ids that no text has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabHeader:
    """A vocabulary's general fields (suppressed: ids that are never generated): BPE of bytes ("gpt2") or of characters ("gemma4"), or SPM ("llama"), the pre-tokenizer, and the
    tokens put around a text."""

    model: str
    pre: str
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    suppressed: frozenset[int] = frozenset()


class Tokenizer:
    """Text to ids and back.

    `parse_special`: text of control tokens becomes those tokens. Encode user text without it.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        types: Sequence[int],
        make: Make,
        header: VocabHeader,
        ids: Mapping[str, int | None],
    ) -> None:
        self.model, self.pre = header.model, header.pre
        self.add_bos, self.add_eos = header.add_bos, header.add_eos
        self.add_space_prefix = header.add_space_prefix
        self.n_vocab, self.suppressed = len(tokens), header.suppressed
        self._tokens, self._types, self._make = Strings.of(tokens), bytes(types), make
        self._line_ends = LineEnds(_table(tokens), types) if self.model == GEMMA4 else None
        self.bos_id, self.eos_id = ids.get("bos"), ids.get("eos")
        control = places((CONTROL, UNKNOWN), types)
        self.eog = eog_ids(tokens, control, ids)
        self.fim = fim_marks(tokens, control, ids)
        self.special = frozenset(control)
        self._built: dict[tuple[bool, bool], HF] = {}
        self._known: dict[int, bytes] = {}

    @classmethod
    def from_metadata(
        cls, meta: Mapping[str, object], *, norm: Literal["none", "nfc"] = "none", later: bool = False
    ) -> Tokenizer:
        """Build from `tokenizer.ggml.*`. BadTokenizer names the field that is missing, unknown or inconsistent.

        later  build the part that encodes at the first text, for a process that may get none and whose files another one checks
        """
        made = cls._of(meta, norm)
        if not later:
            made._hf(True, made.add_space_prefix)  # raises now if the file is wrong
        return made

    @classmethod
    def _of(cls, meta: Mapping[str, object], norm: Literal["none", "nfc"]) -> Tokenizer:
        fields = Fields(meta, error=BadTokenizer)
        model = fields.label("tokenizer.ggml.model")
        pre = read_pre(fields, model)
        if model == "none":
            return cls.of_numbers(fields)
        if model not in ("gpt2", "llama", GEMMA4):
            known = "gpt2, llama, gemma4, none"
            raise BadTokenizer(f"tokenizer model {quoted(model)} is unknown; known: {known}")
        if model == "gpt2" and pre not in PRE:
            known = ", ".join(KINDS)
            rest = f"known: {known}, and other names of these"
            raise BadTokenizer(f"pre-tokenizer {quoted(pre)} is unknown; {rest}")
        tokens = read_tokens(fields)
        types = read_types(fields, tokens)
        for i in places((BYTE,), types) if BYTE in types else ():
            byte_value(tokens[i])
        unread = [fields]

        @cache
        def merging() -> tuple[models.BPE, list[tuple[str, int]]]:
            """Built once, because 262,144 tokens take seconds. All variants share it."""
            tokens = read_tokens(unread[0])
            types = read_types(unread[0], tokens)
            table = _table(tokens)
            if model == GEMMA4:
                bpe = _bpe_of_characters(table, types, unread[0])
            else:
                bpe = (
                    _bpe(table, unread[0], PRE[pre])
                    if model == "gpt2"
                    else _spm(table, types, unread[0])
                )
            unread.clear()  # 250,000 merges
            matched = (text for text, i in table.items() if types[i] in MATCHED)
            return bpe, [(t, types[table[t]]) for t in matched if len(t) <= MATCHED_CHARS]

        def make(parse_special: bool, space_prefix: bool) -> HF:
            bpe, matched = merging()
            hf = _byte_level(bpe, PRE[pre]) if model == "gpt2" else _with_spaces(bpe, space_prefix)
            if model == GEMMA4:
                hf.pre_tokenizer = pre_tokenizers.Sequence(LINES.cuts())
            return _with_added(hf, matched, norm, parse_special)

        is_spm = model == "llama"
        header = VocabHeader(
            model=model,
            pre=pre,
            add_bos=adds_bos(fields, model, pre),
            add_eos=fields.flag("tokenizer.ggml.add_eos_token", False),
            add_space_prefix=fields.flag("tokenizer.ggml.add_space_prefix", True) and is_spm,
            suppressed=read_suppressed(fields, len(tokens)),
        )
        return cls(tokens, types, make, header, read_ids(fields, model, len(tokens)))

    @classmethod
    def of_numbers(cls, fields: Fields) -> Tokenizer:
        """For a file that has only the size of its vocabulary: token 7 is written [7]. Other text has no tokens."""
        n = number_of_tokens(fields)
        tokens = [f"[{i}]" for i in range(n)]

        def make(parse_special: bool, space_prefix: bool) -> HF:
            hf = HF(models.WordLevel({f"[{i}]": i for i in range(n)}, unk_token="[0]"))
            hf.pre_tokenizer = pre_tokenizers.Split(Regex(r"\[\d+\]"), "removed", invert=True)
            return hf

        plain = VocabHeader(model="none", pre="", add_bos=False, add_eos=False, add_space_prefix=False)
        return cls(tokens, [NORMAL] * n, make, plain, read_ids(fields, "none", n))

    def _hf(self, parse_special: bool, space_prefix: bool) -> HF:
        """Built on first use, because a large vocabulary takes a quarter of a second."""
        key = (parse_special, space_prefix)
        if key not in self._built:
            with border(BadTokenizer, "the vocabulary can not be used"):
                self._built[key] = self._make(*key)
        return self._built[key]

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of `text`. `add_special` adds the begin and end ids that the file asks for."""
        _check_text(text)
        return self.encode_batch([text], add_special=add_special, parse_special=parse_special)[0]

    def encode_batch(
        self, texts: Sequence[str], *, add_special: bool = True, parse_special: bool = True
    ) -> list[list[int]]:
        """Encode many texts. A single text takes this way, too, because the single call of `tokenizers` holds the interpreter's lock."""
        rows = self._plain(texts, parse_special, self.add_space_prefix)
        return [self._framed(ids) for ids in rows] if add_special else rows

    def encode_inside(self, text: str) -> list[int]:
        """Ids of text that follows other text: without a space before it, and without control tokens."""
        _check_text(text)
        return self._plain([text], False, False)[0]

    def encode_parts(self, parts: Sequence[Part]) -> list[int]:
        """Ids of one text in parts, each with its own `parse_special`. Behind a part of ids a text begins anew. Begin and end ids are added
        once."""
        ids: list[int] = []
        begin = 0  # of the text that a part continues
        for part in parts:
            if isinstance(part, list):
                ids += part
                begin = len(ids)
                continue
            text, parse = part
            if (
                self.add_space_prefix
                and len(ids) > begin
                and self._types[ids[-1]] not in (CONTROL, UNKNOWN, USER_DEFINED)
            ):
                # the text continues up to here, so no space before it
                at = self._first_added(text, parse)
                ids += self._plain([text[:at]], parse, False)[0]
                text = text[at:]
            ids += self._plain([text], parse, self.add_space_prefix)[0]
        return self._framed(ids)

    def _plain(self, texts: Sequence[str], parse_special: bool, space_prefix: bool) -> list[list[int]]:
        clean = [t.encode("utf-8", "replace").decode() for t in texts]
        hf = self._hf(parse_special, space_prefix)
        with border(BadTokenizer, "the text can not be tokenised with this vocabulary"):
            return self._ids(hf, clean)

    def _ids(self, hf: HF, clean: Sequence[str]) -> list[list[int]]:
        rows = self._merged(hf, clean)
        return rows if self._line_ends is None else [self._line_ends.whole(ids) for ids in rows]

    def _merged(self, hf: HF, clean: Sequence[str]) -> list[list[int]]:
        if all(len(t) <= PIECE_CHARS for t in clean) or not self._splits:
            return [e.ids for e in hf.encode_batch_fast(clean, add_special_tokens=False)]
        return [self._in_pieces(hf, t) for t in clean]

    def _in_pieces(self, hf: HF, text: str) -> list[int]:
        """Ids of a long text, piece by piece. All at once would take a kilobyte of memory per token, which is never returned."""
        ids: list[int] = []
        at = 0
        while at < len(text):
            end = _border(text, at + PIECE_CHARS, _WORDS if self.model == "gpt2" else _LINES)
            if end - at > 2 * PIECE_CHARS:  # no border: numbers, signs, a script without spaces
                found, end = _begin_of(hf, text, at)
                ids += found
            else:
                ids += hf.encode_batch_fast([text[at:end]], add_special_tokens=False)[0].ids
            at = end
        return ids

    @cached_property
    def _splits(self) -> bool:
        """True if a long text may be cut between a word and the next space, or between lines: no pre-tokenizer of this family joins
        these, and no token that is matched in raw text contains a space, or a line end and more."""
        kinds = (CONTROL, UNKNOWN, USER_DEFINED)
        matched = [t for t, k in zip(self._tokens, self._types, strict=True) if k in kinds]
        if self.model == GEMMA4:
            return not any("\n" in t and t.strip("\n") for t in matched)
        return self.model == "gpt2" and not any(" " in t for t in matched)

    def _first_added(self, text: str, parse_special: bool) -> int:
        """Start of the first token that is matched in raw text, before any merge."""
        kinds = (CONTROL, UNKNOWN, USER_DEFINED) if parse_special else (USER_DEFINED,)
        found = (text.find(t) for t, k in zip(self._tokens, self._types, strict=True) if k in kinds)
        return min((at for at in found if at >= 0), default=len(text))

    def _framed(self, ids: list[int]) -> list[int]:
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        add_eos = self.add_eos and self.eos_id is not None and ids[-1:] != [self.eos_id]
        return [*ids, self.eos_id] if add_eos and self.eos_id is not None else ids

    def has_special(self, text: str) -> bool:
        """True if `text` contains a control token's text. 25 ms per million characters, for any text."""
        clean = text.encode("utf-8", "replace").decode()
        return bool(self._finder.encode_batch_fast([clean], add_special_tokens=False)[0].ids)

    def special_spans(self, text: str) -> list[tuple[int, int]]:
        """Spans of control tokens' texts in `text`, and at its ends parts of them with two characters or more."""
        if not text:
            return []
        clean = text.encode("utf-8", "replace").decode()
        spans = list(self._finder.encode_batch([clean], add_special_tokens=False)[0].offsets)
        heads, tails = self._halves
        if not spans and not self.borders_special(text):
            return []
        longest = max(map(len, heads), default=0)
        first, last = spans[0][0] if spans else len(text), spans[-1][1] if spans else 0
        lengths = range(min(longest, first), 1, -1)
        front = next((n for n in lengths if _begins(tails, text[n - 1 :: -1])), 0)
        behind = min(longest, len(text) - max(last, front))
        back = next((n for n in range(behind, 1, -1) if _begins(heads, text[-n:])), 0)
        if front:
            spans.insert(0, (0, front))
        return [*spans, (len(text) - back, len(text))] if back else spans

    def borders_special(self, text: str) -> bool:
        """True if `text` could be one part of a control token's text, next to the other part."""
        text, (heads, tails) = text.strip(), self._halves
        longest = min(max(map(len, heads), default=0), len(text))
        # Of any two parts, at least one has two characters or more
        lengths = range(2, longest + 1)
        return any(_begins(heads, text[-n:]) or _begins(tails, text[n - 1 :: -1]) for n in lengths)

    @cached_property
    def _halves(self) -> tuple[list[str], list[str]]:
        """The texts of control tokens, and their reversed texts; both sorted."""
        texts = [self._tokens[i] for i in self.special]
        return sorted(texts), sorted(t[::-1] for t in texts)

    @cached_property
    def _finder(self) -> HF:
        """A tokenizer that knows only the control tokens: other text gives no ids."""
        with border(BadTokenizer, "the vocabulary's control tokens can not be used"):
            hf = HF(models.BPE(vocab={}, merges=[]))
            hf.add_tokens(
                [
                    AddedToken(_clean(self._tokens[i], i), special=True, normalized=False)
                    for i in self.special
                ]
            )
            return hf

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token; of a control token its text, of a padding row of the embedding none."""
        found = self._known.get(token)
        if found is None:
            if not 0 <= token < self.n_vocab:
                return b""
            found = self._known[token] = token_bytes(self._tokens[token], self._types[token], self.model)
        return found

    def bytes_of_first(self, n: int) -> Iterator[bytes]:
        """`token_bytes` of ids 0 to n - 1, of which none is kept."""
        pairs = islice(zip(self._tokens, self._types, strict=True), n)
        yield from (token_bytes(token, kind, self.model) for token, kind in pairs)
        yield from repeat(b"", n - self.n_vocab)

    def piece(self, token: int) -> str:
        """The text of one token, with U+FFFD for bytes that are not UTF-8 on their own."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of ids, with control tokens only if `special`. Raises RequestError for values that are not ids."""
        try:
            raw = b"".join([self.token_bytes(i) for i in ids if special or i not in self.special])
        except (TypeError, ValueError, IndexError):
            raise RequestError(f"tokens is {shown(ids)}; want token ids") from None
        text = raw.decode("utf-8", "replace")
        return text[1:] if self.add_space_prefix and text.startswith(" ") else text


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise RequestError(f"text is {shown(text)}; want text")


_WORDS, _LINES = re.compile("(?<=[a-z]) (?=[a-z])"), re.compile("(?<=\n)(?=[^\n])")


def _border(text: str, at: int, between: re.Pattern[str]) -> int:
    """The first place from `at` on between two words, at the space of the second, or between two lines; the text's end if there is none."""
    found = between.search(text, at) if at < len(text) else None
    return len(text) if found is None else found.start()


def _begin_of(hf: HF, text: str, at: int) -> tuple[list[int], int]:
    """Ids of a part of the text from `at` on, and the part's end, between two words of the pre-tokenizer. It reads from left to right
    without looking back, so the rest has the same ids on its own. A longer word is taken as a whole."""
    size = PIECE_CHARS
    while at + size < len(text):
        piece = hf.encode_batch([text[at : at + size]], add_special_tokens=False)[0]
        n = _last_word(piece, size - PIECE_TAIL)  # a word at the end of the piece may continue behind it
        if n > 0:
            return piece.ids[:n], at + _begin(piece, n)
        size *= 16
    return hf.encode_batch_fast([text[at:]], add_special_tokens=False)[0].ids, len(text)


def _last_word(piece: Encoding, most: int) -> int:
    """The first token of the last word that begins within `most` characters; 0 if there is none. Few tokens are looked at, because
    lists of a million places are made and freed while no other thread runs."""
    n = bisect_right(range(len(piece)), most, key=lambda i: _begin(piece, i))
    word = piece.token_to_word(n - 1) if n else None
    return 0 if word is None else (piece.word_to_tokens(word) or (0, 0))[0]


def _begin(piece: Encoding, token: int) -> int:
    """The place in the text at which a token begins."""
    return (piece.token_to_chars(token) or (0, 0))[0]


def _begins(texts: Sequence[str], start: str) -> bool:
    """True if one of the sorted, distinct texts starts with `start` and is longer."""
    at = bisect_left(texts, start)  # texts with this start follow here, an equal text first
    return any(t.startswith(start) and len(t) > len(start) for t in texts[at : at + 2])


def _clean(text: str, token: int) -> str:
    """The text, or a placeholder if it is not valid UTF-8 (has lone surrogates): such a token never comes from text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return f"[INVALID_{token}]"
    return text


def read_pre(fields: Fields, model: str) -> str:
    """The name of the pre-tokenizer, which only `gpt2` vocabularies have."""
    return (fields.label("tokenizer.ggml.pre", "") or DEFAULT) if model == "gpt2" else ""


def adds_bos(fields: Fields, model: str, pre: str) -> bool:
    """Whether texts begin with the begin-of-text token."""
    if model == GEMMA4:
        return True  # whatever the file says
    known = PRE.get(pre) if model == "gpt2" else None
    return fields.flag("tokenizer.ggml.add_bos_token", model == "llama" or bool(known and known.add_bos))


def _table(tokens: Sequence[str]) -> dict[str, int]:
    return {_clean(t, i): i for i, t in enumerate(tokens)}


def _merges(fields: Fields, table: Mapping[str, int]) -> list[tuple[str, str]]:
    """Merges by rank. A merge that has no two parts, or whose parts or result are not tokens, can never give an id and is left out."""
    merges = []
    for line in fields.strings("tokenizer.ggml.merges"):
        at = line.find(" ", 1)  # the first part may begin with a space
        left, right = line[: max(at, 0)], line[at + 1 :]
        if left in table and right in table and left + right in table:
            merges.append((left, right))
    return merges


def _bpe(table: dict[str, int], fields: Fields, pre: PreTokenizer) -> models.BPE:
    merges = _merges(fields, table)
    return models.BPE(vocab=table, merges=merges, ignore_merges=pre.ignore_merges, fuse_unk=False)


def _bpe_of_characters(table: dict[str, int], types: Sequence[int], fields: Fields) -> models.BPE:
    """Characters that are no tokens are their bytes."""
    unk = next((t for t, i in table.items() if types[i] == UNKNOWN), None)
    return models.BPE(
        vocab=table, merges=_merges(fields, table), unk_token=unk, fuse_unk=False, byte_fallback=True
    )


def _byte_level(model: models.BPE, pre: PreTokenizer) -> HF:
    hf = HF(model)
    hf.pre_tokenizer = pre_tokenizers.Sequence(
        [*pre.cuts(), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    hf.decoder = decoders.ByteLevel()
    return hf


def _joins(
    table: Mapping[str, int], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Pairs of tokens whose join is a token, the join with the best score first.

    The search takes steps by the square of a token's length, and a vocabulary of "a", "aa", "aaa" and so on has as many pairs as
    steps, each with two texts. Both have a limit, far above real vocabularies.
    """
    joins: list[tuple[str, str]] = []
    n_step = n_char = 0
    names = [text for text, i in table.items() if types[i] in (NORMAL, USER_DEFINED, UNUSED)]
    names.sort(key=lambda text: -scores[table[text]])
    for text in names:
        i = table[text]
        if len(text) > SPM_CHARS and types[i] == NORMAL:
            most = f"at most {SPM_CHARS} are supported"
            raise BadTokenizer(f"SPM token {i} has {len(text)} characters; {most}")
        n_step += min(len(text), SPM_CHARS) ** 2
        for cut in range(1, min(len(text), SPM_CHARS)):
            if (left := text[:cut]) in table and (right := text[cut:]) in table:
                joins.append((left, right))
                n_char += len(text)
        if n_step > SPM_STEPS or n_char > SPM_JOINED:
            raise BadTokenizer(
                "the SPM vocabulary has too many long tokens that are joins of others: "
                f"more than {len(joins)} joins up to token {i}"
            )
    return joins


def _spm(table: dict[str, int], types: Sequence[int], fields: Fields) -> models.BPE:
    """SentencePiece as BPE: of all neighbours whose join is a token, the join with the best score merges first.

    Needs every character of a longer token to be a token, which SentencePiece guarantees.
    """
    merges = _joins(table, types, read_scores(fields, len(table)))
    unk = next((t for t, i in table.items() if types[i] == UNKNOWN), None)
    return models.BPE(vocab=table, merges=merges, unk_token=unk, fuse_unk=False, byte_fallback=True)


def _with_spaces(model: models.BPE, space_prefix: bool) -> HF:
    hf = HF(model)
    prefix: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE)] if space_prefix else []
    hf.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    return hf


def _with_added(hf: HF, matched: Sequence[tuple[str, int]], norm: str, parse_special: bool) -> HF:
    """Add the tokens that are matched in raw text before any merge (texts and types); control tokens only with `parse_special`."""
    if norm == "nfc":
        own = hf.normalizer
        rest = [own] if own is not None else []
        hf.normalizer = normalizers.Sequence([normalizers.NFC(), *rest])
    wanted = {USER_DEFINED: False} | ({CONTROL: True, UNKNOWN: True} if parse_special else {})
    found = [(text, wanted[kind]) for text, kind in matched if kind in wanted]
    hf.add_tokens([AddedToken(t, special=special, normalized=False) for t, special in found])
    return hf
