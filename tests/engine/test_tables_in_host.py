"""Tables whose rows kernels read in the host's memory, beside an emulated card: the logits, drafts and texts of tables on the card, to the bit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_rig import DEVICE, rig
from torch import Tensor

from pyspec import synth
from pyspec.config import EngineSettings
from pyspec.cuda import pinned
from pyspec.cuda.ops.embed import cuda as embed_cuda
from pyspec.cuda.ops.embed.op import embed
from pyspec.cuda.ops.ngrams.op import ngrams
from pyspec.device.worker import Launched
from pyspec.engine.plan import longest
from pyspec.engine.plan.describe import Description
from pyspec.errors import DeviceError
from pyspec.gguf import GGMLType, open_gguf
from pyspec.logits import LogitReader
from pyspec.models import weights
from pyspec.models.host import HostBytes
from pyspec.models.placement import Placement
from pyspec.models.wants import EMBEDDING, HEAD, TOKEN_INPUTS
from pyspec.slots.round import Round
from pyspec.synth.dims import TINY, widened

sys.path.append(str(Path(__file__).parents[1] / "kernels"))

from emulated.machine import needs_compiler
from emulated.ops import CARD, of_a_card, only

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(DEVICE != "cpu", reason="kernels run thread by thread on the CPU here"),
]
OPS = embed, ngrams
PROMPTS = [[(11 * i * i + 5 * i + k) % 250 for i in range(n)] for k, n in ((1, 9), (2, 14), (3, 5))]
N_TEXT = 20
KINDS = {
    "qwen4exp": ("iq4_nl", {}, (TOKEN_INPUTS,)),
    "qwen4exp, embedding": ("q8_0", {}, (TOKEN_INPUTS, EMBEDDING)),
    "gemma4": (
        "q4_k",
        {"n_layer": 4, "n_input": 128, "n_sharing": 2},
        (TOKEN_INPUTS, EMBEDDING),
    ),  # which is the head, too
}

CASES = [pytest.param(kind, marks=pytest.mark.slow) if "," in kind else kind for kind in KINDS]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tables")
    return {
        kind: synth.write(
            replace(widened(TINY[kind.partition(",")[0]]), **sizes),  # type: ignore[arg-type]
            folder / f"{i}.gguf",
            quant=quant,
        )
        for i, (kind, (quant, sizes, _)) in enumerate(KINDS.items())
    }


class Host:
    """In place of a GPU's driver: what is locked, and what kernels read there."""

    def __init__(self) -> None:
        self.locked, self.why, self.n_read = dict[int, int](), "", 0

    def register(self, address: int, n_bytes: int, device: torch.device) -> str:
        assert device == CARD
        self.locked |= {} if self.why else {address: n_bytes}
        return self.why

    def on_device(self, host: Tensor, device: torch.device) -> Tensor:
        assert device == CARD and self.locked[host.data_ptr()] >= host.numel()
        return host.view(-1)

    def run(self, launch: Any, raw: Tensor, tokens: Tensor, *more: Any) -> Tensor:
        self.n_read += len(tokens) * (raw.data_ptr() in self.locked)
        return RUN(launch, raw, tokens, *more)


RUN: Any = embed_cuda.EmbedLaunch._run


@contextmanager
def placed(monkeypatch: pytest.MonkeyPatch, *tables: str) -> Iterator[Host]:
    """Engines that are loaded meanwhile have these in the host's memory."""
    host, real = Host(), longest.fitted

    def fitted(d: Description) -> Description:
        return replace(real(d), placement=Placement(tables=tables))

    with monkeypatch.context() as patch, only("cuda", OPS, of_a_card):
        patch.setattr(pinned, "register", host.register)
        patch.setattr(pinned, "unregister", host.locked.pop)
        patch.setattr(pinned, "on_device", host.on_device)
        patch.setattr(weights, "HostBytes", lambda device: HostBytes(CARD))
        patch.setattr(longest, "fitted", fitted)
        patch.setattr(embed_cuda.EmbedLaunch, "_run", lambda *given: host.run(*given))
        yield host


def texts(path: Path, np: int, **settings: object) -> tuple[list[list[int]], list[list[int]]]:
    """Texts, and the rows of each sequence that was launched: drafts are among them."""
    r = rig(path, np=np, weights="packed", ctx=64, **settings).call_by_call()  # not recorded
    launched = list[list[int]]()
    launch = r.loop.worker.launch

    def watched(round_: Round) -> Launched:
        launched.extend(list(seq.tokens) for seq in round_.seqs)
        return launch(round_)

    r.loop.worker.launch = watched  # type: ignore[method-assign]
    heard = r.all(PROMPTS[: max(np, 2)], N_TEXT)
    return [h.tokens for h in heard], launched


DRAFTS: dict[str, Any] = {"spec_type": "mtp", "n_draft_max": 3, "n_draft_fixed": True}


@pytest.mark.parametrize("np", [1, 3])
@pytest.mark.parametrize("kind", CASES)
def test_texts_and_drafts_are_those_of_tables_on_the_card(
    kind: str, np: int, paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = DRAFTS if kind.startswith("qwen4exp") else {"spec_type": "none"}
    with placed(monkeypatch) as host:
        want = texts(paths[kind], np, **drafts)
        assert not host.locked and not host.n_read
    with placed(monkeypatch, *KINDS[kind][2]) as host:
        got = texts(paths[kind], np, **drafts)
        assert host.n_read > 60, "kernels read rows there"
    assert got == want and all(len(text) == N_TEXT for text in got[0])
    n_verify = sum(len(tokens) == 1 + DRAFTS["n_draft_max"] for tokens in want[1])
    assert (n_verify > 9) == (drafts is DRAFTS), "an anchor and its drafts"


@pytest.mark.parametrize("kind", CASES)
def test_logits_have_the_bits_of_tables_on_the_card(
    kind: str, paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [t for prompt in PROMPTS for t in prompt]
    with open_gguf(paths[kind]) as file:
        types = [file.tensors[name].type for name in KINDS[kind][2]]
        assert (HEAD in file.tensors) == (kind != "gemma4") and GGMLType.F32 not in types

    def logits() -> Tensor:
        reader = LogitReader(
            paths[kind], EngineSettings(device="cpu", ctx=64, batch=5, weights="packed")
        )
        return torch.cat([rows for _, rows in reader.read(tokens)])

    with placed(monkeypatch):
        want = logits()
    with placed(monkeypatch, *KINDS[kind][2]) as host:
        assert torch.equal(logits(), want) and host.n_read >= len(tokens) * len(types)
    assert float(want.std()) > 0


def test_memory_that_can_not_be_locked_is_refused_by_name(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with placed(monkeypatch, TOKEN_INPUTS) as host:
        host.why = "CUDA_ERROR_OUT_OF_MEMORY"
        with pytest.raises(DeviceError, match=f"rows of {TOKEN_INPUTS} there.*-ot {TOKEN_INPUTS}=CUDA0"):
            rig(paths["qwen4exp"], weights="packed", ctx=64, spec_type="none")
