"""A constraint allows exactly the texts of its grammar, gives drafts and committed tokens the same verdicts, and knows its end."""

from __future__ import annotations

import random

import pytest
from grammar_rig import PERSON, allowed, compiled, constraint, fits, ids, trie

from pyspec.constrain.constraint import Constraint, fill
from pyspec.errors import RequestError, SlotError

EOG = {4088, 4090}


@pytest.mark.parametrize(
    ("kind", "source", "good", "bad"),
    [
        ("json_schema", PERSON, '{"name": "Ann", "age": 7}', '{"age": 7}'),
        ("json_schema", PERSON, '{\n    "name": "Ann",\n    "age": 7\n}', '{"name": "Ann", "age": "7"}'),
        ("json_schema", '{"properties": {"a": {}}}', '{"a": {"b": 1}}', '{"a": 1, "b": 1}'),
        ("json_schema", "{}", "[1, 2, null]", "[1, 2,, null]"),
        ("json_schema", "true", '"text"', "text"),
        ("json_schema", '{"type": "object"}', '{"a": {}}', "[]"),
        ("json_schema", "{}", "{}", "{" + " " * 40 + "}"),
        ("regex", "[a-c]{2,4}", "abca", "abcab"),
        ("regex", r"\d+ (cats|dogs)", "12 dogs", "12 birds"),
        ("gbnf", 'root ::= "yes" | "no"', "yes", "maybe"),
        ("gbnf", 'root ::= item+\nitem ::= "- " [^\\n]+ "\\n"', "- one\n- two\n", "one\n"),
        ("gbnf", 'root ::= "caf\\u00e9" [\\x41-C]?', "caféB", "cafe"),
        ("gbnf", 'root ::= ("ab"{2}){2} ([0-9]+)?', "abababab77", "ababab"),
        ("gbnf", 'root ::= (("a"+)* "b")?', "aaab", "aaa"),
        ("gbnf", 'root ::= ("x"){0,0} "y"', "y", "xy"),
        ("gbnf", 'root ::= "a" . "b"', "a\nb", "ab"),
        ("lark", 'start: "a" b\nb: "b" | b "b"', "abbb", "b"),
    ],
)
def test_a_text_that_fits_is_allowed_to_its_end_and_one_that_does_not_is_refused(
    kind: str, source: str, good: str, bad: str
) -> None:
    assert fits(constraint(kind, source), good)
    assert not fits(constraint(kind, source), bad)


