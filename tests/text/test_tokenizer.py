"""Ids and texts: ids equal llama.cpp's, and the ids of a text decode to it."""

import json
import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_vocab import SPM, SPM_FILES, bpe, spm, texts

import pyspec
from pyspec.gguf import open_gguf
from pyspec.text import tokenizer as tokenizer_module
from pyspec.text.tokenizer import Tokenizer
from pyspec.text.vocab import (
    BYTE_CHARS,
    CONTROL,
    CONTROL_TEXTS,
    EOG_TEXTS,
    NORMAL,
    USER_DEFINED,
    FimMarks,
)

FIXTURES = Path(__file__).parents[1] / "fixtures"
FILES = {name: FIXTURES / f"{name}.gguf" for name in ("llama", "qwen3", "qwen35")}
FILES["demo"] = Path(pyspec.__file__).parent / "demo" / "pyspec-demo.gguf"


@pytest.mark.parametrize("name", FILES)
def test_ids_of_files_are_llama_cpp_s(name):
    tokenizer = Tokenizer.from_metadata(open_gguf(FILES[name]).metadata)
    for case in json.loads((FIXTURES / "tokens.json").read_text()):
        ids = tokenizer.encode(case["text"], add_special=False)
        assert ids == case[name]
        assert tokenizer.decode(ids, special=True) == case["text"]


@pytest.mark.parametrize("case", SPM["cases"], ids=lambda c: f"{c['file']}-{c['text']!a}")
def test_sentencepiece_ids_are_llama_cpp_s(case):
    tokenizer = Tokenizer.from_metadata(spm(case["file"]))
    assert tokenizer.encode(case["text"], add_special=False) == case["parsed"]
    assert tokenizer.encode(case["text"], add_special=False, parse_special=False) == case["plain"]
    assert tokenizer.encode(case["text"]) == case["framed"]
    assert sorted(tokenizer.eog) == SPM["eog"]


def test_sentencepiece_files_without_special_ids_have_the_usual_ones():
    tokenizer = Tokenizer.from_metadata(spm())
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)


FRAMED = {"bos_token_id": 256, "eos_token_id": 257}


def framed(pre="qwen2", **keys) -> Tokenizer:
    return Tokenizer.from_metadata(bpe(pre, control=["<B>", "<E>"], keys=FRAMED | keys))


def test_begin_and_end_ids_follow_the_file_or_the_pre_tokenizer():
    assert framed().encode("a") == [97]
    assert framed("llama-bpe").encode("a") == [256, 97]
    assert framed("llama-bpe", add_bos_token=False).encode("a") == [97]
    assert framed(add_bos_token=True, add_eos_token=True).encode("a") == [256, 97, 257]
    assert framed(add_bos_token=True, add_eos_token=True).encode("a", add_special=False) == [97]
    assert framed(add_bos_token=True).encode("") == [256]


def test_a_text_that_begins_with_bos_gets_no_second_one():
    assert framed(add_bos_token=True).encode("<B>a") == [256, 97]


@pytest.mark.parametrize("bad", [-1, 258, 2**32 - 1, None])
def test_special_ids_outside_the_vocabulary_are_ignored(bad):
    tokenizer = framed(add_bos_token=True, bos_token_id=bad, eos_token_id=bad)
    assert tokenizer.bos_id is None and tokenizer.eos_id is None and not tokenizer.eog
    assert tokenizer.encode("a") == [97]


def test_control_text_is_a_token_only_when_parsed_and_user_defined_text_always():
    tokenizer = Tokenizer.from_metadata(bpe(control=["<|im_start|>"], user=["<think>"]))
    assert tokenizer.encode("<|im_start|><think>") == [256, 257]
    plain = tokenizer.encode("<|im_start|><think>", parse_special=False)
    assert texts(tokenizer, plain) == [*"<|im_start|>", "<think>"]


def test_the_longest_of_overlapping_tokens_wins():
    tokenizer = Tokenizer.from_metadata(bpe(control=["<|a", "<|a|>"]))
    assert tokenizer.encode("<|a|><|a") == [257, 256]


