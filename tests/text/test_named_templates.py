"""Templates by name render the same text as llama.cpp's templates with that name."""

import click
import pytest

from pyspec.cli.server import template_text
from pyspec.text.named_templates import NAMED
from pyspec.text.template import ChatTemplate

CHAT = [
    {"role": "system", "content": " S "},
    {"role": "user", "content": " u "},
    {"role": "assistant", "content": " a "},
    {"role": "user", "content": " v "},
]
COHERE = "<|START_OF_TURN_TOKEN|><|{}_TOKEN|>"
HEAD = "<|start_header_id|>{}<|end_header_id|>\n\n"
EXPECTED = {
    "llama3": f"{HEAD.format('system')}S<|eot_id|>{HEAD.format('user')}u<|eot_id|>{HEAD.format('assistant')}a<|eot_id|>"
    f"{HEAD.format('user')}v<|eot_id|>{HEAD.format('assistant')}",
    "command-r": "".join(
        COHERE.format(role) + text + "<|END_OF_TURN_TOKEN|>"
        for role, text in (("SYSTEM", "S"), ("USER", "u"), ("CHATBOT", "a"), ("USER", "v"))
    )
    + COHERE.format("CHATBOT"),
    "gemma": "<start_of_turn>user\nS\n\nu<end_of_turn>\n<start_of_turn>model\na<end_of_turn>\n"
    "<start_of_turn>user\nv<end_of_turn>\n<start_of_turn>model\n",
    "phi3": "<|system|>\n S <|end|>\n<|user|>\n u <|end|>\n<|assistant|>\n a <|end|>\n<|user|>\n v <|end|>\n<|assistant|>\n",
    "phi4": "<|im_start|>system<|im_sep|> S <|im_end|><|im_start|>user<|im_sep|> u <|im_end|>"
    "<|im_start|>assistant<|im_sep|> a <|im_end|><|im_start|>user<|im_sep|> v <|im_end|><|im_start|>assistant<|im_sep|>",
    "falcon3": "<|system|>\n S \n<|user|>\n u \n<|assistant|>\n a \n<|user|>\n v \n<|assistant|>\n",
    "zephyr": "<|system|>\n S <|endoftext|>\n<|user|>\n u <|endoftext|>\n<|assistant|>\n a <|endoftext|>\n"
    "<|user|>\n v <|endoftext|>\n<|assistant|>\n",
    "mistral-v7": "[SYSTEM_PROMPT]  S [/SYSTEM_PROMPT][INST]  u [/INST]  a </s>[INST]  v [/INST]",
    "mistral-v7-tekken": "[SYSTEM_PROMPT] S [/SYSTEM_PROMPT][INST] u [/INST] a </s>[INST] v [/INST]",
    "deepseek3": " S \n\n<｜User｜> u <｜Assistant｜> a <｜end▁of▁sentence｜><｜User｜> v <｜Assistant｜>",
    "chatml": "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CHAT)
    + "<|im_start|>assistant\n",
}


@pytest.mark.parametrize("name", NAMED)
def test_a_named_template_renders_as_llama_cpps(name: str) -> None:
    assert ChatTemplate(NAMED[name]).render(CHAT) == EXPECTED[name]
    assert template_text(None, None, name) == NAMED[name]  # type: ignore[arg-type]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(click.BadParameter, match=r"'alpaca' is neither .* chatml, llama3, command-r"):
        template_text(click.Context(click.Command("x")), click.Option(["--chat-template"]), "alpaca")
