"""GBNF has llama.cpp's meaning: every derivation counts, not only the longest."""

from __future__ import annotations

import random
import time
from contextlib import suppress

import gbnf_reference
import pytest
from grammar_rig import allowed, compiled, constraint, fits, ids, reads, trie
from sampling import few

from pyspec.constrain.constraint import Constraint
from pyspec.constrain.gbnf_lark import lark_of
from pyspec.errors import RequestError

MEETING = [
    ('root ::= w "a"\nw ::= [a-z]+', ["bca", "aa", "aaaa"], ["b", "a", "ab"]),
    ('root ::= num "\\n"\nnum ::= [0-9]+ ws\nws ::= [ \\t\\n]*', ["2\n", "2 \n\n"], ["2", "2 "]),
    ('root ::= "<t>" [^\\x00]* "</t>" ("yes" | "no")', ["<t>hm</t>yes", "<t></t></t>no"], ["<t>hm", "<t>yes"]),
    ('root ::= ("ab" | "a") "bc"', ["abbc", "abc"], ["ab", "abcc"]),
    (
        'root ::= (sum "=" ws one "\\n")+\nsum ::= one ([-+] one)*\none ::= [0-9]+ ws | "(" ws sum ")" ws\nws ::= [ \\t\\n]*',
        ["1+1=2\n", "(1 -2) = 3\n", "1=1\n\n\n((2))=3 \n"],
        ["1+1=2", "(1=2\n", "(1 - 2) = 3\n"],
    ),
    ('root ::= "(" root ")" | [a-z()]*', ["", "((a)", "(((", "a)"], ["A"]),
    ('root ::= ws root ws | "x" ws\nws ::= ([ \\n] ws)?', ["x", " x \n", "\n\nx"], ["", " "]),
    ('root ::= item root? "\\n"\nitem ::= "- " [^\\x00]+', ["- a\n", "- a- b\n\n", "- \n\n"], ["- a", "-a\n", "- \n"]),
    ('root ::= "é" | [è-ü] "é" "x" | "é" root', ["é", "éé", "èéx", "éééx"], ["è", "x", "éx"]),
    ("root ::= a b\na ::= [ab]{1,3}\nb ::= [bc]{2}", ["abb", "abc", "aabbb"], ["ab", "aaaabb"]),
    ('root ::= Integer "!"\nInteger ::= INTEGER\nINTEGER ::= integer+\ninteger ::= [0-9]', ["12!"], ["!", "x!"]),
    ('root ::= start "!" | SPACE\nstart ::= "x"\nSPACE ::= "y"', ["x!", "y"], ["x", "!"]),
    ('start ::= "x"\nroot ::= R1 r-1 R-1\nR1 ::= "a"\nr-1 ::= "b"\nR-1 ::= "c"', ["abc"], ["x", "aaa", "abb"]),
    ('root ::= a\na ::= b "x" | "y"\nb ::= a "z"', ["y", "yzx", "yzxzx"], ["x", "yz"]),
]  # fmt: skip


@pytest.mark.parametrize(("source", "good", "bad"), MEETING)
def test_rules_that_meet_in_the_same_characters_are_followed_in_all_ways(
    source: str, good: list[str], bad: list[str]
) -> None:
    for text in good:
        assert fits(constraint("gbnf", source), text), text
    for text in bad:
        assert not fits(constraint("gbnf", source), text), text


