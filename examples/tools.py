"""An agent: the model calls a function, reads its result, and answers."""

import pyspec

PRICES = {"tea": 3, "cake": 5}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "price",
            "description": "What something costs, in euros.",
            "parameters": {
                "type": "object",
                "properties": {"what": {"enum": list(PRICES)}},
                "required": ["what"],
            },
        },
    }
]


def price(what: str) -> str:
    return f"{PRICES[what]} euros"


with pyspec.Engine.load("demo") as engine:
    messages = [{"role": "user", "content": "What does the cake cost?"}]
    # The demo model was not trained on tools, so it is made to call one. With a model that knows tools, leave `tool_choice` out, and
    # loop for as long as `answer.finish_reason` is "tool_calls".
    answer = engine.chat(messages, tools=TOOLS, tool_choice="required", temperature=0, max_tokens=200)
    messages.append(answer.message)
    for call in answer.tool_calls:
        print(f"the model calls {call.name}({call.values()})")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": price(**call.values())})
    print(engine.chat(messages, temperature=0, max_tokens=40).content)