def test_end_of_generation_is_known_by_id_and_by_text():
    keys = {"eos_token_id": 0, "eot_token_id": 1, "fim_pad_token_id": 2}
    tokenizer = Tokenizer.from_metadata(
        bpe(control=["<|im_end|>", "<|im_start|>", "<|endoftext|>"], keys=keys)
    )
    assert tokenizer.eog == {0, 1, 2, 256, 258}


@pytest.mark.parametrize(
    ("ends", "goes_on"),
    [
        (["<|end|>", "<|return|>"], []),
        (["<|return|>", "<|call|>"], ["<|end|>"]),
        (["<|calls|>", "<|flush|>"], ["<|end|>"]),
    ],
)
def test_end_of_a_message_is_no_end_where_a_vocabulary_has_finer_ends(ends, goes_on):
    tokenizer = Tokenizer.from_metadata(bpe(control=[*ends, *goes_on]))
    assert tokenizer.eog == set(range(256, 256 + len(ends)))


@pytest.mark.parametrize(("more", "is_end"), [([], True), (["<|start|>", "<|message|>"], False)])
def test_the_end_of_a_message_ends_no_answer_of_messages_with_headers(more, is_end):
    """Llama 4 ends an answer with it, Muse goes on."""
    keys = {"eot_token_id": 256, "eom_token_id": 257}
    tokenizer = Tokenizer.from_metadata(bpe(control=["<|eot|>", "<|eom|>", *more], keys=keys))
    assert tokenizer.eog == ({256, 257} if is_end else {256})


@pytest.mark.parametrize("kind", [NORMAL, USER_DEFINED, CONTROL])
def test_end_texts_are_control_tokens_with_any_type_in_the_file(kind):
    """As in llama.cpp, these texts become control tokens: answers hide them, and user text never becomes them."""
    meta = bpe(control=["</s>", "<|fim_middle|>"])
    meta["tokenizer.ggml.token_type"] = [NORMAL] * 256 + [kind, kind]
    tokenizer = Tokenizer.from_metadata(meta)
    assert tokenizer.special == {256, 257} and tokenizer.eog == {256}
    assert tokenizer.encode("</s>") == [256] and tokenizer.encode("</s>", parse_special=False) != [256]


def test_the_tables_hold_deepseek_s_spelling():
    assert "<\uff5cend\u2581of\u2581sentence\uff5c>" in EOG_TEXTS
    assert "<\uff5cfim\u2581hole\uff5c>" in CONTROL_TEXTS
    assert not any("BAR" in text for text in CONTROL_TEXTS)


DEMO = Tokenizer.from_metadata(open_gguf(FILES["demo"]).metadata)
PIECES = Tokenizer.from_metadata(spm())


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])), st.booleans())
def test_decoding_gives_the_text_back(text, parse):
    assert DEMO.decode(DEMO.encode(text, parse_special=parse), special=True) == text
    # "\u2581" is SentencePiece's space, so it can not come back as itself
    assert PIECES.decode(PIECES.encode(text, add_special=False, parse_special=False)) == text.replace(
        "\u2581", " "
    )


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters() | st.characters(categories=["Cs"])))
def test_half_surrogates_do_no_harm(text):
    assert "\ud800" not in DEMO.decode(DEMO.encode(text))
    assert DEMO.has_special(text) in (True, False)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["the ", " hello", "<s>", "<think>", "th", "is", "[INST]"]), st.booleans()
        )
    )
)
def test_parts_are_encoded_as_one_text_cut_at_matched_tokens(parts):
    ids = PIECES.encode_parts(parts)
    shown = "".join(text for text, _ in parts).replace(" ", "")
    got = PIECES.decode(ids, special=True).replace(" ", "")
    assert ids[0] == PIECES.bos_id and got in (shown, "<s>" + shown)
    controls = sum(i in PIECES.special for i in ids[1:])
    assert controls <= sum(text in ("<s>", "[INST]") and parse for text, parse in parts)


def test_a_part_in_the_middle_of_a_text_gets_no_space_before_it():
    parts = [("[INST] hello", True), (" world<s>", False), (" hello[INST]the", True)]
    ids = PIECES.encode_parts(parts)
    joined = "".join(PIECES.piece(i) for i in ids)
    assert joined == "<s>[INST]  hello world<s> hello[INST] the"
    assert ids.count(1) == 1


