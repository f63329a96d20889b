"""Look, then fetch: a model that does not run or fit, or cannot be reached, is refused before a download, with an alternative."""
# ruff: noqa: F811

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hub_server import REPO, FakeHub
from test_hub import there  # noqa: F401  (a fixture)

from pyspec import hub, synth
from pyspec.catalog import catalogue, find
from pyspec.cli import main
from pyspec.engine.plan.look import smaller_model
from pyspec.errors import ConfigError, DoesNotFit, DownloadError
from pyspec.hub import questions as network
from pyspec.progress import listening

HEAD = 60_000  # bytes that are fetched of a file here: tiny models' metadata and lists of tensors
WIDE = synth.Dims(
    arch="qwen3", name="wide", n_layer=2, n_embd=256, n_ff=16384, n_head=4, n_head_kv=2, head_dim=64, n_vocab=320, vocab="qwen2", n_ctx=1024, rope_base=1e5
)  # fmt: skip
SMALL_LOAD = ("-np", "1", "-c", "256", "-ub", "16", "--no-warmup")


@pytest.fixture(autouse=True)
def _small_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspec.hub.heads.FIRST_BYTES", HEAD)


def call(*args: str) -> Result:
    return CliRunner().invoke(main, args)


def gets(fake: FakeHub) -> set[str]:
    """Ranges that were asked for; "" is a whole file."""
    return {span for method, _, span in fake.asked if method == "GET"}


def renamed(path: Path, arch: bytes) -> bytes:
    """A model's file that says it is of another architecture, whose name is as long."""
    return path.read_bytes().replace(b"qwen35", arch)


@pytest.mark.parametrize(
    "command",
    [
        ("run", "-hf", REPO, "-p", "Hi"),
        ("server", "-hf", REPO, "--port", "0", "--in-process"),
        ("bench", "-hf", REPO, "-npl", "1"),
        ("verify", "-hf", REPO),
        ("pull", "-hf", REPO),
        ("logits", "-hf", REPO, "--ids", "1", "--out", "never.npz"),
        ("doctor", "-hf", REPO, "-dev", "cpu"),
        ("fit", "-hf", REPO),
    ],
    ids=lambda command: command[0],
)
def test_a_model_that_no_machine_runs_is_refused_by_its_head(
    there: FakeHub, tmp_path: Path, command: tuple[str, ...]
):
    there.files = {"m-Q8_0.gguf": renamed(synth.write("qwen35", tmp_path / "m.gguf", tiny=True, mtp=False), b"gemma9")}  # fmt: skip
    done = call(*command)
    assert done.exit_code == 3, done.output
    said = done.stderr
    assert "m-Q8_0.gguf is a model of the architecture 'gemma9'" in said and "gemma4" in said
    assert "llama-server" in said and "CONTRIBUTING.md" in said
    assert gets(there) == {f"bytes=0-{HEAD - 1}"} and not list((tmp_path / "hub").rglob("blobs/*"))


