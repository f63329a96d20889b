"""Sources of several models: folders, presets, the command line, and which of them wins."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pyspec.cli import main
from pyspec.cli.router import RowReader, budget_of, erase
from pyspec.cli.server import server
from pyspec.engine.plan.apart import Planner
from pyspec.errors import ConfigError
from pyspec.server.models.preset import read_preset
from pyspec.server.models.router import Model, Router
from pyspec.server.models.sources import all_models, of_folder
from pyspec.server.settings import RouterSettings, ServerSettings

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("pyspec.server.models.sources.cached_repositories", lambda: iter(()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    models = tmp_path / "models"
    for name in ("gemma3.gguf", "qwen35.gguf"):
        (models / "deep").mkdir(parents=True, exist_ok=True)
        shutil.copy(FIXTURES / name, models / name)
    shutil.copy(FIXTURES / "qwen35.gguf", models / "deep" / "target-Q8_0.gguf")
    (models / "deep" / "dflash-target-Q8_0.gguf").touch()
    (models / "deep" / "mmproj-F16.gguf").touch()
    (models / "mmproj-gemma.gguf").touch()
    (models / "large-00001-of-00002.gguf").touch()
    (models / "large-00002-of-00002.gguf").touch()
    (models / "notes.txt").touch()
    (models / "half").mkdir()
    (models / "half" / "m-00002-of-00002.gguf").touch()  # the other part is still to come
    return models


def preset(folder: Path, text: str) -> Path:
    path = folder / "models.ini"
    path.write_text(text)
    return path


def models_of(
    *words: str, folder: Path | None = None, ini: Path | None = None, card: int = 0, **more: int
) -> dict[str, Model]:
    options = RouterSettings(
        models_dir=str(folder or ""), models_preset=str(ini or ""), host_memory=8 << 30, **more
    )
    budget = {"host": 8 << 30} | ({"cuda:0": card} if card else {})
    rows = RowReader(
        command=server, words=words, options=options, budget=budget, planner=Planner(), n_slot=4
    )
    return {model.name: model for model in rows.read()}


def test_a_folder_has_a_model_for_each_file_and_each_folder_in_it(folder: Path) -> None:
    found = {one.name: one.words for one in of_folder(folder)}
    assert found.keys() == {"gemma3", "qwen35", "large", "deep"}
    assert found["gemma3"] == ("-m", str(folder / "gemma3.gguf"))
    assert found["large"] == ("-m", str(folder / "large-00001-of-00002.gguf"))
    deep = folder / "deep"
    assert found["deep"] == (
        "-m",
        str(deep / "target-Q8_0.gguf"),
        "-md",
        str(deep / "dflash-target-Q8_0.gguf"),
    )
    with pytest.raises(ConfigError, match="can not be read"):
        list(of_folder(folder / "nowhere"))


def test_the_command_line_goes_before_a_section_and_that_before_the_shared_one(folder: Path) -> None:
    ini = preset(
        folder,
        f"version = 1\n[*]\nctx-size = 512\nnp = 2\n; a comment\n[one]\nmodel = {folder}/gemma3.gguf\n"
        f"c = 1024\nLLAMA_ARG_THREADS = 3\nalias = uno,eins\n[two]\nm = {folder}/qwen35.gguf\n",
    )
    found = models_of("-np", "3", folder=folder, ini=ini)
    assert found.keys() == {"gemma3", "qwen35", "large", "deep", "one", "two"}
    assert found["one"].aliases == ("uno", "eins")
    rows = {name: found[name].words for name in ("one", "two", "gemma3")}
    assert "--ctx-size=512" in rows["one"] and rows["one"].index("--ctx-size=512") < rows["one"].index(
        "-c"
    )
    assert "--ctx-size=512" in rows["gemma3"] and rows["gemma3"][:2] == (
        "-m",
        str(folder / "gemma3.gguf"),
    )


def test_options_of_rows_reach_their_engines(folder: Path) -> None:
    ini = preset(
        folder,
        f"[*]\nctx-size = 512\ntemp = 0.5\n[one]\nmodel = {folder}/gemma3.gguf\nctx-size = 1024\n"
        "no-cache-prompt = true\nwarmup = false\ntemp = 0.1\ntags = x,y\nload-on-startup = 1\npin = on\n"
        "stop-timeout = 3\npark = 1\n[two]\nmodel = demo\n",
    )
    found = models_of("--temp", "0.2", "-np", "3", ini=ini)
    one, two = found["one"], found["two"]
    assert (one.starts, one.pinned, one.stop_s) == (True, True, 3.0)
    assert (two.starts, two.pinned, two.stop_s) == (False, False, 10.0)
    assert one.parks and not two.parks
    assert one.settings.tags == ("x", "y") and one.settings.sampling.temperature == 0.2
    need = one.plan({"host": 8 << 30})
    assert need.n_ctx == 1024 and "-np 3" in need.text
    assert need.rest is not None and 0 < need.rest["host"] < need.bytes["host"]
    assert two.plan({"host": 8 << 30}).rest is None
    assert two.plan({"host": 8 << 30}).n_ctx == 512


def test_models_are_parked_where_there_is_a_card_unless_their_section_says_no(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ini = preset(folder, "[qwen35]\npark = 0\n")
    found = models_of(folder=folder, ini=ini, card=24 << 30)
    assert found["gemma3"].parks and not found["qwen35"].parks
    assert not models_of(folder=folder)["gemma3"].parks
    planned: list[bool] = []
    monkeypatch.setattr(Planner, "need", lambda self, path, given, budget: planned.append(given.parks))
    for words in ((), ("--tp", "2"), ("--replicas", "2")):
        models_of(*words, folder=folder, card=24 << 30)["gemma3"].plan({})
    assert planned == [True, False, False], "those of several GPUs are unloaded"


def test_sections_change_models_of_a_folder(folder: Path) -> None:
    ini = preset(folder, "[gemma3]\nctx-size = 64\npin = 1\n[qwen35]\nsleep-idle-seconds = 7\n")
    found = models_of(folder=folder, ini=ini)
    assert (found["gemma3"].idle_s, found["qwen35"].idle_s) == (-1.0, 7.0)
    assert found["gemma3"].words == ("-m", str(folder / "gemma3.gguf"), "--ctx-size=64")
    assert found["gemma3"].pinned and not found["qwen35"].pinned


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a]\nmodel = demo\nfoo = 1\n", r"models.ini:3: no flag is called 'foo'"),
        ("[a]\nmodel = demo\nport = 1\n", r"models.ini:3: port belongs to the server"),
        ("[a]\nmodel = demo\napi-key = x\n", r"models.ini:3: api-key belongs"),
        ("[a]\nmodel = demo\nmodels-max = 1\n", r"models.ini:3: models-max belongs"),
        ("[a]\nmodel = demo\nlog-file = x\n", r"models.ini:3: log-file belongs"),
        ("[a]\nmodel = demo\npin = maybe\n", r"models.ini:3: pin is 'maybe'; want 1 or 0"),
        ("[a]\nmodel = demo\nstop-timeout = soon\n", r"models.ini:3: stop-timeout is 'soon'"),
        ("[a]\nmodel = demo\nctx-size = x\n", r"models.ini:3: \[a\]: .*--ctx-size.*'x' is not a valid integer"),
        ("[*]\nnp = 2\nc = x\n[a]\nmodel = demo\n", r"models.ini:3: \[a\]: .*--ctx-size.*'x' is not a valid"),
        ("[a]\nmodel = demo\nnp = 99999\n", r"models.ini:3: \[a\]: -np is 99999; want"),
        ("[a]\nmodel = demo\nLLAMA_ARG_CTX_SIZE = x\n", r"models.ini:3: \[a\]: .*--ctx-size"),
        ("[a]\nmodel = demo\nctx-sise = 7\n", r"models.ini:3: no flag is called 'ctx-sise'; did you mean ctx-size"),
        ("[a]\nmodel = demo\nstop-timeout = nan\n", r"models.ini:3: stop-timeout is 'nan'"),
        ("[a]\nmodel = demo\nstop-timeout = -3\n", r"models.ini:3: stop-timeout is '-3'"),
        ("[a]\nmodel = demo\nlora = x.gguf\n", r"models.ini:3: \[a\]: --lora: LoRA adapters"),
        ("[a]\nmodel = demo\nspec-type = magic\n", r"\[a\]: .*is not a drafter"),
        ("[a]\nmodel = nowhere.gguf\n", r"\[a\]: no file nowhere.gguf"),
        ("[a]\nctx-size = 4\n", r"\[a\]: .*'a'"),
        ("np = 2\n[a]\nmodel = demo\n", r"models.ini:1: 'np' stands before"),
        ("[a]\nmodel = demo\n[a]\n", r"models.ini:3: there are two sections \[a\]"),
        ("[a]\nmodel demo\n", r"models.ini:2: 'model demo' is no section"),
    ],
)  # fmt: skip
def test_flaws_of_a_preset_are_told_with_their_line(folder: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        models_of(ini=preset(folder, text))


def test_two_models_of_one_name_are_refused(folder: Path) -> None:
    ini = preset(folder, "[a]\nmodel = demo\nalias = x\n[b]\nmodel = demo\nalias = x\n")
    found = models_of(ini=ini)
    with pytest.raises(ConfigError, match="are both called 'x'"):
        Router(lambda: list(found.values()), ServerSettings(), RouterSettings(), {"host": 1})


def test_a_preset_keeps_quotes_comments_and_switches_apart(folder: Path) -> None:
    read = read_preset(
        preset(
            folder,
            '# c\n[ a ] ; not [b]\nmodel = "a ; b.gguf" # c\njinja = true ; c\nno-mmap = 1\nfa = on#\nversion = 1\n--hf_repo = u/r\n',
        )
    )
    assert [(s.key, s.value, s.line) for s in read.sections["a"]] == [
        ("model", "a ; b.gguf", 3), ("jinja", "true", 4), ("no-mmap", "1", 5), ("fa", "on#", 6), ("hf-repo", "u/r", 8),
    ]  # fmt: skip
    found = {one.name: one.words for one in all_models(None, preset(folder, "[b]\n--hf_repo = u/r\n"))}
    assert found["b"] == (), "its line names it"
    with pytest.raises(ConfigError, match=r"models.ini:1: '\[ \]' is no section"):
        read_preset(preset(folder, "[ ]\n"))
    with pytest.raises(ConfigError, match="can not be read"):
        read_preset(folder / "none.ini")


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("[mine]\nhf-repo = u/r\ndedup-cache-models = 1\n", {"u/r:Q4_K_M"}),  # the one that is loaded
        ("[mine]\nhf-repo = u/r:q8_0\nspec-draft-hf = u/d\ndedup-cache-models = 1\n", {"u/r:Q8_0", "u/d:F16"}),
        ("[*]\ndedup-cache-models = 1\n[mine]\nhf-repo = U/r\nhf-file = r-Q8_0-00001-of-00002.gguf\n", {"u/r:Q8_0"}),
        ("[mine]\nhf-repo = u/none\ndedup-cache-models = 1\n", set()),
        ("[mine]\nhf-repo = u/r\n", set()),
        ("[*]\ndedup-cache-models = 1\n[mine]\nhf-repo = u/r:Q8_0\n[u/r:Q8_0]\nc = 512\n", set()),  # a section of its own
    ],
)  # fmt: skip
def test_a_cached_model_is_hidden_by_a_preset_that_says_so(
    text: str, hidden: set[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    from pyspec.hub.cache import CachedFile, CachedRepository

    files = {"u/r": ("r-Q8_0-00001-of-00002.gguf", "r-q4_k_m.gguf"), "u/d": ("d-f16.gguf",)}
    cached = [
        CachedRepository(repo, tuple(CachedFile(repo, name, folder / name, 1) for name in names), 0)
        for repo, names in files.items()
    ]
    monkeypatch.setattr("pyspec.server.models.sources.cached_repositories", lambda: iter(cached))
    assert [(one.name, one.source) for one in all_models(None, None)] == [
        ("u/r:Q8_0", "cache"),
        ("u/r:Q4_K_M", "cache"),
        ("u/d:F16", "cache"),
    ]
    found = all_models(None, preset(folder, text))
    assert {one.name for one in found if one.hidden} == hidden
    assert [one.source for one in found if one.name == "mine"] == ["preset"]


def test_the_budget_is_what_is_said_or_free() -> None:
    assert budget_of(RouterSettings(host_memory=5 << 30))["host"] == 5 << 30
    assert budget_of(RouterSettings())["host"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["demo", "--models-dir", "x"], "--models-dir serves several models, and demo is one"),
        (["--models-dir", "nowhere"], "--models-dir nowhere can not be read"),
        (["--models-dir", ".", "-a", "x"], "--alias names one model"),
        (["--models-dir", ".", "--in-process"], "--in-process serves one model"),
        (["--models-dir", ".", "-md", "x.gguf"], "a drafter goes with a model"),
        (["--models-host-memory", "much"], "want an amount of memory"),
        (["demo", "--in-process", "--sleep-idle-seconds", "5"], "leave out --in-process"),
    ],
)  # fmt: skip
def test_the_command_line_of_several_models_is_checked(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as e:
        main(["server", "--port", "0", *words])
    assert e.value.code == 2 and said in capsys.readouterr().err.replace("\n", " ")


def test_a_cached_model_is_deleted_with_all_its_parts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--u--r" / "snapshots" / "1"
    blobs = tmp_path / "models--u--r" / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for name in ("r-Q8_0-00001-of-00002.gguf", "r-Q8_0-00002-of-00002.gguf", "r-Q4_0.gguf"):
        (blobs / name).write_text("x")
        (snapshot / name).symlink_to(blobs / name)
    erase("u/r", "r-Q8_0-00001-of-00002.gguf")
    assert [p.name for p in snapshot.iterdir()] == ["r-Q4_0.gguf"] == [p.name for p in blobs.iterdir()]


def test_the_example_has_two_models() -> None:
    found = models_of(ini=Path(__file__).parents[2] / "examples" / "models.ini")
    assert found.keys() == {"demo", "demo-plain"} and found["demo"].starts
    assert found["demo-plain"].aliases == ("plain",)