def test_ids_outside_the_vocabulary_have_no_text():
    """An embedding may have more rows than the vocabulary has tokens."""
    assert DEMO.token_bytes(DEMO.n_vocab) == b"" == DEMO.token_bytes(-1)
    assert DEMO.decode([DEMO.n_vocab + 5]) == ""


def test_byte_tokens_make_characters_together():
    ids = PIECES.encode("\U0001f642", add_special=False)
    assert [PIECES.token_bytes(i) for i in ids[1:]] == [b"\xf0", b"\x9f", b"\x99", b"\x82"]
    assert PIECES.piece(ids[1]) == "\ufffd" and PIECES.decode(ids) == "\U0001f642"


def test_control_tokens_show_only_on_request():
    ids = DEMO.encode("<|im_start|>user")
    assert DEMO.decode(ids) == "user" and DEMO.decode(ids, special=True) == "<|im_start|>user"


def test_a_tokenizer_with_nfc_gives_composed_and_apart_letters_the_same_ids():
    composed, apart = "\u00e9", "e\u0301"
    meta = bpe()
    assert Tokenizer.from_metadata(meta).encode(apart) != Tokenizer.from_metadata(meta).encode(composed)
    assert Tokenizer.from_metadata(meta, norm="nfc").encode(apart) == Tokenizer.from_metadata(
        meta
    ).encode(composed)


def test_tokens_that_are_no_utf8_keep_their_bytes():
    meta = bpe(user=["\udcff\udcfe"])
    tokenizer = Tokenizer.from_metadata(meta)
    assert tokenizer.token_bytes(256) == b"\xff\xfe" and tokenizer.encode("ab") == [97, 98]


def test_empty_tokens_are_padding_that_no_text_becomes():
    tokenizer = Tokenizer.from_metadata(bpe(control=["<B>"], user=["", ""]))
    assert tokenizer.n_vocab == 259 and tokenizer.encode("a") == [97]


def test_control_text_is_found_fast_in_any_text():
    """Linear time with a thousand control tokens and the worst text for comparing them one by one."""
    names = [f"<|reserved_special_token_{i}|>" for i in range(1000)]
    tokenizer = Tokenizer.from_metadata(bpe(control=names))
    tokenizer.has_special("")
    began = time.process_time()
    assert not tokenizer.has_special("<" * 1_000_000)
    assert time.process_time() - began < 1.0  # comparing takes 3.5 s
    assert tokenizer.has_special("x" * 1000 + names[7] + "y")


def large() -> dict[str, object]:
    """152k tokens and as many merges: words over the printable byte characters, each by a merge of two."""
    letters = list(BYTE_CHARS.values())
    pairs = [a + b for a in letters for b in letters]
    triples = [p + c for p, c in zip(pairs * 2, letters[:1] * 65536 + letters[1:2] * 65536, strict=True)]
    words = (pairs + triples)[: 151_936 - 300]
    words = list(dict.fromkeys(words))
    control = [f"<|c{i}|>" for i in range(44)]
    return bpe(control=control) | {
        "tokenizer.ggml.tokens": letters + words + control,
        "tokenizer.ggml.token_type": [NORMAL] * (256 + len(words)) + [CONTROL] * 44,
        "tokenizer.ggml.merges": [f"{w[:-1]} {w[-1]}" for w in words],
    }


@pytest.mark.slow
def test_a_vocabulary_of_152_thousand_tokens_builds_at_once():
    meta, best = large(), 9.0
    for _ in range(3):
        began = time.process_time()
        tokenizer = Tokenizer.from_metadata(meta)
        best = min(best, time.process_time() - began)
    assert tokenizer.n_vocab > 150_000 and best < 1.2  # 0.4 s alone on a quiet core


