"""The catalogue: models by name, where their files come from, and how a name becomes paths. Knows nothing of torch.

The entries stand in `models.toml`. Files in the package are used in place; others are downloaded through
huggingface_hub into its own cache, and found there again without a network (HF_HUB_OFFLINE=1 asks for that).
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

from pyspec.errors import ConfigError
from pyspec.hub import DEFAULT_QUANTS, Repository, from_hub, quant_of
from pyspec.registry import ARCHITECTURES, not_run

SCHEMA = 1
RUNS = tuple(ARCHITECTURES)
"""Architectures this version runs."""
BITS = {"Q8_0": 8.5, "Q4_K_M": 4.85, "UD-Q4_K_XL": 4.9}
"""Bits of a weight in the quantisations that sizes are told for; averages, where files mix types."""
LISTED = ("Q8_0", "Q4_K_M")
"""Those that every model's sizes are told for."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a file comes from: in the package, or in a Hugging Face repository by file name or quantisation."""

    packaged: str = ""
    repo: str = ""
    file: str = ""
    quant: str = ""
    bytes: int = 0
    sha256: str = ""

    def locate(self) -> None:
        """Find it in its repository's list of files, if it is not in the package. Raises DownloadError, ConfigError."""
        if self.repo:
            Repository.open(self.repo).choose(self.quant, self.file)

    def fetch(self) -> Path:
        """The file's path, downloaded first if it must be. Raises DownloadError, ConfigError."""
        if not self.packaged:
            return from_hub(self.repo, self.quant, self.file)
        path = Path(str(files("pyspec"))) / "demo" / self.packaged
        size = path.stat().st_size if os.path.isfile(path) else 0
        if size != self.bytes:
            raise ConfigError(f"the packaged {path} has {size} bytes, want {self.bytes}; install pyspec again")
        return path


@dataclass(frozen=True, kw_only=True)
class DraftEntry:
    """The drafter that belongs to a model."""

    kind: str
    source: Source
    block: int = 0  # tokens of one DFlash block


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a model takes in a quantisation: bytes of its file, and of memory with one slot of 8,192 tokens and no drafter. About, and 0
    where it is not known. name: what to type for it."""

    name: str
    quant: str
    bytes: int = 0
    memory: int = 0


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One model of the catalogue. A zero, "" or None is a fact that nobody has confirmed."""

    name: str
    title: str
    arch: str
    params: float = 0.0  # billions
    active: float = 0.0  # billions per token
    beside: float = 0.0  # GiB that one slot of 8,192 tokens and forwards take beside the weights
    ctx_train: int = 0
    mtp: bool = False
    license: str = ""
    target: Source | None = None
    draft: DraftEntry | None = None

    @property
    def runs(self) -> bool:
        return self.arch in RUNS

    def quantised(self, quant: str) -> Entry:
        """The same with another quantisation of its repository. Raises ConfigError for what is in the package."""
        if self.target is None:
            return self
        if self.target.packaged:
            raise ConfigError(f"'{self.name}' is in the package, in one quantisation only: give it as {self.name}")
        return replace(self, name=f"{self.name}:{quant}", target=Source(repo=self.target.repo, quant=quant))

    @property
    def quant(self) -> str:
        """The quantisation that its own name means; "" for what is in the package, or nowhere."""
        if self.target is None or self.target.packaged:
            return ""
        return self.target.quant or quant_of(self.target.file) or DEFAULT_QUANTS[0]

    def needs(self) -> tuple[Need, ...]:
        """What it takes by quantisation, its own first."""
        if not self.quant:
            n_bytes = 0 if self.target is None else self.target.bytes
            return (Need(name=self.name, quant="", bytes=n_bytes, memory=self._memory(n_bytes)),)
        found = []
        for quant in dict.fromkeys((self.quant, *LISTED)):
            n_bytes = int(self.params * 1e9 * BITS.get(quant, 0.0) / 8)
            name = self.name if quant == self.quant else f"{self.name}:{quant}"
            found.append(Need(name=name, quant=quant, bytes=n_bytes, memory=self._memory(n_bytes)))
        return tuple(found)

    def _memory(self, n_bytes: int) -> int:
        return n_bytes + int(self.beside * (1 << 30)) if n_bytes and self.beside else 0

    def check(self) -> None:
        """Raise ConfigError if the entry can not run, or nobody knows where its file is."""
        if not self.runs:
            raise ConfigError(not_run(f"'{self.name}'", self.arch))
        if self.target is None:
            raise ConfigError(f"the catalogue knows no download for '{self.name}'; give its file with -m")

    def fetch(self) -> tuple[Path, Path | None]:
        """(target, drafter or None), downloaded first if they must be. Raises ConfigError, DownloadError."""
        self.check()
        assert self.target is not None
        return self.target.fetch(), self.draft.source.fetch() if self.draft else None