@pytest.mark.parametrize("begin", few(range(0, 100, 25), 75))
def test_random_grammars_take_the_texts_that_a_plain_recogniser_takes(begin: int) -> None:
    n = 0
    for seed in range(begin, begin + 25):
        rng = random.Random(seed)
        source = gbnf_reference.grammar(rng)
        made = compiled("gbnf", source).source
        for _ in range(6):
            text = gbnf_reference.text(rng, source)
            try:
                want = gbnf_reference.takes(source, text)
            except gbnf_reference.TooMany:
                break
            n += want
            assert reads(made, text) == want, f"{text!r} of\n{source}"
    assert n > 20


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        ("root ::= [a\\-z]+", "a-z", "b"),
        ("root ::= [a-]+", "a-", "b"),
        ("root ::= [-a]+", "a-", "b"),
        ("root ::= [\\]\\[]+", "[]", "x"),
        ('root ::= "\\x41\\u00e9\\U0001F600\\"\\\\"', 'Aé😀"\\', "A"),
        ('root ::= [^\\n"\\u00e0-\\u00ff]+', "a ü"[:2], "é"),
        ('root ::= "a"{2,3} "b"{2} "c"{1,}', "aabbcc", "aabc"),
        ('root ::= ("a" "b"){ 2 , 2 }', "abab", "ab"),
        ('# one\nroot ::= "a" # two\n  # three\nb ::= "x"', "a", "x"),
        ('root ::= (\n "a"\n | # or\n "b"\n) "c"\r\nb ::= "x"\r\n', "bc", "ab"),
        ('b ::= "x"\nroot ::=\n  b |\n  "y"', "y", "a"),
        ('root ::= "a"\n  | "b"\n  | "c"', "c", "d"),
        ('root ::= "a" | "b"\nroot ::= "c"', "c", "a"),
        ('root ::= "a" [] "b" ()', "ab", "a"),
        ('root ::= "x"{0} "y"', "y", "xy"),
        ('root ::= ("a"+)? | "b"*? "c"', "bbc", "ab"),
        ("root ::= .{3}", "a\né", "ab"),
    ],
)
def test_spellings_that_llama_cpp_reads(source: str, good: str, bad: str) -> None:
    assert fits(constraint("gbnf", source), good)
    assert not fits(constraint("gbnf", source), bad)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ('root ::= "a" b', "names b, which is not defined"),
        ('root ::= "a"\nb ::= c', "names c, which is not defined"),
        ('other ::= "a"', "no rule root"),
        ('root ::= "a', "line 1 ends where"),
        ('x ::= "b"\nroot ::= [a', "line 2 ends where ]"),
        ('root ::= * "a"', "something to repeat"),
        ('root ::= "\\q"', "an escape"),
        ('root ::= "\\u00g1"', "4 hexadecimal digits"),
        ('root ::= "a"{3,2}', "the larger number last"),
        ("root ::= [z-a]", "a range"),
        ('root ::= ("a"', "where \\) is wanted"),
        ('root ::= "a" ) "b"', "a line's end"),
        ("root ::= <[", "of a token"),
        ("root ::= <no-such-token>", "no-such-token"),
        ("root ::= !<no-such-token>", "no-such-token"),
        ("root ::= <[987654321]>", "987654321"),
        ("root ::= " + '"a"' + "+" * 50, "repetitions"),
    ],
)
def test_an_invalid_grammar_is_refused_with_the_line(source: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        Constraint(trie(), compiled("gbnf", source))


def test_tokens_are_named_by_id_and_text() -> None:
    table = trie().table
    one = table.id_of("1")
    assert one is not None
    assert fits(constraint("gbnf", f'root ::= <[{one}]> "a"'), "1a")
    assert allowed(constraint("gbnf", f"root ::= <[{one}]>"))[0] == {one}
    end = table.tokens[table.eog[0]].decode()
    c = constraint("gbnf", f'root ::= "x" {end}')
    c.commit(ids("x"))
    assert table.eog[0] in allowed(c)[0] and c.usable(ids("y")) == []
    word = next(
        i for i, t in enumerate(table.tokens) if len(t) > 3 and t.isalpha() and i not in table.special
    )
    assert allowed(constraint("gbnf", f'root ::= <[{word}]> "a"'))[0] == {word}


def test_any_other_token_is_none_that_ends_the_text() -> None:
    table = trie().table
    c = constraint("gbnf", 'root ::= !<[16]> "a"')
    assert allowed(c)[0] == set(range(trie().n_vocab)) - {16, *table.eog}
    begin = next(t for t in table.special if t not in table.eog)
    c = constraint("gbnf", f"root ::= !<[{begin}]>* <[{begin}]>")
    assert not allowed(c)[0] & set(table.eog)
    c.commit([*ids("so it is!"), begin])
    assert c.is_over


def test_a_regular_part_is_one_expression_and_terminals_that_do_not_meet_stay_whole() -> None:
    """Masks are cheap only with large terminals: a rule of single characters takes milliseconds."""
    regular = lark_of('root ::= "a" w b\nw ::= [a-z]* w2\nw2 ::= "x" w2 | "y"\nb ::= ("b" b)?')
    assert len([line for line in regular.split("\n") if line[:1] == "T"]) == 1
    json_like = lark_of(
        'root ::= "{" text (":" root)? "}"\ntext ::= "\\"" [^"]* "\\"" ws\nws ::= [ \\n]*'
    )
    assert any("*" in line for line in json_like.split("\n") if line[:1] in "TR")


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize(
    "source",
    [
        "root ::= " + " ".join(f"a{i}" for i in range(300)) + "".join(f'\na{i} ::= "x" root? [a-z]*' for i in range(300)),
        "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40)) + '\nr40 ::= "a"\nroot ::= r0 root?',
        "root ::= a0\n" + "\n".join(f'a{i} ::= "b" a{(i * 7 + 1) % 60} | a{(i + 1) % 60} "c" | "d"' for i in range(60)),
        "root ::= " + " | ".join(f'"{i:x}" root' for i in range(3000)) + ' | "z"',
    ],
)  # fmt: skip
def test_grammars_that_are_large_are_read_within_bounds(source: str) -> None:
    began = time.process_time()
    with suppress(RequestError):
        trie().matcher(compiled("gbnf", source).source)
    assert time.process_time() - began < 30, (
        "the bound is the child's, of two seconds; this one is against no end at all"
    )
