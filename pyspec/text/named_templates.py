"""Chat templates by llama-server's names for `--chat-template`, for files without a template or with a wrong one."""

from __future__ import annotations

from pyspec.text.template import CHATML


def _each(message: str, answer: str) -> str:
    """A template that writes all messages alike. answer: the start of the assistant's answer."""
    loop = "{% for m in messages %}" + message + "{% endfor %}"
    return loop + "{% if add_generation_prompt %}{{ '" + answer + "' }}{% endif %}"


def _by_role(system: str, user: str, assistant: str, answer: str) -> str:
    """A template with a form for each role. Other roles are left out."""
    branches = "{% if m['role'] == 'system' %}" + system + "{% elif m['role'] == 'user' %}" + user
    return _each(branches + "{% elif m['role'] == 'assistant' %}" + assistant + "{% endif %}", answer)


_TURN = "{{ '<|START_OF_TURN_TOKEN|><|%s_TOKEN|>' + m['content'] | trim + '<|END_OF_TURN_TOKEN|>' }}"
_GEMMA = (
    "{% set ns = namespace(first='') %}{% for m in messages %}{% if m['role'] == 'system' %}"
    "{% set ns.first = ns.first + m['content'] | trim %}{% else %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' }}"
    "{% if ns.first and m['role'] != 'assistant' %}{{ ns.first + '\\n\\n' }}{% set ns.first = '' %}{% endif %}"
    "{{ m['content'] | trim + '<end_of_turn>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)


def _mistral(space: str) -> str:
    return _by_role(
        "{{ '[SYSTEM_PROMPT]" + space + "' + m['content'] + '[/SYSTEM_PROMPT]' }}",
        "{{ '[INST]" + space + "' + m['content'] + '[/INST]' }}",
        "{{ '" + space + "' + m['content'] + '</s>' }}",
        "",
    )


NAMED: dict[str, str] = {
    "chatml": CHATML,
    "llama3": _each(
        "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}",
        "<|start_header_id|>assistant<|end_header_id|>\\n\\n",
    ),
    "command-r": _by_role(
        _TURN % "SYSTEM", _TURN % "USER", _TURN % "CHATBOT", "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    ),
    "gemma": _GEMMA,
    "phi3": _each("{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}", "<|assistant|>\\n"),
    "phi4": _each(
        "{{ '<|im_start|>' + m['role'] + '<|im_sep|>' + m['content'] + '<|im_end|>' }}",
        "<|im_start|>assistant<|im_sep|>",
    ),
    "falcon3": _each("{{ '<|' + m['role'] + '|>\\n' + m['content'] + '\\n' }}", "<|assistant|>\\n"),
    "zephyr": _each(
        "{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|endoftext|>\\n' }}", "<|assistant|>\\n"
    ),
    "mistral-v7": _mistral(" "),
    "mistral-v7-tekken": _mistral(""),
    "deepseek3": _by_role(
        "{{ m['content'] + '\\n\\n' }}",
        "{{ '<｜User｜>' + m['content'] }}",
        "{{ '<｜Assistant｜>' + m['content'] + '<｜end▁of▁sentence｜>' }}",
        "<｜Assistant｜>",
    ),
}