@cache
def catalogue() -> Mapping[str, Entry]:
    """The entries of the packaged `models.toml` by name, in its order."""
    return parse((files("pyspec") / "models.toml").read_text(encoding="utf-8"))


def parse(text: str) -> dict[str, Entry]:
    """Entries of a catalogue in TOML; every key is checked. Raises ConfigError."""
    try:
        root = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"models.toml: {e}") from e
    if root.get("schema") != SCHEMA:
        raise ConfigError(f"models.toml: schema is {root.get('schema')}; this version reads {SCHEMA}")
    _check_keys("models.toml", set(root), {"schema", "model"})
    models = _table("models.toml [model]", root.get("model", {}))
    return {name: _entry(name, values) for name, values in models.items()}


def _entry(name: str, values: object) -> Entry:
    where = f"models.toml [{name}]"
    table = dict(_table(where, values), name=name)
    if "target" in table:
        table["target"] = _source(f"{where}.target", table["target"])
    if "draft" in table:
        draft = dict(_table(f"{where}.draft", table["draft"]))
        if "source" in draft:
            draft["source"] = _source(f"{where}.draft.source", draft["source"])
        table["draft"] = _build(DraftEntry, f"{where}.draft", draft)
    return _build(Entry, where, table)


def _source(where: str, values: object) -> Source:
    source = _build(Source, where, _table(where, values))
    if bool(source.packaged) == bool(source.repo):
        raise ConfigError(f"{where}: want either packaged or repo")
    return source


def _table(where: str, values: object) -> dict[str, object]:
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: want a table, got {type(values).__name__}")
    return values


def _build(kind: type[T], where: str, values: dict[str, object]) -> T:
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    _check_keys(where, set(values), set(known))
    for name, f in known.items():
        if name not in values and f.default is MISSING:
            raise ConfigError(f"{where}: '{name}' is missing")
        if name in values and f.default is not MISSING and f.default is not None:
            want, got = type(f.default), values[name]
            if not isinstance(got, want) and not (want is float and isinstance(got, int)):
                raise ConfigError(f"{where}.{name}: want {want.__name__}, got {got!r}")
    return kind(**values)


def _check_keys(where: str, got: set[str], known: set[str]) -> None:
    for name in sorted(got - known):
        near = get_close_matches(name, sorted(known), 1)
        raise ConfigError(f"{where}: no key '{name}'" + (f"; did you mean '{near[0]}'?" if near else ""))


def find(name: str) -> Entry | None:
    """The entry of that name in any case, or None. NAME:QUANT is the entry with another quantisation of its repository.

    Raises ConfigError for a quantisation of what is in the package.
    """
    entries = {key.lower(): entry for key, entry in catalogue().items()}
    if (entry := entries.get(name.lower())) is not None:
        return entry
    base, _, quant = name.partition(":")
    entry = entries.get(base.lower()) if quant else None
    return None if entry is None else entry.quantised(quant)


def paired_kind(name: str) -> str:
    """Of the drafter that belongs to a catalogue entry; "" if none does, or it is no entry."""
    entry = find(name)
    return entry.draft.kind if entry is not None and entry.draft is not None else ""


def resolve(name_or_path: str) -> tuple[Path, Path | None]:
    """(target path, path of the drafter that belongs to it or None) of a file or a catalogue name.

    Raises ConfigError for a name that is neither (with the nearest one), DownloadError if a download fails.
    """
    found = lookup(name_or_path)
    return found.fetch() if isinstance(found, Entry) else (found, None)


def lookup(name_or_path: str) -> Path | Entry:
    """A file that is here, or the entry of that name; nothing is downloaded. Raises ConfigError for what is neither."""
    path = Path(os.path.expanduser(name_or_path))
    if os.path.isfile(path):  # a Path raises for names that are too long, and for folders that may not be read
        return path
    entry = find(name_or_path)
    if entry is not None:
        entry.check()
        return entry
    if os.path.isdir(path):
        raise ConfigError(f"{path} is a folder; give a GGUF file in it")
    raise ConfigError(_unknown(name_or_path, path))


def _unknown(name: str, path: Path) -> str:
    is_path = path.suffix == ".gguf" or len(path.parts) > 2 or name.startswith((".", "/", "~"))
    if is_path:
        beside = [p.name for p in path.parent.glob("*.gguf")] if os.path.isdir(path.parent) else []
        near = get_close_matches(path.name, beside, 1)
        return f"no file {name}" + (f"; did you mean {path.parent / near[0]}?" if near else "")
    if len(path.parts) == 2:
        return f"no file {name}; a Hugging Face repository is given with -hf {name}"
    near = get_close_matches(name.lower(), list(catalogue()), 1, 0.5)
    hint = f"did you mean '{near[0]}'?" if near else "`pyspec models` lists the catalogue"
    return f"'{name}' is neither a file nor a model of the catalogue; {hint}"
