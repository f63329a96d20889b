"""The catalogue: names become files, and mistakes are reported in one line."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from pyspec import catalog, hub
from pyspec.catalog import RUNS, catalogue, find, paired_kind, parse, resolve
from pyspec.draft import HOST_PART, PARTS
from pyspec.errors import ConfigError, DownloadError
from pyspec.registry import ARCHITECTURES, DRAFTERS
from pyspec.synth import dims
from pyspec.synth.dims import NONE_NEEDED

OTHERS = ("llama3.2:3b", "deepseek-r1:8b", "gemma3:4b", "mistral:7b", "phi4:14b", "mixtral:8x7b")
"""Models that are not in the catalogue, though names like theirs are."""
MINIMAL = 'schema = 1\n[model.x]\ntitle = "X"\narch = "llama"\n'


@pytest.mark.parametrize("name", catalogue())
def test_a_name_of_the_catalogue_can_be_made_up_or_says_why_not(name: str):
    if name in NONE_NEEDED:
        with pytest.raises(
            ConfigError, match=r"there is no synthetic '\w+': its file is in the package"
        ):
            dims.find(name)
        return
    made, entry = dims.find(name), catalogue()[name]
    assert (made.arch, made.name.lower()) == (entry.arch, name)
    assert not entry.ctx_train or made.n_ctx == entry.ctx_train
    assert dims.find(name, tiny=True).arch == entry.arch


def test_both_generations_of_a_shape_can_be_made_up():
    for size in ("27b", "35b-a3b"):
        old, new = (dims.find(f"Qwen{generation}-{size}") for generation in ("3.5", "3.6"))
        assert replace(old, name=new.name) == new


def test_the_packaged_pair_is_what_the_catalogue_says():
    entry = catalogue()["demo"]
    target, draft = resolve("demo")
    assert entry.draft is not None and draft is not None and entry.target is not None
    for path, source in ((target, entry.target), (draft, entry.draft.source)):
        data = path.read_bytes()
        assert len(data) == source.bytes
        assert hashlib.sha256(data).hexdigest() == source.sha256


def test_the_catalogue_agrees_with_the_packaged_files():
    from pyspec.gguf import open_gguf

    entry = catalogue()["demo"]
    target, draft = resolve("demo")
    assert draft is not None and entry.draft is not None
    file = open_gguf(target)
    assert file.architecture == entry.arch
    assert file.metadata[f"{entry.arch}.context_length"] == entry.ctx_train
    assert open_gguf(draft).metadata["dflash.block_size"] == entry.draft.block


def test_a_module_stands_behind_every_architecture_and_drafter():
    for arch, module in ARCHITECTURES.items():
        assert callable(import_module(module).read), arch
    for name, module in DRAFTERS.items():
        parts = {
            part for part in (*PARTS, HOST_PART) if callable(getattr(import_module(module), part, None))
        }
        assert parts in ({*PARTS}, {HOST_PART}), name
    assert set(RUNS) == set(ARCHITECTURES)
    kinds = {entry.draft.kind for entry in catalogue().values() if entry.draft is not None}
    assert kinds <= set(DRAFTERS), "the catalogue names a drafter that nobody has"


def test_the_paired_drafters_kind_is_the_entrys():
    assert paired_kind("demo") == paired_kind("DEMO") == "dflash" and paired_kind("no-such") == ""


def test_every_entry_has_a_size_and_a_memory_in_every_listed_quantisation():
    needs = [need for entry in catalogue().values() for need in entry.needs()]
    assert [need.name for need in needs if not (need.bytes and need.memory)] == []
    sizes = {need.name: need.bytes for need in needs}
    assert round(sizes["gpt-oss-20b"] / 1e9, 1) == 12.1 and round(sizes["gpt-oss-120b"] / 1e9, 1) == 63.4


def test_an_entry_without_a_download_or_of_an_architecture_that_is_not_known_is_refused_with_the_reason():
    for entry in catalogue().values():
        assert entry.runs == (entry.arch in RUNS)
        if entry.target is None:
            with pytest.raises(ConfigError, match=f"has no download for '{entry.name}'"):
                entry.fetch()
    with pytest.raises(
        ConfigError, match="'x' is a model of the architecture 'later', which pyspec does not run"
    ):
        parse(MINIMAL.replace("llama", "later"))["x"].fetch()


def test_names_are_found_in_any_case():
    assert find("DEMO") is catalogue()["demo"]
    assert find("Qwen3.6-27B") is catalogue()["qwen3.6-27b"]


def test_a_file_comes_before_a_name_and_has_no_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("demo").write_bytes(b"")
    assert resolve("demo") == (Path("demo"), None)


def test_a_folder_does_not_hide_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("demo").mkdir()
    assert resolve("demo")[0].name == "pyspec-demo.gguf"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("dmeo", "did you mean 'demo'"),
        ("qwen3.6-27", "did you mean 'qwen3.6-27b'"),
        ("qwne3.5-4b", "did you mean 'qwen3.5-4b'"),
        ("qwen3:4b", "did you mean 'qwen3-4b'"),
        ("gemma3:27b", "did you mean 'gemma-3-27b'"),
        ("gptoss:20b", "did you mean 'gpt-oss-20b'"),
        ("zzzzzz", "pyspec models"),
        *((name, "in the catalogue .*; `-hf USER/REPO` takes any GGUF repository") for name in OTHERS),
        ("user/repo", "-hf user/repo"),
        ("./gone.gguf", "no file ./gone.gguf"),
    ],
)
def test_an_unknown_name_is_answered_with_a_hint(name: str, hint: str):
    with pytest.raises(ConfigError, match=hint):
        resolve(name)


def test_a_mistyped_file_is_answered_with_its_neighbour(tmp_path: Path):
    (tmp_path / "model-q8.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"did you mean .*model-q8\.gguf"):
        resolve(str(tmp_path / "model-q9.gguf"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schema = 2", "schema is 2"),
        ("schema = 1\nmodels = 3", "did you mean 'model'"),
        (MINIMAL + "tittle = 1", "did you mean 'title'"),
        (MINIMAL + 'ctx_train = "long"', "want int"),
        (MINIMAL + 'target = { file = "a.gguf" }', "either packaged or repo"),
        (MINIMAL + 'target = { repo = "a/b", quants = "Q8_0" }', "did you mean 'quant'"),
        (MINIMAL + 'draft = { kind = "dflash" }', "'source' is missing"),
        ('schema = 1\n[model.x]\ntitle = "X"', "'arch' is missing"),
        ("schema = 1\nmodel = 3", "want a table"),
        ("schema = ", "models.toml"),
    ],
)
def test_a_wrong_catalogue_is_refused_with_the_place(text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        parse(text)


def test_a_download_nobody_knows_is_said():
    with pytest.raises(ConfigError, match="has no download"):
        parse(MINIMAL)["x"].fetch()


FILES = [
    "README.md",
    "m-Q8_0.gguf",
    "m-Q4_K_M.gguf",
    "mmproj-F16.gguf",
    "dflash-m-Q4_K_M.gguf",
    "BF16/m-BF16-00001-of-00002.gguf",
    "BF16/m-BF16-00002-of-00002.gguf",
]


def test_without_a_quant_q4_k_m_is_chosen_and_sidecars_never():
    assert hub.choose(FILES) == ["m-Q4_K_M.gguf"]
    assert hub.choose(["m-BF16.gguf", "m-Q8_0.gguf"]) == ["m-Q8_0.gguf"]
    assert hub.choose(["mmproj-F16.gguf", "b-Q6_K.gguf", "a-Q5_0.gguf"]) == ["a-Q5_0.gguf"]


def test_a_drafter_is_a_file_that_says_so_by_its_name_where_there_is_one():
    assert hub.choose(FILES, drafter=True) == ["dflash-m-Q4_K_M.gguf"]
    assert hub.choose(["dflash-draft-3.6-q8_0.gguf"], drafter=True) == ["dflash-draft-3.6-q8_0.gguf"]
    assert hub.choose(["m-Q8_0.gguf"], drafter=True) == ["m-Q8_0.gguf"]
    with pytest.raises(ConfigError, match="no GGUF model"):
        hub.choose(["dflash-draft-3.6-q8_0.gguf"])


def test_a_quant_is_found_in_any_case_with_all_shards():
    assert hub.choose(FILES, "q8_0") == ["m-Q8_0.gguf"]
    assert hub.choose(FILES, "bf16") == FILES[-2:]


def test_a_file_is_taken_by_its_exact_name_even_a_sidecar():
    assert hub.choose(FILES, file="dflash-m-Q4_K_M.gguf") == ["dflash-m-Q4_K_M.gguf"]
    with pytest.raises(ConfigError, match=r"did you mean m-Q8_0\.gguf"):
        hub.choose(FILES, file="m-Q8.gguf", repo="a/b")


def test_a_quant_is_a_whole_word():
    with pytest.raises(ConfigError, match="has no Q8_0 file"):
        hub.choose(["m-Q8_0_XL.gguf"], "Q8_0", repo="a/b")


def test_a_missing_shard_is_said():
    with pytest.raises(ConfigError, match="1 are missing"):
        hub.choose(FILES[:-1], "BF16")


def test_hf_names_are_split_and_checked():
    assert hub.split_name("user/repo:Q8_0") == ("user/repo", "Q8_0")
    assert hub.split_name("user/repo") == ("user/repo", "")
    with pytest.raises(ConfigError, match="user/repo"):
        hub.split_name("repo")


def test_a_failing_download_is_one_line(monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    def fail(self: object, repo: str) -> list[str]:
        raise huggingface_hub.errors.OfflineModeIsEnabled("first line\nsecond line")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("pyspec.hub.fetch.unreachable", lambda url: "")
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", fail)
    with pytest.raises(DownloadError, match=r"^user/repo cannot be read: first line$"):
        hub.from_hub("user/repo")


def cached_in(folder: Path):
    def cached(repo: str, local_files_only: bool = False) -> str:
        assert local_files_only
        return str(folder)

    return cached


def test_offline_looks_only_into_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    import huggingface_hub

    (tmp_path / "m-Q8_0.gguf").write_bytes(b"")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached_in(tmp_path))
    assert hub.from_hub("user/repo") == tmp_path / "m-Q8_0.gguf"
    with pytest.raises(ConfigError, match="cached copy of user/repo has no Q4_0"):
        hub.from_hub("user/repo", "Q4_0")


def test_offline_with_an_empty_cache_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DownloadError, match="user/nowhere is not in the local cache"):
        hub.from_hub("user/nowhere")


def test_without_a_network_the_cached_copy_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    import huggingface_hub

    def fail(self: object, repo: str) -> list[str]:
        raise ConnectionError("no route")

    (tmp_path / "m-Q8_0.gguf").write_bytes(b"")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("pyspec.hub.fetch.unreachable", lambda url: "")
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", fail)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached_in(tmp_path))
    assert hub.from_hub("user/repo") == tmp_path / "m-Q8_0.gguf"
    assert "no route; using the cached copy" in caplog.text


def test_a_download_fetches_every_shard_and_returns_the_first(monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    fetched: list[str] = []

    def download(repo: str, name: str) -> Path:
        fetched.append(name)
        return Path("/cache") / name

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("pyspec.hub.fetch.unreachable", lambda url: "")
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, repo: FILES)
    monkeypatch.setattr("pyspec.hub.fetch.fetch_file", download)
    assert hub.from_hub("user/repo", "BF16") == Path("/cache") / FILES[-2]
    assert fetched == FILES[-2:]


def test_a_truncated_package_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "pyspec-demo.gguf").write_bytes(b"short")
    monkeypatch.setattr(catalog, "files", lambda package: tmp_path)
    with pytest.raises(ConfigError, match=r"has 5 bytes, want 22806560"):
        catalogue()["demo"].fetch()


def test_names_are_resolved_without_torch_and_without_the_hub_client():
    code = (
        "import sys; from pyspec.catalog import resolve; resolve('demo'); "
        "print(sorted(set(sys.modules) & {'torch', 'numpy', 'huggingface_hub'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "name",
    [
        "a" * 5000,
        "/" + "b" * 300 + ".gguf",
        "~nobody-of-this-name/x.gguf",
        "a\0b",
        "/" + "c/" * 3000 + "x.gguf",
    ],
)
def test_names_that_can_be_no_path_are_the_user_s_mistake(name: str) -> None:
    with pytest.raises(ConfigError):
        resolve(name)


def test_a_folder_that_may_not_be_read_has_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: object, **how: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.stat", refused)
    with pytest.raises(ConfigError, match="no file"):
        resolve("/root/secret/x.gguf")