@pytest.mark.parametrize("meta", [spm(), bpe("qwen2")], ids=["spm", "bpe"])
def test_variants_of_a_vocabulary_share_its_merges(meta, monkeypatch):
    """Finding them takes seconds for 262,144 tokens, and a server encodes with control tokens and without."""
    built = []
    bpe_model = tokenizer_module.models.BPE
    counting = SimpleNamespace(BPE=lambda **parts: built.append(1) or bpe_model(**parts))
    monkeypatch.setattr(tokenizer_module, "models", counting)
    variants = Tokenizer.from_metadata(meta)
    for parse in (True, False):
        variants.encode("a text", parse_special=parse)
    variants.encode_inside("a text")
    assert len(built) == 1


def test_every_spm_setting_is_covered():
    assert {case["file"] for case in SPM["cases"]} == set(SPM_FILES)


LONG = (
    "0123456789",
    "12 345,6\n",
    "...!?=={}",
    "\u65e5\u672c\u8a9e",
    "\u00e9\u0301a's",
    "\t \n  x",
    "<end>",
    "A B",
    "\U0001f468\u200d\U0001f469",
)


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "gpt-2", "deepseek-v3"])
def test_a_long_text_without_words_has_the_ids_of_the_whole(pre, monkeypatch):
    tokenizer = Tokenizer.from_metadata(bpe(pre, ["12", "345", "\u65e5\u672c", "=="], control=["<end>"]))
    rng = random.Random(7)
    texts = ["".join(rng.choices(LONG[i:j], k=300)) for i in range(8) for j in (i + 1, len(LONG))]
    whole = [tokenizer.encode(text) for text in texts]
    monkeypatch.setattr("pyspec.text.tokenizer.PIECE_CHARS", 90)
    monkeypatch.setattr("pyspec.text.tokenizer.PIECE_TAIL", 20)
    for text, ids in zip(texts, whole, strict=True):
        assert tokenizer.encode(text) == ids, text


def test_marks_of_a_gap_are_found_by_id_and_by_text() -> None:
    texts = [
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        "<|fim_pad|>",
        "<|repo_name|>",
        "<|file_sep|>",
    ]
    assert Tokenizer.from_metadata(bpe(control=texts)).fim == FimMarks(256, 257, 258, 260, 261)
    assert Tokenizer.from_metadata(bpe()).fim == FimMarks()
    keys = {"fim_pre_token_id": 65, "suffix_token_id": 66, "middle_token_id": 9999}
    assert Tokenizer.from_metadata(bpe(control=["<MID>"], keys=keys)).fim == FimMarks(65, 66, 256)


GEMMA4 = json.loads((Path(__file__).parent / "llama_cpp_gemma4.json").read_text())


@pytest.mark.parametrize("file", GEMMA4["files"], ids=["as in files", "other types"])
def test_ids_of_gemma4_are_llama_cpp_s(file):
    """Raw characters with spaces as U+2581, runs of line ends, characters without a token, BOS whatever the file says. A text that begins
    with BOS gets no second one, of any vocabulary."""
    meta = dict(open_gguf(FIXTURES / "gemma4-dense.gguf").metadata) | file["change"]
    tokenizer = Tokenizer.from_metadata(meta)
    bos = tokenizer.bos_id
    for text, parsed, plain, framed in zip(GEMMA4["texts"], *file["ids"].values(), strict=True):
        assert tokenizer.encode(text, add_special=False) == parsed
        assert tokenizer.encode(text, add_special=False, parse_special=False) == plain
        assert tokenizer.encode(text) == (framed if framed[:2] != [bos, bos] else framed[1:])
        wrong = "\u2581" in text
        assert tokenizer.decode(parsed, special=True) == (text.replace("\u2581", " ") if wrong else text)
    ends = {"<eos>", "<turn|>", "<|tool_response>"}
    assert {tokenizer.piece(i) for i in tokenizer.eog} == ends, "</s> is text"


def test_long_texts_of_gemma4_are_cut_between_lines(monkeypatch):
    tokenizer = Tokenizer.from_metadata(open_gguf(FIXTURES / "gemma4-dense.gguf").metadata)
    text = "".join(t + "\n" * (i % 5) for i, t in enumerate(GEMMA4["texts"])) * 3
    whole = tokenizer.encode(text)
    monkeypatch.setattr(tokenizer_module, "PIECE_CHARS", 64)
    monkeypatch.setattr(tokenizer_module, "PIECE_TAIL", 8)
    assert tokenizer.encode(text) == whole
