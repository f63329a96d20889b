"""Loads with a drafter that ranks divide: a rank that is gone while it loads its part ends the load, with the reason."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import pytest
import torch
from engine_rig import DEMO, DEMO_DRAFT

from pyspec.config import EngineSettings
from pyspec.cuda.collective import Collective
from pyspec.draft import dflash_net
from pyspec.engine.load.ranks import Ranks
from pyspec.engine.process.core import EngineCore
from pyspec.errors import DoesNotFit, PyspecError, RankLost
from pyspec.models.bound import Block

SOON_S = (
    100.0  # seconds, also on a busy machine: far below the wait for a rank that does not come (JOIN_S)
)

GOES = """
import os, signal, sys
from pyspec.draft import dflash_net
from pyspec.engine.process import rank_main
from pyspec.errors import DoesNotFit
how, when = sys.argv[1:3]
def goes(*args):
    if how == "refuses":
        raise DoesNotFit("there is no room for a drafter")
    os.kill(os.getpid(), getattr(signal, how))
if when == "before it reads":
    rank_main._load_drafter = goes
else:
    dflash_net.link_sums = goes
rank_main.main(int(sys.argv[3]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "error", "why"),
    [
        ("SIGKILL", RankLost, "rank 1 of 2: its process ended: signal 9"),
        ("SIGSTOP", RankLost, "rank 1 of 2: its process has been silent"),
        ("refuses", DoesNotFit, "there is no room for a drafter"),
    ],
)
@pytest.mark.parametrize("when", ["before it reads", "in an exchange"])
def test_a_rank_that_is_gone_while_the_drafter_loads_ends_the_load(
    how: str, error: type[PyspecError], why: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exchange(ranks: Collective, blocks: Sequence[Block]) -> None:
        """As on GPUs, whose ranks compare the bits of their sums there."""
        ranks.sum(torch.ones(3))

    monkeypatch.setattr(dflash_net, "link_sums", exchange)
    command = (sys.executable, "-c", GOES, how, when)
    monkeypatch.setattr(Ranks.__init__, "__kwdefaults__", {"command": command})
    settings = EngineSettings(
        tp=2,
        np=2,
        ctx=256,
        device="cpu",
        kv_type="f32",
        warm_up=False,
        threads=1,
        draft_path=DEMO_DRAFT,
    )
    began = time.monotonic()
    with pytest.raises(error, match=why):
        EngineCore.load(DEMO, settings)
    assert time.monotonic() - began < SOON_S
