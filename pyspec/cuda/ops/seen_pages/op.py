"""`seen_pages`: a batch's rows as sequences over the blocks that they chose."""

from __future__ import annotations

from pyspec.cuda.op import Op, declared
from pyspec.cuda.ops.seen_pages import cpu, cuda, ref

seen_pages: Op[ref.SeenPagesSpec, ref.SeenPages] = declared(
    ref,
    cuda,
    cpu,
    shapes=lambda device: [ref.SeenPagesSpec(device, 4, 512)],  # Blocks of 4 tokens, 512 of them
    in_prompts=False,
)
