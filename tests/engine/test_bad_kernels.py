"""Kernels that are wrong, crash, hang or raise are planted in front of the reference: the model's text is right all the same."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
from engine_rig import FIXTURES, rig
from known_texts import N_TEXT, known_texts

from pyspec.cuda import checker, verdicts
from pyspec.cuda.ops.gdn import op as gdn_op

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from planted_gdn import planted

QWEN35 = FIXTURES / "qwen35.gguf"


@pytest.mark.slow
def test_bad_kernels_are_refused_and_the_text_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    texts = list(known_texts(QWEN35).items())[:2]  # made without the planted kernels
    own = checker.Checker({"start": 60.0, "binding": 20.0, "check": 5.0})
    monkeypatch.setattr(checker, "shared", lambda: own)
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(gdn_op, "gdn", planted)
    with caplog.at_level(logging.INFO, "pyspec.cuda.op"):
        r = rig(QWEN35, np=2, spec_type="mtp", n_draft_max=3, n_draft_fixed=True, page_size=16)
    own.close()
    told = [record.getMessage() for record in caplog.records if record.name == "pyspec.cuda.op"]
    (said,) = [line for line in told if line.startswith("gdn ")]
    assert said.startswith("gdn runs as torch (wrong: outputs differ from the reference by")
    assert "crashing: its check ended the process: killed by signal 6" in said
    assert "hanging: its check took more than 5 s" in said
    assert (
        "raising: failed its check: RuntimeError: CUDA error: an illegal memory access was encountered"
        in said
    )
    heard = r.all([p for p, _ in texts], N_TEXT)
    assert [h.tokens for h in heard] == [t for _, t in texts]
    assert len(list(verdicts.folder().iterdir())) == 4

    def never(*args: object) -> None:
        raise AssertionError("it is known already")

    monkeypatch.setattr(own, "check", never)
    planted.verdicts.clear()
    planted.decided.clear()
    assert rig(QWEN35, spec_type="none").generate(texts[0][0], N_TEXT).tokens == texts[0][1]
