"""A kernel's text, preprocessed, to C++ that device.h compiles.

Three things CUDA has and C++ has not are rewritten, on the same lines: shared variables become references into the
block's memory, `asm` statements become calls of functions named after the instruction (the line first), launch bounds and sizes of
clusters become constants that can be asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_CLUSTER = r"\b__cluster_dims__\s*\(([^()]*)\)"
_SPECIAL = ((re.compile(r"mbarrier\.try_wait\.parity\."), "ptx_mbarrier_wait(__LINE__, %0, %1)"),)
"""Templates of several instructions, loops for the most part, and the one call each stands for."""


def translated(text: str) -> str:
    """C++ of a preprocessed kernel file, with a way to start each of its kernels."""
    text = _replace_calls(text, r"\basm\b\s*(?:volatile\b\s*)?\(", _asm)
    text = re.sub(r"\b__maxnreg__\s*\(\s*\d+\s*\)", "__launch_bounds__(1024)", text)
    kernels: list[tuple[str, str]] = []

    def bounds(body: str) -> str:
        kernels.append((split(body)[0], ""))
        return ""

    text = _replace_calls(text, r"\b__launch_bounds__\s*\(", bounds)
    clusters = {name: dims for dims, name in re.findall(rf"{_CLUSTER}\s*(\w+)\s*\(", text)}
    text = re.sub(_CLUSTER, "", text)
    names = re.findall(r"\b__global__\s+void\s+(\w+)\s*\(", text)
    if len(names) != len(kernels):
        raise ValueError("each kernel must have bounds, after `void`")
    text = _shared(text)
    for name, (limit, _) in zip(names, kernels, strict=True):
        text += f'\nextern "C" void emulator_start_{name}(void** args) {{ start({name}, args); }}'
        text += f'\nextern "C" int emulator_bound_{name}() {{ return {limit}; }}'
        dims = clusters.get(name, "1, 1, 1")
        text += f'\nextern "C" int emulator_cluster_{name}(int i) {{ const int dims[] = {{{dims}}}; return dims[i]; }}'
        text += f'\nextern "C" void emulator_sizes_{name}(int* out) {{ sizes_of({name}, out); }}'
    return text + "\n"


def split(text: str, at: str = ",") -> list[str]:
    """Parts of `text` between characters `at` that are in no bracket and no string."""
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        c = text[i]
        if c == '"':
            i = _end_of_string(text, i)
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        elif c == at and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
        i += 1
    return [*parts, text[start:].strip()]


def _end_of_string(text: str, start: int) -> int:
    i = start + 1
    while text[i] != '"':
        i += 2 if text[i] == "\\" else 1
    return i


def _closing(text: str, start: int) -> int:
    """Where the bracket that stands at `start` closes."""
    depth, i = 0, start
    while True:
        if text[i] == '"':
            i = _end_of_string(text, i)
        elif text[i] in "([{":
            depth += 1
        elif text[i] in ")]}":
            depth -= 1
            if depth == 0:
                return i
        i += 1


def _replace_calls(text: str, pattern: str, make: Callable[[str], str]) -> str:
    """Every `pattern` that ends in an open bracket, up to where it closes, replaced; as many lines as before."""
    out, done = [], 0
    for match in re.finditer(pattern, text):
        if match.start() < done:
            continue
        end = _closing(text, match.end() - 1)
        old = text[match.start() : end + 1]
        out += [text[done : match.start()], make(text[match.end() : end]), "\n" * old.count("\n")]
        done = end + 1
    return "".join([*out, text[done:]])


def _asm(body: str) -> str:
    body = re.sub(r"^#.*$", "", body, flags=re.MULTILINE)  # the preprocessor's own lines
    template, *operands = split(body, ":")
    values = [_closing_value(o) for part in operands[:2] for o in split(part) if o]
    return re.sub(r"%(\d+)", lambda m: values[int(m.group(1))], _call(_literal(template)))


def _closing_value(operand: str) -> str:
    """`"=r"(x)` -> (x)."""
    return operand[operand.index("(") :]


def _literal(text: str) -> str:
    parts = re.findall(r'"((?:[^"\\]|\\.)*)"', text)
    return "".join(parts).replace("\\n", "\n").replace("\\t", " ").strip()


def _call(template: str) -> str:
    for pattern, call in _SPECIAL:
        if pattern.search(template):
            return call
    statement = template.rstrip(";").strip()
    if ";" in statement:
        raise ValueError(f"several instructions in one asm statement: {template!r}")
    name, _, rest = statement.partition(" ")
    name = re.sub(r"\.L2::\d+B", "", name)
    operands = [_operand(o) for o in split(rest) if o and o != "_"]
    return f"ptx_{re.sub(r'[^A-Za-z0-9]', '_', name)}({', '.join(['__LINE__', *operands])})"


def _operand(text: str) -> str:
    if text.startswith("{"):
        return f"refs({text[1:-1]})"
    return text[1:-1] if text.startswith("[") else text


_DYNAMIC = re.compile(r"extern\s+__shared__\s+(?:__align__\((\w+)\)\s*)?(\w+)\s+(\w+)\[\];")
_DECLARED = re.compile(
    r"__shared__\s+(?:__align__\((\w+)\)\s*)?((?:unsigned\s+|long\s+)*\w+)\s+([^;=]+);"
)


def _shared(text: str) -> str:
    text = _DYNAMIC.sub(
        lambda m: (
            f"{m[2]}* const {m[3]} = static_cast<{m[2]}*>(dynamic_shared({m[1] or f'alignof({m[2]})'}));"
        ),
        text,
    ).replace("(dynamic_shared(", "(emulator::dynamic_shared(")
    count = 0

    def declared(match: re.Match[str]) -> str:
        nonlocal count
        align, type, names = match.groups()
        out = []
        for name in split(names):
            plain, dims = re.fullmatch(r"(\w+)\s*((?:\[.*\])?)", name, re.DOTALL).groups()  # type: ignore[union-attr]
            place = (
                f"emulator::static_shared({count}, sizeof({type}{dims}), {align or f'alignof({type})'})"
            )
            out.append(f"{type} (&{plain}){dims} = *static_cast<{type} (*){dims}>({place});")
            count += 1
        return " ".join(out)

    return _DECLARED.sub(declared, text)
