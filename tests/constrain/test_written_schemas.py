"""Schemas as pydantic, zod, OpenAPI's generators and .NET write them. Accepted values are valid for another implementation, and
valid values are accepted if objects have only the listed properties.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from grammar_rig import compiled, reads, trie
from sampling import few

from pyspec.constrain.constraint import Constraint
from pyspec.errors import RequestError

TEXT, WHOLE, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}


def thing(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def at_a(schema: Any, **words: Any) -> dict[str, Any]:
    return thing(a=schema) | words


CAT, DOG = thing(kind={"const": "cat"}, n=WHOLE), thing(kind={"enum": ["dog"]}, s=TEXT)
STRICT = {"additionalProperties": False}
X, Y = {"a": "x"}, {"a": "x", "z": 1}
WRITTEN: dict[str, tuple[Any, list[Any], list[Any]]] = {  # schema, accepted values, refused values
    # keywords without effect
    "zod record": ({"type": "object", "propertyNames": TEXT, "additionalProperties": WHOLE}, [{}, {"q": 1}], [{"q": "x"}]),
    "any names": (at_a(TEXT, propertyNames={"title": "K"}), [X], [Y, {}]),
    "names true": (at_a(TEXT, propertyNames=True), [X], [Y]),
    "unique false": ({"type": "array", "items": TEXT, "uniqueItems": False}, [["a", "a"]], [[1]]),
    "unique of one": ({"type": "array", "items": TEXT, "uniqueItems": True, "maxItems": 1}, [["a"], []], [["a", "b"]]),
    "unique of text": (TEXT | {"uniqueItems": True}, ["a"], [1]),
    "then alone": (at_a(TEXT, then={"required": ["b"]}), [X], [Y, {}]),
    "else alone": (at_a(TEXT, **{"else": False}), [X], [Y]),
    "if alone": (at_a(TEXT, **{"if": {"required": ["q"]}}), [X], [Y]),
    "if true": ({"if": True, "then": TEXT, "else": WHOLE}, ["a"], [1]),
    "if false": ({"if": False, "then": TEXT, "else": WHOLE}, [1], ["a"]),
    "nothing depends": (at_a(TEXT, dependentRequired={}, dependentSchemas={}, dependencies={}), [X], [Y]),
    "depends on nothing": (at_a(TEXT, dependentRequired={"a": []}, dependentSchemas={"b": True}), [X], [Y]),
    "always depends": (thing(a=TEXT) | {"properties": {"a": TEXT, "b": WHOLE}, "dependentRequired": {"a": ["b"]}}, [{"a": "", "b": 1}], [X]),
    "not false": (at_a(TEXT, **{"not": False}), [X], [{}]),
    "contains none": ({"type": "array", "items": TEXT, "contains": WHOLE, "minContains": 0}, [[], ["a"]], [[1]]),
    "contains any": ({"type": "array", "items": TEXT, "contains": {}}, [["a"]], [[]]),
    "min contains alone": ({"type": "array", "items": TEXT, "minContains": 3}, [[]], [[1]]),
    "unevaluated false": (at_a(TEXT, unevaluatedProperties=False), [X], [Y]),
    "unevaluated true": (at_a(TEXT, unevaluatedProperties=True), [X, Y], [{}]),
    "unevaluated items": ({"type": "array", "prefixItems": [TEXT], "unevaluatedItems": False}, [["a"]], [["a", 1]]),
    "dynamic anchor": (at_a(TEXT, **{"$dynamicAnchor": "m"}), [X], [Y]),
    "notes": (at_a(TEXT | {"contentEncoding": "base64", "deprecated": False}, example=1, xml={}), [X], [Y]),
    # names that are supported
    "dict of enum": ({"type": "object", "propertyNames": {"enum": ["red", "b.c"]}, "additionalProperties": WHOLE}, [{"b.c": 1, "red": 2}, {}], [{"bxc": 1}, {"red": ""}]),
    "dict of enum by reference": ({"type": "object", "propertyNames": {"$ref": "#/$defs/C"}, "additionalProperties": WHOLE, "$defs": {"C": {"enum": ["q"], "type": "string", "title": "C"}}}, [{"q": 1}], [{"r": 1}]),
    "names of a pattern": ({"type": "object", "propertyNames": {"pattern": "^[a-c]{2}$"}}, [{"ab": []}], [{"abc": 1}, {"d": 1}]),
    "names of a length": ({"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3.0}, "additionalProperties": TEXT}, [{"ab": "", "abc": ""}], [{"a": ""}, {"abcd": ""}]),
    "a name": ({"type": "object", "propertyNames": {"const": "k"}}, [{"k": {}}, {}], [{"j": {}}]),
    "names and properties": ({"type": "object", "properties": {"p": TEXT}, "propertyNames": {"enum": ["p", "q"]}, "additionalProperties": WHOLE}, [{"p": "", "q": 1}], [{"p": 1}, {"q": ""}, {"r": 1}]),
    "no names": ({"type": "object", "propertyNames": False}, [{}], [{"a": 1}]),
    # whole numbers written with a point
    "text of 2.0": ({"type": "string", "minLength": 2.0, "maxLength": 3.0}, ["ab", "abc"], ["a", "abcd"]),
    "items of 1.0": ({"type": "array", "items": WHOLE, "minItems": 1.0, "maxItems": 2.0}, [[1], [1, 2]], [[], [1, 2, 3]]),
    "bounds of 1.0": ({"type": "integer", "minimum": 1.0, "exclusiveMaximum": 4.0}, [1, 3], [0, 4]),
    "draft 4": ({"type": "integer", "minimum": 0, "exclusiveMinimum": True, "maximum": 9}, [1, 9], [0, 10]),
    "draft 7 tuple": ({"type": "array", "items": [TEXT, WHOLE], "additionalItems": False}, [["a", 1], ["a"]], [["a", 1, 2], [1]]),
    # drafts by name
    "tuple named draft 7": ({"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [TEXT, WHOLE], "minItems": 2, "maxItems": 2}, [["a", 1]], [[1, "a"], ["a"]]),
    "rest named draft 6": (at_a({"type": "array", "items": [TEXT], "additionalItems": WHOLE}, **{"$schema": "http://json-schema.org/draft-06/schema#"}), [{"a": ["b", 1, 2]}, {"a": []}], [{"a": [1]}, {"a": ["b", "c"]}]),
    "no rest named 2019-09": ({"$schema": "https://json-schema.org/draft/2019-09/schema", "type": "array", "items": [TEXT], "additionalItems": False}, [["a"], []], [["a", "b"], [1]]),
    "const named draft 4": ({"$schema": "http://json-schema.org/draft-04/schema#", "const": "x"}, ["x"], ["y"]),
    "a draft that is not known": (at_a(TEXT, **{"$schema": "https://json-schema.org/draft-07/schema"}), [X], [Y, {"a": 1}]),
    "properties by such names": (thing(**{"$schema": TEXT, "not": WHOLE}), [{"$schema": "x", "not": 1}], [{"$schema": "x", "not": "a"}, {"not": 1}]),
    # not
    "never": ({"type": "object", "properties": {"a": TEXT, "b": {"not": {}}}, "required": ["a"]}, [X], [{"a": "x", "b": 1}]),
    "never an item": ({"type": "array", "items": {"not": True}}, [[]], [[1]]),
    "never among others": ({"anyOf": [TEXT, {"not": {"title": "Never"}}]}, ["a"], [1]),
    "not null": (thing(a={"not": NULL}), [{"a": 1}, {"a": []}, {"a": "x"}], [{"a": None}]),
    "not some types": ({"type": ["string", "null", "integer"], "not": {"type": ["null", "number"]}}, ["a"], [None, 1]),
    "not of its type": (TEXT | {"not": WHOLE}, ["a"], [1]),
    "not of an enum": ({"enum": [1, True, "1", None], "not": {"enum": [1, "2", None]}}, [True, "1"], [1, None]),
    "not a text": (TEXT | {"minLength": 1, "not": {"enum": ["none", "n/a"]}}, ["nones", "n", "x"], ["none", "n/a", ""]),
    "not the text": (at_a(TEXT | {"not": {"const": "a.b"}}), [{"a": "axb"}], [{"a": "a.b"}]),
    "not a beginning": (TEXT | {"not": {"pattern": "^tmp"}}, ["t", "xtmp"], ["tmp", "tmpx"]),
    "not within": (TEXT | {"not": {"pattern": "ab"}}, ["ba", ""], ["ab", "xabx"]),
    # one of
    "null or reference": (at_a({"oneOf": [NULL, {"$ref": "#/$defs/N"}]}, **{"$defs": {"N": thing(b=TEXT)}}), [{"a": None}, {"a": {"b": ""}}], [{"a": 1}, {"a": {}}, {"a": {"b": "", "c": 1}}]),
    "two references": ({"oneOf": [{"$ref": "#/$defs/t"}, {"$ref": "#/$defs/o"}], "$defs": {"t": TEXT, "o": thing(b=TEXT)}}, ["x", {"b": ""}], [1]),
    "chain of references": ({"oneOf": [{"$ref": "#/$defs/a"}, WHOLE], "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [NULL, TEXT]}}}, [None, "", 7], [[]]),
    "enums": ({"oneOf": [{"enum": ["a", 1]}, {"const": "b"}, {"enum": [2.0, None]}]}, ["a", 1, "b", 2, None], ["c", 3]),
    "tagged": ({"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}], "discriminator": {"propertyName": "kind", "mapping": {}}, "$defs": {"Cat": CAT, "Dog": DOG}}, [{"kind": "cat", "n": 1}, {"kind": "dog", "s": ""}], [{"kind": "cat", "s": ""}, {"kind": "dog"}]),
    "tagged and strict": ({"oneOf": [CAT | STRICT, DOG | STRICT]}, [{"kind": "dog", "s": ""}], [{"kind": "cat"}]),
    "tags behind references": ({"oneOf": [thing(k={"$ref": "#/$defs/c"}), thing(k={"$ref": "#/$defs/d"}, e=TEXT)], "$defs": {"c": {"const": 1}, "d": {"const": 2}}}, [{"k": 1}, {"k": 2, "e": ""}], [{"k": 2}]),
    "array or one": ({"oneOf": [TEXT, {"type": "array", "items": TEXT}]}, ["a", ["a"]], [1]),
    "one choice": ({"oneOf": [thing(b=WHOLE)]}, [{"b": 1}], [{"b": 1, "c": 1}]),
    # references
    "definitions": (at_a({"$ref": "#/definitions/P"}, definitions={"P": thing(b=TEXT)}), [{"a": {"b": ""}}], [{"a": {"b": "", "c": 1}}]),
    "brackets": (at_a({"$ref": "#/$defs/Box[int]"}, **{"$defs": {"Box[int]": thing(b=WHOLE)}}), [{"a": {"b": 1}}], [{"a": {"b": ""}}, {"a": {"b": 1}, "c": 1}]),
    "percent": (at_a({"$ref": "#/$defs/Box%3CA%7EB%3E"}, **{"$defs": {"Box<A~B>": TEXT}}), [X], [Y, {"a": 1}]),
    "tilde": (at_a({"$ref": "#/$defs/a~1b~0c"}, **{"$defs": {"a/b~c": TEXT}}), [X], [Y, {"a": 1}]),
    "encoded key as it stands": (at_a({"$ref": "#/$defs/A%3CB"}, **{"$defs": {"A%3CB": TEXT}}), [X], [Y, {"a": 1}]),
    "anchor": (at_a({"$ref": "#t"}, **{"$defs": {"x": {"$anchor": "t", "type": "string"}}}), [X], [Y, {"a": 1}]),
    "by id": (at_a({"$ref": "https://e.org/t"}, **{"$id": "https://e.org/s", "$defs": {"x": {"$id": "t", "type": "string"}}}), [X], [Y, {"a": 1}]),
    "own id": (at_a({"$ref": "https://e.org/s#/$defs/x"}, **{"$id": "https://e.org/s", "$defs": {"x": TEXT}}), [X], [Y]),
    "nested definitions": (at_a({"$ref": "#/$defs/o/$defs/i"}, **{"$defs": {"o": {"$defs": {"i": TEXT}}}}), [X], [Y, {"a": 1}]),
    "into properties": (thing(a=TEXT, b={"$ref": "#/properties/a"}), [{"a": "", "b": ""}], [{"a": "", "b": 1}, {"a": "", "b": "", "c": 1}]),
    "components": ({"$ref": "#/components/schemas/A", "components": {"schemas": {"A": thing(a=TEXT)}}}, [X], [Y]),
    "itself": ({"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, NULL]}}, "required": ["next"]}, [{"next": {"next": None}}], [{"next": {}}, {"next": None, "b": 1}]),
    "a tree": ({"$ref": "#/$defs/T", "$defs": {"T": {"type": "object", "properties": {"l": {"type": "array", "items": {"$ref": "#/$defs/T"}}}}}}, [{"l": [{}, {"l": []}]}], [{"l": [1]}, {"m": 1}]),
    "recursive": ({"type": "object", "properties": {"n": {"$recursiveRef": "#"}}}, [{"n": {"n": {}}}], [{"m": 1}]),
    "all of one reference": (at_a({"allOf": [{"$ref": "#/$defs/E"}], "default": "p"}, **{"$defs": {"E": {"enum": ["p", "q"]}}}), [{"a": "q"}], [{"a": "r"}]),
    # patterns
    "no quote": ({"type": "string", "pattern": '^[^"]*$'}, ["ab\n"], ['"', 'a"b']),
    "no slash": ({"type": "string", "pattern": "^[^\\\\/]+$"}, ['"a"'], ["\\", "a/b"]),
    "names without quotes": ({"type": "object", "patternProperties": {'^[^"]$': TEXT}, "additionalProperties": False}, [{"q": ""}], [{'"': ""}]),
    "zod mail": ({"type": "string", "pattern": "^(?!\\.)(?!.*\\.\\.)([A-Za-z0-9_'+\\-\\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\\-]*\\.)+[A-Za-z]{2,}$"}, ["a@b.co", "a.b@c.de"], [".a@b.co", "a..b@c.de", "a@b..de", "a"]),
    "zod host": ({"type": "string", "pattern": "^(?=.{1,12}\\.?$)[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?(?:\\.[a-z0-9]+)*\\.?$"}, ["a.b", "abcdefghijkl"], ["abcdefghijklm", "-a"]),
    "zod uuid": ({"type": "string", "format": "uuid", "pattern": "^([0-9a-f]{8}-[0-9a-f]{4}-[1-8][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12})$"}, ["01234567-89ab-4def-8123-456789abcdef"], ["01234567-89ab-9def-8123-456789abcdef"]),
    "password": ({"type": "string", "pattern": "^(?=.*[A-Z])(?=.*\\d).{4,}$"}, ["aB3d"], ["ab3d", "aBcd", "B3"]),
    "not blank": ({"type": "string", "pattern": "^(?!\\s*$).+"}, [" a"], [" ", ""]),
    "not reserved": ({"type": "string", "pattern": "^(?!con$|aux$)[a-z]{3,4}$"}, ["cons", "abc"], ["con", "aux"]),
    "pydantic decimal": ({"type": "string", "pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$"}, ["1.50", "+3", "0", "-.5"], ["+", ".", "", "a"]),
    "no hyphen at the end": ({"type": "string", "pattern": "^[a-z0-9][a-z0-9-]*(?<!-)$"}, ["a", "a-b"], ["a-", "-a"]),
    "not behind": ({"type": "string", "pattern": "^.+(?<!tmp|bak)$"}, ["a.txt", "tmpx"], ["tmp", "a.bak"]),
    "behind a letter": ({"type": "string", "pattern": "^v(?!0)[0-9]+$"}, ["v10"], ["v01", "10"]),
}  # fmt: skip
REFUSED = [
    ({"$ref": "#/$defs/none"}, "refers to '#/\\$defs/none'"),
    (at_a({"$ref": "other.json"}), "refers to 'other.json'"),
    (at_a({"$ref": "#t"}, **{"$defs": {"x": {"$anchor": "t"}, "y": {"$anchor": "t"}}}), "refers to '#t'"),
    ({"oneOf": [WHOLE, {"type": "number"}]}, "oneOf"),
    ({"oneOf": [thing(a=TEXT) | {"additionalProperties": True}, thing(b=TEXT)]}, "oneOf"),
    ({"oneOf": [{"$ref": "#/$defs/t"}, {"enum": ["a"]}], "$defs": {"t": TEXT}}, "oneOf"),
    ({"type": "object", "propertyNames": {"pattern": "^a"}, "properties": {"b": {}}}, "propertyNames"),
    ({"type": "array", "items": TEXT, "uniqueItems": True}, "uniqueItems"),
    (at_a(TEXT, **{"not": {"required": ["b"]}}), "not"),
    ({"type": "string", "minLength": 1.5}, "minLength"),
    ({"type": "string", "pattern": "a(?=b)"}, "look"),
]  # fmt: skip


@pytest.mark.sampled(1, most=40)
@pytest.mark.parametrize("name", WRITTEN)
def test_accepted_values_are_valid_and_valid_values_are_accepted(name: str) -> None:
    schema, good, bad = WRITTEN[name]
    source = compiled("json_schema", json.dumps(schema)).source
    for value in good:
        assert reads(source, json.dumps(value)), value
    for value in bad:
        assert not reads(source, json.dumps(value)), value
    is_valid = jsonschema.Draft202012Validator(schema).is_valid
    if name not in (
        "draft 4",
        "draft 7 tuple",
        "tuple named draft 7",
        "rest named draft 6",
        "no rest named 2019-09",
        "const named draft 4",
        "dict of enum by reference",
        "by id",
        "recursive",
        "encoded key as it stands",
    ):
        assert all(map(is_valid, good)), "the values here are right, too"
        for value in _values(schema, good + bad):
            assert not reads(source, json.dumps(value)) or is_valid(value), value


def _values(schema: Any, given: list[Any]) -> list[Any]:
    """Mutants of these schemas: parts removed, inserted and exchanged."""
    rng, found = random.Random(json.dumps(schema)), []
    for _ in range(40):
        value = json.loads(json.dumps(rng.choice(given)))
        if isinstance(value, dict):
            value[rng.choice([*value, "a", "b", "kind", "z", "red"])] = rng.choice(
                [None, 1, "x", {}, [], *given]
            )
            value.pop(rng.choice(list(value)), None) if rng.random() < 0.3 else None
        elif isinstance(value, list):
            value.insert(rng.randint(0, len(value)), rng.choice([None, 1, "x", *value]))
        elif isinstance(value, str):
            at = rng.randint(0, len(value))
            value = (
                value[:at]
                + rng.choice(["", ".", "..", '"', "\\", " ", "A", "0", "@", "/"])
                + value[at + rng.randint(0, 1) :]
            )
        else:
            value = rng.choice([0, 1, 4, 2.5, "", None, True])
        found.append(value)
    return found


@pytest.mark.parametrize(("schema", "said"), REFUSED)
def test_an_unsupported_schema_is_refused_with_the_reason(schema: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        Constraint(trie(), compiled("json_schema", json.dumps(schema)))


AHEAD = [
    r"^(?!ab)[abc]*$",
    r"^(?!a*b)[abc]+$",
    r"^(?!.*(ab|ca))[abc]*$",
    r"^(?=a|b)(?!.*c$)[abc]{0,4}$",
    r"^a(?![bc]{2})[abc]*$",
    r"^[ab](?=c)[abc]*$",
    r"^(?!$)[abc]?$",
    r"^[abc]*(?<!bc|ab)$",
    r"^[abc]*(?<=bc)$",
    r"^(?!^a|^b$)[abc]+$",
    r"^(?!(?:a{2}|b{1,2})c?b)[abc]*$",
    r"^(?!a|b$)[^b]*c?$",
]


@pytest.mark.parametrize("pattern", AHEAD)
@pytest.mark.parametrize("n_text", few([40, 150], 40))
def test_patterns_with_look_ahead_have_their_usual_meaning(pattern: str, n_text: int) -> None:
    source = compiled("json_schema", json.dumps({"type": "string", "pattern": pattern})).source
    rng, n = random.Random(pattern), 0
    for _ in range(n_text):
        text = "".join(rng.choice("abc") for _ in range(rng.randint(0, 5)))
        want = re.search(pattern, text) is not None
        n += want
        assert reads(source, json.dumps(text)) == want, text
    assert n
