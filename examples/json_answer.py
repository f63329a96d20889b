"""An answer that follows a JSON Schema to the letter, so it always parses."""

import json

import pyspec

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}

with pyspec.Engine.load("demo") as engine:
    answer = engine.chat(
        [{"role": "user", "content": "Invent a person."}],
        json_schema=PERSON,
        temperature=0,
        max_tokens=200,
    )
    person = json.loads(answer.content)
    print(f"{person['name']!r} is {person['age']} years old")

    # One of a few texts.
    mood = engine.chat(
        [{"role": "user", "content": "How are you?"}], choices=["well", "not so well"], temperature=0
    )
    print(mood.content)
