"""Faults of a compiler that show in its machine code for NVIDIA's GPUs, and that no interpreter of the source can find.

ptxas 12.8, which comes with Triton 3.6, adds the two halves of a 64-bit number in uniform registers. Where a kernel fills all registers it
has taken one register for both halves: descriptors of tensor cores' operands then point anywhere, and the kernel ends with an illegal
memory access, or with wrong numbers.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

LOW = re.compile(r"UIADD3 (UR\d+), (UP\d), (UR\d+), (-?0x\w+),")
HIGH = re.compile(r"UIADD3\.X (UR\d+), (UR\d+), (-?0x\w+), URZ, (UP\d),")
WRITTEN = re.compile(r"(?:@!?U?P\w+ )?[\w.]+ (?:UP\d, )*(UR\d+)\b")


def broken_sums(code: str) -> list[str]:
    """Lines that add a constant to the upper half of a 64-bit number, and take it from the register of the lower half."""
    halves: dict[str, str] = {}  # the lower half's register, by its carry, until it is overwritten
    found = []
    for line in code.splitlines():
        text = re.sub(r"/\*.*?\*/", "", line).replace(".reuse", "").strip()
        if (high := HIGH.match(text)) and halves.get(high[4]) == high[2]:
            found.append(text)
        if written := WRITTEN.match(text):
            halves = {carry: own for carry, own in halves.items() if own != written[1]}
        if (low := LOW.match(text)) and low[1] != low[3]:
            halves[low[2]] = low[3]
    return found


def disassembled(cubin: bytes, tool: Path) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True)
    return done.stdout
