"""Cases of `attend` of the size of models, for cards and CPUs."""

from __future__ import annotations

import torch

from pyspec.cuda.ops.attend.cases import Case
from pyspec.slots.kv_types import Q4_0, Q4_1, Q5_0, Q5_1

PICTURES = ((1, 9, 40), (1, 40, 41), (1, 47, 99), (2, 1000, 1023), (2, 1024, 1049))
CASES: dict[str, Case] = {
    "one row": Case(24, 4, 256, torch.float16, [(299, 1)]),
    "first token": Case(24, 4, 256, torch.float16, [(0, 1), (0, 5)]),
    "ragged": Case(24, 4, 256, torch.float16, [(0, 3), (255, 1), (256, 16), (1023, 2), (1500, 7)], 32, pad=(5, 2)),
    "ragged bf16": Case(24, 4, 256, torch.bfloat16, [(17, 9), (2047, 16), (700, 1)], 64, pad=(1, 1)),
    "group 16": Case(32, 2, 128, torch.bfloat16, [(130, 4), (900, 1), (3, 16)], 16),
    "one head a group": Case(4, 4, 64, torch.float16, [(70, 1), (500, 32), (63, 2)], 16),
    "group 5": Case(10, 2, 64, torch.float16, [(1111, 3), (64, 11)], 32),
    "drafter block": Case(32, 8, 128, torch.float16, [(3000, 16), (100, 16), (2048, 16)], 16, 2048, True, (16, 1)),
    "small window": Case(32, 8, 128, torch.bfloat16, [(600, 5), (127, 2), (9, 4)], 16, 7),
    "chunks": Case(8, 2, 128, torch.float16, [(600, 5), (127, 2), (96, 70), (9, 4)], 16, -48),
    "window of one": Case(8, 2, 64, torch.float16, [(600, 5), (128, 1)], 16, 1),
    "wide rows": Case(24, 4, 256, torch.float16, [(40, 200), (0, 33)], 64, pad=(7, 1)),
    "f32": Case(6, 2, 64, torch.float32, [(100, 3), (33, 1)], 16, pad=(2, 1)),
    "unscaled": Case(6, 2, 64, torch.float32, [(100, 3), (33, 1)], 16, 50, scale=1.0),
    "odd size": Case(6, 2, 96, torch.float16, [(100, 3), (33, 1)], 16, 50),
    "q8_0": Case(24, 4, 256, torch.int8, [(0, 3), (255, 1), (256, 16), (1023, 2), (1500, 7)], 32, pad=(5, 2)),
    "q8_0 group 16": Case(32, 2, 128, torch.int8, [(130, 4), (900, 1), (3, 16)], 16),
    "q8_0 block": Case(32, 8, 128, torch.int8, [(3000, 16), (100, 16), (2048, 16)], 16, 2048, True, (16, 1)),
    "q8_0 one head a group": Case(4, 4, 64, torch.int8, [(70, 1), (500, 32), (63, 2)], 16, 7),
    "q8_0 odd size": Case(6, 2, 96, torch.int8, [(100, 3), (33, 1)], 16, 50, sinks=True),
    "f8": Case(24, 4, 256, torch.float8_e4m3fn, [(0, 3), (255, 1), (256, 16), (1023, 2), (1500, 7)], 32, pad=(5, 2)),
    "f8 window": Case(32, 8, 128, torch.float8_e4m3fn, [(600, 5), (127, 2), (9, 4)], 16, 7),
    "f8 wide rows": Case(24, 4, 64, torch.float8_e4m3fn, [(40, 200), (0, 33)], 64, pad=(7, 1)),
    "sinks": Case(64, 8, 64, torch.float16, [(1500, 7), (0, 1), (128, 4)], 32, 128, pad=(5, 2), sinks=True),
    "sinks bf16": Case(32, 8, 128, torch.bfloat16, [(3000, 16), (100, 16)], 16, 0, True, (16, 1), sinks=True),
    "keys alone": Case(64, 1, 512, torch.float16, [(0, 3), (300, 4), (127, 9)], 32, 128, sinks=True, keys_only=True),
    "capped": Case(16, 8, 256, torch.float16, [(1500, 7), (0, 1), (128, 4)], 32, 70, pad=(5, 2), cap=3.0),
    "capped bf16, sinks": Case(32, 8, 128, torch.bfloat16, [(900, 16), (100, 16)], 16, 0, True, (16, 1), sinks=True, cap=1.5),
    "capped f32": Case(6, 2, 64, torch.float32, [(100, 3), (33, 1)], 16, 50, pad=(2, 1), cap=2.0),
    "keys alone of 128": Case(16, 1, 128, torch.int8, [(0, 3), (300, 4), (127, 9)], 32, keys_only=True),
    "pictures": Case(8, 4, 256, torch.float16, [(70, 1), (9, 90), (1011, 40)], 16, pad=(5, 2), pictures=PICTURES),
    "pictures in windows": Case(8, 4, 64, torch.bfloat16, [(70, 1), (9, 90), (1011, 40)], 32, 7, pictures=PICTURES),
    "pictures in q8_0": Case(8, 2, 128, torch.int8, [(70, 1), (9, 90), (1011, 40)], 16, 20, pictures=PICTURES),
    "pictures in f32": Case(6, 2, 96, torch.float32, [(70, 1), (9, 90), (1011, 40)], 16, 11, pad=(2, 1), pictures=PICTURES),
}  # fmt: skip
MIXED: dict[str, Case] = {
    "f16 and q8_0": Case(8, 2, 64, torch.float16, [(70, 3), (300, 1)], 16, pad=(3, 1), v_dtype=torch.int8),
    "q8_0 and f16": Case(6, 2, 96, torch.int8, [(100, 3), (33, 1)], 16, 50, sinks=True, v_dtype=torch.float16),
    "f32 and bf16": Case(8, 2, 64, torch.float32, [(40, 5), (0, 1)], 16, pad=(1, 1), v_dtype=torch.bfloat16),
    "bf16 and f32": Case(4, 4, 32, torch.bfloat16, [(270, 2)], 32, v_dtype=torch.float32),
    "f8 and bf16": Case(8, 2, 128, torch.float8_e4m3fn, [(65, 4)], 16, 0, True, v_dtype=torch.bfloat16),
}  # fmt: skip
"""Keys and values of different types, which not every implementation takes."""
PACKED: dict[str, Case] = {
    "q4_0": Case(24, 4, 256, Q4_0, [(0, 3), (255, 1), (256, 16), (1500, 7)], 32, pad=(5, 2)),
    "q4_1": Case(32, 8, 128, Q4_1, [(600, 5), (127, 2), (9, 4)], 16, 7),
    "q5_0 block": Case(32, 8, 128, Q5_0, [(3000, 16), (100, 16)], 16, 2048, True, (16, 1)),
    "q5_1": Case(4, 4, 64, Q5_1, [(70, 1), (500, 32), (63, 2)], 16, sinks=True),
    "q4_0 odd size": Case(6, 2, 96, Q4_0, [(100, 3), (33, 1)], 16, 50),
    "q8_0 and q4_0": Case(24, 4, 256, torch.int8, [(0, 3), (255, 1), (256, 16), (1500, 7)], 32, pad=(5, 2), v_dtype=Q4_0),
    "q4_0, capped": Case(16, 4, 128, Q4_0, [(600, 5), (127, 2)], 16, cap=2.0),
    "pictures in q4_0": Case(8, 2, 128, Q4_0, [(70, 1), (9, 90), (1011, 40)], 16, 20, pictures=PICTURES),
    "q5_1 and f16": Case(8, 2, 128, Q5_1, [(130, 4), (900, 1)], 16, 70, v_dtype=torch.float16),
    "bf16 and q5_0": Case(8, 2, 64, torch.bfloat16, [(70, 3), (300, 1)], 16, v_dtype=Q5_0),
    "f8 and q4_1": Case(6, 2, 96, torch.float8_e4m3fn, [(40, 5), (0, 1)], 16, sinks=True, v_dtype=Q4_1),
}  # fmt: skip
"""Keys or values of 4 and 5 bits, which Triton does not take."""
