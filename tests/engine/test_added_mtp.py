"""An MTP block behind glm4moe's trunk drafts, and the text stays that of the trunk alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine_rig import FIXTURES, plain_rig, rig
from rewrite import rewrite

from pyspec.gguf import open_gguf

GLM = FIXTURES / "glm4moe.gguf"
PROMPTS = ([5, 9, 2, 40, 7], [100, 3, 3, 8], [250, 17])


def with_block(path: Path) -> Path:
    """The fixture with a copy of its last block as a NextN block, counted as such."""
    with open_gguf(GLM) as file:
        new = {
            name.replace("blk.2.", "blk.3."): file.raw(name).view("<f4").reshape(info.shape)
            for name, info in file.tensors.items()
            if name.startswith("blk.2.")
        }
    n = 32
    new |= {f"blk.3.nextn.{x}.weight": np.ones(n) for x in ("enorm", "hnorm", "shared_head_norm")}
    new["blk.3.nextn.eh_proj.weight"] = np.random.default_rng(1).standard_normal((n, 2 * n)) / 8
    keys = {"glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 1}
    return rewrite(GLM, path, change=keys, add=new)


@pytest.mark.parametrize("np_", [1, 3])
def test_the_text_is_that_of_the_trunk(np_: int, tmp_path: Path) -> None:
    path = with_block(tmp_path / "m.gguf")
    want = [plain_rig(GLM).generate(prompt, 40).tokens for prompt in PROMPTS]
    r = rig(path, np=np_, spec_type="mtp", n_draft_max=3, n_draft_fixed=True)
    heard = r.all(PROMPTS, 40)
    assert [h.tokens for h in heard] == want
    assert sum(h.timings.draft_n for h in heard) > 100