def test_an_unknown_model_with_an_mtp_block_is_no_drafter(there: FakeHub, tmp_path: Path):
    """GLM-4.5's and DeepSeek-V3's files have an MTP block: calling them drafters would mislead."""
    there.files = {"m-Q8_0.gguf": renamed(synth.write("qwen35", tmp_path / "m.gguf", tiny=True, mtp=True), b"glm4me")}  # fmt: skip
    done = call("fit", "-hf", REPO)
    assert (
        done.exit_code == 3 and "m-Q8_0.gguf is a model of the architecture 'glm4me'" in done.stderr
    ), done.output
    assert "drafter (" not in done.stderr


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many MiB are free."""

    def have(mib: int) -> None:
        for module in ("plan.memory_plan", "plan.planned_bytes"):
            monkeypatch.setattr(f"pyspec.engine.{module}.free_bytes", lambda device: mib << 20)

    return have


def wide(fake: FakeHub, folder: Path, **quants: str) -> None:
    """Files of one model in several quantisations."""
    fake.files = {
        f"m-{name}.gguf": synth.write(
            WIDE, folder / f"{name}.gguf", quant=quant, hollow=True
        ).read_bytes()
        for name, quant in quants.items()
    }


def test_what_does_not_fit_names_the_quantisation_that_does(
    there: FakeHub, tmp_path: Path, room: Callable[[int], None]
):
    wide(there, tmp_path, F32="f32", F16="f16", Q8_0="q8_0", Q4_0="q4_0")
    there.files["mmproj-m-Q8_0.gguf"] = b"no model"
    room(45)
    for command in (
        ("run", "-hf", f"{REPO}:F32", "-p", "Hi"),
        ("server", "-hf", f"{REPO}:f32", "--port", "0", "--in-process"),
    ):
        there.asked.clear()
        done = call(*command, *SMALL_LOAD)
        assert done.exit_code == 5, done.output
        assert "m-F32.gguf needs " in done.stderr
        assert f"from the same repository: -hf {REPO}:Q8_0 (" in done.stderr
        assert "--no-look" in done.stderr and len(done.stderr.split("Error: ")[-1].splitlines()) == 1
        assert "" not in gets(there) and not list((tmp_path / "hub").rglob("blobs/*"))


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("name", ["-hf", "name"])
def test_a_name_without_a_quantisation_takes_the_one_that_fits(
    there: FakeHub,
    tmp_path: Path,
    room: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
):
    """What was named is never replaced: the person may know better."""
    from pyspec import catalog

    wide(there, tmp_path, Q4_K_M="f16", Q3_K_M="q8_0", Q2_K="q4_0")
    room(45)
    entry = catalog.Entry(
        name="mine", title="", arch="qwen3", target=catalog.Source(repo=REPO, quant="Q4_K_M")
    )
    monkeypatch.setattr(catalog, "catalogue", lambda: {"mine": entry})
    own, other = (("-hf", REPO), f"-hf {REPO}:Q3_K_M") if name == "-hf" else (("mine",), "mine:Q3_K_M")
    done = call("run", *own, "-p", "Hi", "-n", "1", *SMALL_LOAD)
    assert done.exit_code == 0, done.output
    assert "m-Q4_K_M.gguf needs " in done.stderr and f": {other} is taken" in done.stderr
    whole = {file for method, file, span in there.asked if method == "GET" and not span}
    assert whole == {"m-Q3_K_M.gguf"}
    for named in (("-hf", f"{REPO}:Q4_K_M"), ("-hf", REPO, "-hff", "m-Q4_K_M.gguf"), ("mine:q4_k_m",)):
        if (named[0] == "-hf") == (name == "-hf"):
            done = call("run", *named, "-p", "Hi", *SMALL_LOAD)
            assert done.exit_code == 5 and f"{other} (" in done.stderr, done.output
    room(125)  # for more rows
    done = call("pull", *own, "--json")
    assert done.exit_code == 0 and "m-Q3_K_M" in json.loads(done.stdout)[0]["path"], done.output


@pytest.mark.slow
def test_a_program_gets_the_quantisation_that_fits(
    there: FakeHub, tmp_path: Path, room: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
):
    from pyspec import catalog
    from pyspec.engine.api import Engine

    wide(there, tmp_path, Q4_K_M="f16", Q3_K_M="q8_0")
    room(45)
    entry = catalog.Entry(name="mine", title="", arch="qwen3", target=catalog.Source(repo=REPO))
    monkeypatch.setattr(catalog, "catalogue", lambda: {"mine": entry})
    with Engine.load("mine", np=1, ctx=256, ubatch=16, warm_up=False, check_tap_shift=False) as engine:
        assert engine.info.model_path.endswith("m-Q3_K_M.gguf")


def test_with_fewer_slots_or_tokens_it_may_fit(
    there: FakeHub, tmp_path: Path, room: Callable[[int], None]
):
    wide(there, tmp_path, Q8_0="q8_0", Q4_0="q4_0")
    room(47)
    done = call("run", "-hf", REPO, "-p", "Hi", "-np", "33", "-c", "1024", "-ub", "16")
    assert done.exit_code == 5 and "This fits: -np " in done.stderr, done.output


def test_a_person_who_insists_downloads_it(there: FakeHub, tmp_path: Path, room: Callable[[int], None]):
    wide(there, tmp_path, F32="f32", Q4_0="q4_0")
    room(45)
    done = call("run", "-hf", f"{REPO}:F32", "-p", "Hi", "--no-look", *SMALL_LOAD)
    assert done.exit_code == 5 and "are free on cpu" in done.stderr
    assert "" in gets(there) and hub.from_hub(REPO, "F32").stat().st_size == len(
        there.files["m-F32.gguf"]
    )


def test_pull_tells_that_it_does_not_fit_and_goes_on(
    there: FakeHub, tmp_path: Path, room: Callable[[int], None]
):
    wide(there, tmp_path, F32="f32", Q4_0="q4_0")
    room(20)
    done = call("pull", "-hf", f"{REPO}:F32", "--json")
    assert done.exit_code == 0, done.output
    assert "too large for this machine: m-F32.gguf needs" in done.stderr
    assert "--no-look" not in done.stderr
    assert json.loads(done.stdout)[0]["bytes"] == len(there.files["m-F32.gguf"])


@pytest.mark.slow
def test_fit_names_a_file_that_would_fit(there: FakeHub, tmp_path: Path):
    wide(there, tmp_path, F32="f32", Q8_0="q8_0", Q4_0="q4_0")
    asked = ("fit", "-hf", f"{REPO}:F32", "--weights", "packed", *SMALL_LOAD)
    plan = json.loads(call(*asked, "--vram", "80G", "--json").stdout)["plan"]
    mib = (
        int((plan["total"] - (15 << 20)) / 0.96) >> 20
    )  # of 50 that the weights take as F32, and 13 as Q8_0
    about = json.loads(call(*asked, "--vram", f"{mib}M", "--json").stdout)
    assert about["flags"] == [] and f"-hf {REPO}:Q8_0" in about["instead"]
    done = call(*asked, "--vram", f"{mib}M")
    assert done.exit_code == 5
    assert f"nothing fits. This fits, from the same repository: -hf {REPO}:Q8_0 (" in done.stderr


@pytest.mark.slow
def test_what_is_here_is_not_looked_at_twice(
    there: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    there.files = {"m-Q8_0.gguf": synth.write("qwen3", tmp_path / "m.gguf", tiny=True).read_bytes()}
    hub.from_hub(REPO)
    monkeypatch.setattr("pyspec.engine.plan.look.fit", lambda *args: pytest.fail("it is here"))
    there.asked.clear()
    done = call("run", "-hf", REPO, "-p", "Hi", "-n", "2", *SMALL_LOAD)
    assert done.exit_code == 0, done.output
    assert gets(there) == set()


def test_a_head_that_is_longer_is_fetched_in_two_steps(
    there: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = synth.write("qwen35", tmp_path / "m.gguf", tiny=True, mtp=False)
    there.files = {"m-Q8_0.gguf": path.read_bytes()}
    monkeypatch.setattr("pyspec.hub.heads.FIRST_BYTES", 777)
    monkeypatch.setattr("pyspec.hub.heads.HEAD_BYTES", HEAD)
    here, away = (json.loads(call("inspect", str(path), "--json").stdout), None)
    tokens = ("tokenize", "--text", "hello", "--json")
    away = call(*tokens, "-hf", REPO)
    assert away.exit_code == 0 and away.stdout == call(*tokens, str(path)).stdout and here["tensors"]
    assert gets(there) == {"bytes=0-776", f"bytes=777-{HEAD - 1}"}


# -- the network ------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://no-such-host.invalid"])
@pytest.mark.parametrize("command", [("run", "qwen3.5-2b", "hi"), ("server", "-hf", "user/repo"), ("pull", "qwen3-4b"), ("fit", "-hf", "a/b"), ("bench", "qwen3.6-27b:Q4_K_M"), ("doctor", "qwen3.5-9b")], ids=lambda c: c[0])  # fmt: skip
def test_without_a_network_one_line_says_what_is_left(
    command: tuple[str, ...], endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import huggingface_hub

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(
        huggingface_hub.HfApi,
        "list_repo_files",
        lambda *args: pytest.fail("the library tries for half a minute"),
    )
    done = call(*command)
    assert done.exit_code == 7, done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: no network (")
    assert "-m FILE" in line
    assert "--offline" in line
    assert "pyspec server demo" in line


def test_a_resolver_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    over = threading.Event()

    def hang(*args: object, **more: object) -> list[object]:
        over.wait(30)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    monkeypatch.setattr(network, "_silent", {})
    began = time.monotonic()
    assert "is not found within 0.05 s" in network.unreachable("https://hub.example", 0.05)
    over.set()
    assert time.monotonic() - began < 20


def test_a_host_that_refuses_is_told_and_one_that_listens_is_not(monkeypatch: pytest.MonkeyPatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert network.unreachable(f"http://127.0.0.1:{port}") == ""
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
        assert network.unreachable("https://only-behind-the-proxy.invalid") == ""
    assert "refused" in network.unreachable(f"http://127.0.0.1:{port}")
    assert "refused" in network.unreachable("https://only-behind-the-proxy.invalid")


def test_what_was_downloaded_is_taken_without_a_network(
    there: FakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    path = hub.from_hub(REPO)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("pyspec.hub.fetch._said", set())
    assert hub.from_hub(REPO) == hub.from_hub(REPO) == path
    assert caplog.text.count("using the cached copy of user/repo") == 1


def test_what_does_not_answer_is_not_asked_again_at_once(monkeypatch: pytest.MonkeyPatch):
    now, asked = [100.0], list[str]()
    monkeypatch.setattr(network, "_silent", {})
    monkeypatch.setattr(network.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(
        network, "_why_silent", lambda url, patience_s: asked.append(url) or f"{url} is silent"
    )
    for at in (100.0, 101.0, 119.9, 120.1, 121.0):
        now[0] = at
        assert network.unreachable("http://a") == "http://a is silent"
    assert len(asked) == 2
    monkeypatch.setattr(network, "_why_silent", lambda url, patience_s: asked.append(url) or "")
    assert network.unreachable("http://b") == network.unreachable("http://b") == "" and len(asked) == 4


# -- progress ---------------------------------------------------------------------------------------------------------


def test_a_download_tells_how_far_it_is(there: FakeHub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pyspec.hub.fetch.REPORT_S", 0.01)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 4096)
    there.pace = 0.05
    heard: list[tuple[str, float]] = []
    with listening(lambda stage, part: heard.append((stage, part))):
        hub.from_hub(REPO)
    told = [part for stage, part in heard if stage == "download m-Q8_0.gguf"]
    assert told == sorted(told)
    assert told[0] == 0
    assert told[-1] == 1
    assert len({part for part in told if 0 < part < 1}) > 2


def test_what_draws_a_bar_draws_instead_of_the_client_library(there: FakeHub):
    from huggingface_hub.utils import are_progress_bars_disabled

    from pyspec.progress import is_drawn

    bars: list[bool] = []

    def hear(stage: str, part: float) -> None:
        if stage.startswith("download"):
            bars.append(are_progress_bars_disabled())

    was_off = are_progress_bars_disabled()
    with listening(hear, draws=True):
        assert is_drawn()
        hub.from_hub(REPO)
    assert set(bars) == {True} and not is_drawn() and are_progress_bars_disabled() == was_off


def test_a_disk_without_room_is_told_before_it_is_full(there: FakeHub, monkeypatch: pytest.MonkeyPatch):
    import shutil

    usage = shutil.disk_usage("/")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=299_999))
    with pytest.raises(
        DownloadError,
        match=r"m-Q8_0\.gguf needs 0\.3 MB of disk .* are free; HF_HOME names another folder",
    ):
        hub.from_hub(REPO)


@pytest.mark.slow
def test_run_without_a_terminal_shows_lines(
    there: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from pyspec.cli import meter

    monkeypatch.setattr(meter, "FIRST_S", 0.0)
    monkeypatch.setattr(meter, "EVERY_S", 0.0)
    monkeypatch.setattr("pyspec.hub.fetch.REPORT_S", 0.01)
    there.files = {"m-Q8_0.gguf": synth.write("qwen3", tmp_path / "m.gguf", tiny=True).read_bytes()}
    there.pace = 0.03
    done = call("run", "-hf", REPO, "-p", "Hi", "-n", "2", *SMALL_LOAD)
    assert done.exit_code == 0 and "loading: download m-Q8_0.gguf: " in done.stderr


@pytest.mark.slow
def test_a_server_looks_in_a_process_of_its_own(
    there: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With the hub's environment variables, which are all that another process knows."""
    there.files = {"m-Q8_0.gguf": renamed(synth.write("qwen35", tmp_path / "m.gguf", tiny=True, mtp=False), b"gemma9")}  # fmt: skip
    monkeypatch.setenv("HF_ENDPOINT", there.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("pyspec.engine.process.ahead.start_ahead", lambda: None)
    monkeypatch.setattr(
        "pyspec.engine.plan.look.look", lambda *args: pytest.fail("in the server's process")
    )
    done = call("server", "-hf", REPO, "--port", "0")
    assert (
        done.exit_code == 3 and "m-Q8_0.gguf is a model of the architecture 'gemma9'" in done.stderr
    ), done.output
    assert {span[:8] for span in gets(there)} == {"bytes=0-"} and not list(
        (tmp_path / "hub").rglob("blobs/*")
    )


def test_a_look_that_dies_is_no_refusal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    from pyspec.engine.named import Named
    from pyspec.engine.plan import look_apart

    monkeypatch.setattr(look_apart, "COMMAND", (sys.executable, "-c", "raise SystemExit(9)"))
    assert (
        look_apart.looked(abs, Named(repo=REPO), apart=True) == look_apart.HeadsRead()
        and "ended with status 9" in caplog.text
    )  # type: ignore[arg-type]


def test_a_program_is_refused_before_the_download_too(
    there: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from pyspec import catalog
    from pyspec.engine.api import Engine
    from pyspec.errors import UnknownArchitecture

    there.files = {"m-Q8_0.gguf": renamed(synth.write("qwen35", tmp_path / "m.gguf", tiny=True, mtp=False), b"gemma9")}  # fmt: skip
    entry = catalog.Entry(
        name="mine", title="", arch="qwen35", target=catalog.Source(repo=REPO, quant="Q8_0")
    )
    monkeypatch.setattr(catalog, "catalogue", lambda: {"mine": entry})
    for named in ({"target": "mine"}, {"target": "MINE:q8_0"}, {"hf": REPO}, {"hf": f"{REPO}:q8_0"}):
        with pytest.raises(UnknownArchitecture, match="'gemma9'"):
            Engine.load(**named)
    with pytest.raises(ConfigError, match=r"has no Q2_K file; it has m-Q8_0\.gguf"):
        Engine.load(hf=f"{REPO}:Q2_K")
    assert "" not in gets(there)


def test_a_program_loads_a_file_of_a_repository_with_the_drafter_beside_it(
    there: FakeHub, tmp_path: Path, room: Callable[[int], None]
):
    from pyspec.engine.api import Engine

    wide(there, tmp_path, F32="f32", Q8_0="q8_0", Q4_0="q4_0")
    room(45)
    small: dict[str, Any] = {"np": 1, "ctx": 256, "ubatch": 16, "warm_up": False, "device": "cpu"}
    with Engine.load(hf=f"{REPO}:Q4_0", **small) as engine:
        assert engine.info.model_path.endswith("m-Q4_0.gguf")
        assert engine.generate("Hi", max_tokens=2).tokens
    with pytest.raises(
        DoesNotFit,
        match=rf"This fits, from the same repository: hf='{REPO}:Q8_0'.*Nothing was downloaded; `pyspec pull --hf-repo {REPO}:F32`",
    ):
        Engine.load(hf=f"{REPO}:F32", **small)
    assert not [path for path in (tmp_path / "hub").rglob("*F32*") if path.is_file()]
    target = synth.write("qwen35", tmp_path / "t.gguf", tiny=True, mtp=False)
    block = synth.write("qwen35", tmp_path / "b.gguf", tiny=True, sidecar=True)
    there.files = {"m-Q8_0.gguf": target.read_bytes(), "mtp-m-Q8_0.gguf": block.read_bytes()}
    with Engine.load(hf=REPO, **small) as engine:
        assert engine.info.drafter == "mtp" and engine.info.draft_path.endswith("mtp-m-Q8_0.gguf")


@pytest.mark.slow
def test_the_stages_of_a_start_are_reported_from_the_first_second_on(there: FakeHub, tmp_path: Path):
    there.files = {"m-Q8_0.gguf": synth.write("qwen3", tmp_path / "m.gguf", tiny=True).read_bytes()}
    heard: list[str] = []
    with listening(lambda stage, part: heard.append(stage)):
        assert call("run", "-hf", REPO, "-p", "Hi", "-n", "2", "-np", "1", "-c", "256").exit_code == 0
    assert list(dict.fromkeys(heard)) == [
        "head of the file",
        "download m-Q8_0.gguf",
        "hash",
        "start of the engine",
        "weights",
        "drafter",
        "graphs and warm-up",
    ]


# -- the server -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("no-such-model",), "'no-such-model' is neither a file"),
        (("-m", "./gone.gguf"), "no file ./gone.gguf"),
        (("demo", "-md", "gone.gguf"), "no file gone.gguf"),
        (("-hf", "norepo"), "-hf wants user/repo"),
        (("demo", "-hf", "a/b"), "exclude each other"),
        ((), "--in-process serves one model: name it"),
    ],
)
def test_a_server_says_that_there_is_no_such_model_before_it_listens(
    args: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("pyspec.server.http.listen.listen", lambda settings: pytest.fail("it listens"))
    done = call("server", *args, "--port", "0", "--in-process")
    assert done.exit_code == 2 and said in done.stderr, done.output


def test_a_quantisation_that_is_not_there_is_told_before_the_server_listens(
    there: FakeHub, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("pyspec.server.http.listen.listen", lambda settings: pytest.fail("it listens"))
    done = call("server", "-hf", f"{REPO}:Q3_K_S", "--port", "0", "--in-process")
    assert done.exit_code == 2 and "user/repo has no Q3_K_S file; it has m-Q8_0.gguf" in done.stderr


# -- names ------------------------------------------------------------------------------------------------------------


def test_a_name_with_a_quantisation_is_another_file_of_its_repository(monkeypatch: pytest.MonkeyPatch):
    entry = find("Qwen3.6-27B:q4_k_m")
    plain = catalogue()["qwen3.6-27b"]
    assert entry is not None and entry.target is not None and plain.target is not None
    assert (entry.target.repo, entry.target.quant, entry.target.file) == (
        plain.target.repo,
        "q4_k_m",
        "",
    )
    assert entry.draft == plain.draft and entry.arch == plain.arch
    assert find("nothing:Q8_0") is None and find("qwen3.6-27b:") is None
    with pytest.raises(ConfigError, match="one quantisation only"):
        find("demo:Q4_0")


def test_the_largest_model_of_the_catalogue_that_fits_is_named():
    fits = {gib: smaller_model(gib << 30) for gib in (1, 3, 8, 24, 80)}
    assert fits == {
        1: None,
        3: "qwen3.5-2b:Q4_K_M",
        8: "qwen3.5-9b:Q4_K_M",
        24: "qwen3.5-35b-a3b:Q4_K_M",
        80: "qwen3.5-122b-a10b",
    }


def test_every_name_of_the_catalogue_can_be_made_and_its_sizes_are_those_of_a_plan(tmp_path: Path):
    from pyspec.config import settings_from
    from pyspec.engine.plan.fit import fit

    for name, entry in catalogue().items():
        assert name == "demo" or synth.find(name).arch == entry.arch
    name = "qwen3.5-2b"
    (own, small) = catalogue()[name].needs()
    assert (own.name, small.name) == (name, f"{name}:Q4_K_M")
    path = synth.write(name, tmp_path / "m.gguf", hollow=True, mtp=False)
    report = fit(
        path, settings_from({"np": 1, "ctx": 8192, "spec_type": "none", "weights": "packed"}), 80 << 30
    )
    assert own.bytes == pytest.approx(path.stat().st_size, rel=0.02)
    assert own.memory == pytest.approx(report.asked.total, rel=0.1), "`beside` in models.toml is about"


IMAGES = Path(__file__).parent / "fixtures" / "images"


def images_hub(there: FakeHub, projector: str = "qwen35") -> None:
    there.files = {"m-F32.gguf": (IMAGES / "qwen35.gguf").read_bytes(), "mmproj-m-F16.gguf": (IMAGES / f"mmproj-{projector}.gguf").read_bytes()}  # fmt: skip


def test_the_projector_of_a_repository_is_taken(there: FakeHub, tmp_path: Path):
    images_hub(there)
    ask = ("run", "-hf", REPO, "--image", str(IMAGES / "odd.png"), "--json", "-n", "3", *SMALL_LOAD)
    done = call(*ask, "-v", "What is in the picture?")
    assert done.exit_code == 0, done.output
    assert "mmproj-m-F16.gguf: taken as projector" in done.stderr
    assert json.loads(done.stdout)["n_prompt"] > 30
    pulled = call("pull", "-hf", REPO, "--json")
    rows = json.loads(pulled.stdout)
    assert [row["role"] for row in rows] == ["target", "projector"] and rows[1]["hashed"]
    listed = json.loads(call("list", "--json").stdout)
    of = {row["file"]: row for row in listed}
    assert of["m-F32.gguf"]["mmproj"] == "mmproj-m-F16.gguf"
    assert of["mmproj-m-F16.gguf"]["what"] == "projector"
    blind = call(*ask, "--no-mmproj", "What is in the picture?")
    assert blind.exit_code == 1 and "this model was loaded without --mmproj" in blind.stderr


def test_a_projector_that_does_not_fit_is_left_out_before_its_download(there: FakeHub, tmp_path: Path):
    images_hub(there, "mistral3")
    done = call("run", "-hf", REPO, "-p", "Hi", "-n", "1", *SMALL_LOAD)
    assert done.exit_code == 0, done.output
    assert "mmproj-m-F16.gguf is not taken, so no images are read: " in done.stderr
    whole = {file for method, file, span in there.asked if method == "GET" and not span}
    assert whole == {"m-F32.gguf"}
    named = call(
        "run", "-m", str(IMAGES / "qwen35.gguf"), "-mm", str(IMAGES / "mmproj-mistral3.gguf"), "-p", "Hi"
    )
    assert named.exit_code == 4 and "is a projector of type pixtral" in named.stderr
