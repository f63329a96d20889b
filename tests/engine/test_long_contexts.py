"""Contexts beyond the trained length: stretched by flags of rope for all models of a load, otherwise capped."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest
from engine_rig import FIXTURES, GREEDY
from sampling import slow

from pyspec.config import settings_from
from pyspec.engine.api import Engine
from pyspec.engine.plan.describe import Description, describe
from pyspec.engine.plan.longest import widened
from pyspec.errors import BadSlotFile, ConfigError

LLAMA, QWEN35, MISTRAL3 = (FIXTURES / f"{name}.gguf" for name in ("llama", "qwen35", "mistral3"))
YARN = {"rope_scaling": "yarn", "rope_scale": 4.0, "yarn_orig_ctx": 32}
PROMPT = tuple(random.Random(7).choices(range(256), k=90))


def described(path: Path, **values: object) -> Description:
    return describe(path, settings_from({"device": "cpu", "spec_type": "none", **values}))


def load(path: Path, **values: object) -> Engine:
    plain = {"ctx": 256, "kv_type": "f32", "page_size": 16, "warm_up": False, "device": "cpu"}
    draft = str(values.pop("draft", "auto"))
    return Engine.open(str(path), draft, {**plain, "check_tap_shift": False, **values})


@pytest.mark.parametrize(
    ("path", "flags", "n_ctx"),
    [
        (LLAMA, {}, 1024),
        (LLAMA, {"rope_scaling": "yarn", "rope_scale": 2.0}, 2048),
        (LLAMA, {"rope_scaling": "yarn", "rope_scale": 2.0, "yarn_orig_ctx": 600}, 1200),
        (LLAMA, {"rope_scaling": "none", "rope_scale": 2.0}, 1024),
        (MISTRAL3, {"rope_scaling": "yarn", "rope_scale": 16.0}, 4096),
        # llama-server stretches for YaRN alone
        (LLAMA, {"rope_scaling": "linear", "rope_scale": 2.0}, 2048),
        (LLAMA, {"rope_freq_scale": 0.25}, 4096),
    ],
)
def test_a_context_ends_where_llama_server_ends_it(
    path: Path, flags: dict[str, object], n_ctx: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pyspec")
    d = described(path, ctx=8192, **flags)
    assert (d.n_ctx, d.n_ctx_train, d.settings.ctx) == (n_ctx, n_ctx, n_ctx)
    warned = [r.getMessage() for r in caplog.records if "trained for" in r.getMessage()]
    assert len(warned) == 1 and f"-c {n_ctx} is used, as in llama-server" in warned[0]
    caplog.clear()
    assert widened(described(path, **flags)).n_ctx == n_ctx
    assert ("as rope is stretched" in caplog.text) == (n_ctx != d.config.n_ctx_train)


def test_another_base_has_no_known_end(caplog: pytest.LogCaptureFixture) -> None:
    assert described(LLAMA, ctx=3000, rope_freq_base=1e6).n_ctx == 3000
    assert "-c 3000 is more than the model was trained for (1024)" in caplog.text


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"rope_scale": 2.0, "rope_freq_scale": 0.5}, "--rope-scale and --rope-freq-scale exclude"),
        ({"rope_scale": 1e-9}, "--rope-scale is 1e-09; want"),
        ({"yarn_ext_factor": 1.5}, "--yarn-ext-factor is 1.5; want"),
        ({"rope_scaling": "longrope"}, "--rope-scaling is 'longrope'; want"),
    ],
)
def test_wrong_flags_are_named(flags: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        settings_from(flags)


@pytest.mark.parametrize(
    ("path", "draft", "more"),
    [
        (LLAMA, LLAMA, {"n_draft_max": 3, "n_draft_fixed": True}),
        (QWEN35, "auto", {"spec_type": "mtp", "n_draft_fixed": True}),
        slow(LLAMA, "auto", {"spec_type": "none", "tp": 2, "threads": 1}),
        (LLAMA, "auto", {"spec_type": "none", "kernels": "reference"}),
        (LLAMA, "auto", {"spec_type": "none", "plain_loop": True}),
    ],
    ids=["a draft model", "mtp", "two ranks", "torch", "without recordings"],
)
def test_every_model_and_rank_of_a_load_is_stretched(
    path: Path, draft: Path | str, more: dict[str, object]
) -> None:
    with load(path, spec_type="none", **YARN) as e:
        want = e.generate(PROMPT, params=GREEDY, max_tokens=24).tokens
    with load(path, spec_type="none") as e:
        assert e.generate(PROMPT, params=GREEDY, max_tokens=24).tokens != want
    with load(path, draft=draft, **YARN, **more) as e:
        done = e.generate(PROMPT, params=GREEDY, max_tokens=24)
    assert done.tokens == want
    if draft == path:
        assert done.timings.draft_n_accepted == done.timings.draft_n, "the drafter is the target"


def test_a_slots_file_is_of_one_scaling(tmp_path: Path) -> None:
    file = tmp_path / "a.slot"
    with load(LLAMA, spec_type="none", **YARN) as e:
        assert e.info.rope == "scaling yarn, factor 4, original context 32"
        e.generate(PROMPT, params=GREEDY, max_tokens=2)
        e.save_slot(0, file)
        e.restore_slot(0, file)
    with load(LLAMA, spec_type="none") as e:
        assert e.info.rope == ""
        with pytest.raises(BadSlotFile, match="another scaling of rope"):
            e.restore_slot(0, file)