GBNF = r"""
# a small JSON, as llama.cpp's own grammars are written
root   ::= object
value  ::= object | array-of | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array-of  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt/] | "u" [0-9a-fA-F]{4})
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("text", "is_good"),
    [
        ('{"a/b": [1, -2.5e+3, true], "\\u00e9": {"x": "\\n"}}', True),
        ("{}", True),
        ("[]", False),
        ('{"a": 01}', False),
        ('{"a": "\\q"}', False),
        ('{"a" 1}', False),
    ],
)
def test_gbnf_has_the_meaning_of_llama_cpp(text: str, is_good: bool) -> None:
    assert fits(constraint("gbnf", GBNF), text) == is_good


def test_rows_behind_drafts_are_those_of_committed_tokens() -> None:
    drafts = ids('{"name": "Ann", "age": 7}')
    ahead = allowed(constraint("json_schema", PERSON), drafts)
    c = constraint("json_schema", PERSON)
    for i, token in enumerate(drafts):
        assert allowed(c) == [ahead[i]]
        assert token in ahead[i] and c.allows((), token)
        c.commit([token])
    assert c.is_over


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", PERSON),
        ("regex", "(the same|other) words"),
        ("gbnf", 'root ::= "yes yes" | "no"'),
    ],
)
@pytest.mark.parametrize("after", ["", "so:"])
def test_a_mask_allows_each_token_whose_text_fits_however_it_is_spelled(
    kind: str, source: str, after: str
) -> None:
    """So a token allowed by a single check is also in the mask, and forced text may use any tokens."""
    c, rng = constraint(kind, source, after), random.Random(1)
    c.commit(ids("and so:") if after else [])
    for _ in range(12):
        mask = allowed(c)[0]
        assert mask == {t for t in range(trie().n_vocab) if c.allows((), t)}
        if mask & EOG:
            return
        c.commit([rng.choice(sorted(mask))])
        if c.is_over:
            return


def test_looking_at_drafts_changes_nothing() -> None:
    c = constraint("json_schema", PERSON)
    before = allowed(c)
    assert c.usable(ids('{"name": "Bob"')) == ids('{"name": "Bob"')
    assert c.usable(ids("nothing of this")) == []
    allowed(c, ids('{"name'))
    assert allowed(c) == before


def test_drafts_are_cut_at_the_first_refused_token_and_behind_an_end() -> None:
    c = constraint("regex", "[ab]+")
    assert c.usable([*ids("ab"), 4090, *ids("ab")]) == [*ids("ab"), 4090]
    assert c.usable([*ids("ab"), *ids("!"), *ids("b")]) == ids("ab")


def test_an_end_is_allowed_where_the_grammar_accepts_and_nowhere_else() -> None:
    c = constraint("regex", "ab?c?")
    assert not allowed(c)[0] & EOG
    c.commit(ids("a"))
    assert allowed(c)[0] >= EOG and c.allows((), 4090)
    assert not c.is_over


def test_text_behind_the_last_token_is_not_taken() -> None:
    c = constraint("regex", "abc")
    assert c.commit([*ids("abc"), *ids("more")]) == len(ids("abc"))
    assert c.is_over


def test_forced_tokens_are_the_only_text_that_can_follow() -> None:
    c = constraint("lark", 'start: "the same words" | "the same deeds"')
    forced = c.offer(9).tokens
    assert trie().tokenizer.decode(forced) and "the same ".startswith(trie().tokenizer.decode(forced))
    assert c.usable(forced) == forced and len(c.offer(1).tokens) == 1


def test_a_refused_token_that_is_committed_ends_the_request_with_words() -> None:
    with pytest.raises(SlotError, match="can not follow its grammar"):
        constraint("regex", "abc").commit(ids("z"))


def test_several_requests_are_filled_at_once_as_alone() -> None:
    a, b = constraint("json_schema", PERSON), constraint("regex", "[ab]+")
    c = constraint("gbnf", 'root ::= "no"')
    drafts = ids('{"name"')
    masks = fill([(a, drafts), (b, []), (c, ids("no"))], trie())
    alone = [fill([(a, drafts)], trie()), fill([(b, [])], trie()), fill([(c, ids("no"))], trie())]
    assert (masks == [row for rows in alone for row in rows]).all()


def test_free_text_is_free_up_to_its_end_and_constrained_behind_it() -> None:
    c = constraint("json_schema", PERSON, after="</think>")
    assert not allowed(c)[0] & EOG and len(allowed(c)[0]) == 4096 - len(EOG)
    c.commit(ids("I wonder: <b>what</b>? {} </thin"))
    assert c.free is not None and c.free.begun == 6
    c.commit(ids("k>\n"))
    assert c.free is None
    c.commit(ids('{"name": "Ann", "age": 7}'))
    assert c.is_over


def test_a_token_across_the_end_of_free_text_adds_only_allowed_text() -> None:
    c = constraint("regex", "[a-c]+", after="}")
    across = {t for t, text in enumerate(trie().table.tokens) if b"}" in text and text[-1:] != b"}"}
    assert across, "the vocabulary has such tokens"
    for token in across:
        tail = trie().table.tokens[token].split(b"}", 1)[1].decode("utf-8", "replace")
        assert (token in allowed(c)[0]) == (tail.strip(" \n\t\r") == "" and len(tail) <= 4), tail


@pytest.mark.parametrize("part", [b"}", b"e", b"the", b" the ", b"\xc3", b"not in any"])
def test_tokens_that_have_a_text_are_found_with_the_rest(part: bytes) -> None:
    wanted = [(t, text[text.find(part) :]) for t, text in enumerate(trie().table.tokens) if part in text]
    assert list(trie().having(part)) == wanted


def test_text_that_may_stay_free_may_end() -> None:
    c = constraint("regex", "[0-9]+", after="<call>", lazy=True)
    assert c.is_plain and allowed(c)[0] >= EOG
    c.commit(ids("see <c"))
    assert not c.is_plain and allowed(c)[0] >= EOG
    c.commit(ids("all>"))
    assert not allowed(c)[0] & EOG and c.usable(ids("12")) == ids("12")


def test_drafts_in_free_text_end_before_its_border() -> None:
    c = constraint("regex", "[0-9]+", after="<call>", lazy=True)
    tokens = ids("free words <call>12")
    n = len(c.usable(tokens))
    assert 0 < n < len(tokens) and "<" not in trie().tokenizer.decode(tokens[:n])


@pytest.mark.parametrize(
    ("kind", "source", "said"),
    [
        ("json_schema", "{", "can not be read"),
        ("json_schema", "false", "nothing fits"),
        ("json_schema", "[1]", "an object or true"),
        ("json_schema", '{"type": "wombat"}', "wombat"),
        ("json_schema", '{"not": {}}', "not"),
        ("regex", "(", "can not be used"),
        ("gbnf", "root = 1", "can not be read"),
        ("gbnf", 'other ::= "a"', "root"),
        ("gbnf", 'root ::= "\\ud800"', "not a character"),
        ("lark", "start: missing", "missing"),
    ],
)
def test_an_invalid_grammar_is_refused_with_the_reason(kind: str, source: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        Constraint(trie(), compiled(kind, source))


def test_a_dead_end_behind_drafts_breaks_nothing_before_it() -> None:
    """A rule that no text matches lies ahead: reading that far must not fail a request that does not go there."""
    source = 'start: "go " ("on" | "deep" dead)\ndead: dead "x"'
    c = constraint("lark", source)
    deep = ids("go deep")
    masks = fill([(c, c.usable(deep))], trie())
    assert masks[0].any() and fits(c, "go on")
