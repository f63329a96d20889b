"""Random walks over a schema's masks give JSON that is valid for another implementation."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
from grammar_rig import constraint, trie
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemas import whole

from pyspec.constrain.constraint import fill
from pyspec.errors import RequestError

CLOSING = tuple(b'}]",')


def walk(source: str, rng: random.Random, most: int = 600) -> str | None:
    """Text of random allowed tokens up to its end; None for a refused schema. Closing tokens are likelier, so that it ends."""
    try:
        c = constraint("json_schema", source)
    except RequestError as e:
        assert "json_schema" in str(e) or "grammar" in str(e)
        return None
    table, text = trie().table, b""
    for i in range(most):
        row = fill([(c, [])], trie())
        ids = np.flatnonzero(
            np.unpackbits(row.view(np.uint8), bitorder="little")[: trie().n_vocab]
        ).tolist()
        assert ids, f"a dead end behind {text!r}"
        ends = [t for t in ids if t in table.eog]
        closing = [t for t in ids if table.tokens[t][:1] and table.tokens[t][0] in CLOSING]
        if ends and (i > 20 or len(ids) == len(ends)):
            return text.decode()
        token = rng.choice(
            closing if closing and rng.random() < 0.4 + i / most else [t for t in ids if t not in ends]
        )
        text += table.tokens[token]
        assert c.usable([token]) == [token]
        c.commit([token])
        if c.is_over:
            return text.decode()
    raise AssertionError(f"no end after {most} tokens: {text[-80:]!r}")


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 1 << 32))
def test_texts_that_a_schema_s_masks_allow_are_valid(seed: int) -> None:
    rng = random.Random(seed)
    wanted = whole(rng)
    text = walk(json.dumps(wanted), rng)
    if text is not None:
        jsonschema.Draft202012Validator(wanted).validate(json.loads(text))


def unsaid(value: Any) -> Any:
    """A schema whose objects do not forbid other properties than the listed ones."""
    if isinstance(value, list):
        return [unsaid(each) for each in value]
    if not isinstance(value, dict):
        return value
    skipped = {"additionalProperties"} if "properties" in value else set()
    return {name: unsaid(each) for name, each in value.items() if name not in skipped}


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 1 << 32))
def test_objects_have_the_properties_that_they_list_and_no_others(seed: int) -> None:
    rng = random.Random(seed)
    wanted = whole(rng)
    text = walk(json.dumps(unsaid(wanted)), rng)
    if text is not None:
        jsonschema.Draft202012Validator(wanted).validate(json.loads(text))


def test_a_text_fits_one_of_the_schemas_of_a_oneof_and_no_other() -> None:
    n_taken = 0
    for seed in range(120):
        rng = random.Random(seed)
        parts = []
        for _ in range(rng.randint(2, 3)):
            listed = {
                name: {"type": "integer", "minimum": 0, "maximum": 9}
                for name in rng.sample("abc", rng.randint(1, 2))
            }
            if rng.random() < 0.5:
                listed["kind"] = {"enum": rng.sample(["x", "y", "z"], rng.randint(1, 2))}
            needed = [name for name in listed if rng.random() < 0.7]
            parts.append({"type": "object", "properties": listed, "required": needed})
        wanted = {"oneOf": parts}
        text = walk(json.dumps(wanted), rng)
        if text is not None:
            n_taken += 1
            jsonschema.Draft202012Validator(wanted).validate(json.loads(text))
    assert 15 <= n_taken < 120, "some are kept, and some are refused because a text might fit two"


def test_few_schemas_of_that_kind_are_refused() -> None:
    refused = 0
    for seed in range(100):
        try:
            constraint("json_schema", json.dumps(whole(random.Random(seed))))
        except RequestError:
            refused += 1
    assert refused <= 10
