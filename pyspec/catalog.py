"""The catalogue: models by name, the sources of their files, and the way from a name to paths. Does not use torch.

The entries are in `models.toml`. Packaged files are used in place; others are downloaded by huggingface_hub into its own cache and
found there without a network (HF_HUB_OFFLINE=1 forbids downloads).
"""

from __future__ import annotations

import os
import re
import tomllib
from collections import Counter
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
"""Bits per weight of the listed quantisations; averages for files with mixed types."""
LISTED = ("Q8_0", "Q4_K_M")
"""Quantisations listed for every model."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Source:
    """The source of a file: the package, or a Hugging Face repository with a file name or quantisation."""

    packaged: str = ""
    repo: str = ""
    file: str = ""
    quant: str = ""
    bytes: int = 0
    sha256: str = ""

    def locate(self) -> None:
        """Find it in its repository's list of files, unless it is packaged. Raises DownloadError, ConfigError."""
        if self.repo:
            Repository.open(self.repo).choose(self.quant, self.file)

    def fetch(self) -> Path:
        """The file's path, downloaded if necessary. Raises DownloadError, ConfigError."""
        if not self.packaged:
            return from_hub(self.repo, self.quant, self.file)
        path = Path(str(files("pyspec"))) / "demo" / self.packaged
        size = path.stat().st_size if os.path.isfile(path) else 0
        if size != self.bytes:
            raise ConfigError(
                f"the packaged {path} has {size} bytes, want {self.bytes}; reinstall pyspec"
            )
        return path


@dataclass(frozen=True, kw_only=True)
class DraftEntry:
    """The drafter that belongs to a model."""

    kind: str
    source: Source
    block: int = 0  # tokens of one DFlash block


@dataclass(frozen=True, kw_only=True)
class Need:
    """Approximate needs of a model in a quantisation: bytes of its file, and of memory with one slot of 8,192 tokens and no drafter;
    0 if unknown. name: the name to load it by."""

    name: str
    quant: str
    bytes: int = 0
    memory: int = 0


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One model of the catalogue. A zero, "" or None is an unconfirmed fact."""

    name: str
    title: str
    arch: str
    params: float = 0.0  # billions
    active: float = 0.0  # billions per token
    bits: float = 0.0  # per weight of its own file, where BITS does not know them
    beside: float = 0.0  # GiB of one slot of 8,192 tokens and of forwards, in addition to the weights
    ctx_train: int = 0
    mtp: bool = False
    license: str = ""
    target: Source | None = None
    draft: DraftEntry | None = None

    @property
    def runs(self) -> bool:
        return self.arch in RUNS

    def quantised(self, quant: str) -> Entry:
        """The entry with another quantisation of its repository. Raises ConfigError for a packaged model."""
        if self.target is None:
            return self
        if self.target.packaged:
            raise ConfigError(
                f"'{self.name}' is in the package, in one quantisation only: use the name {self.name}"
            )
        return replace(
            self, name=f"{self.name}:{quant}", target=Source(repo=self.target.repo, quant=quant)
        )

    @property
    def quant(self) -> str:
        """The quantisation of its own name; "" for a packaged model, or one without a source."""
        if self.target is None or self.target.packaged:
            return ""
        return self.target.quant or quant_of(self.target.file) or DEFAULT_QUANTS[0]

    def needs(self) -> tuple[Need, ...]:
        """The model's needs by quantisation, its own first."""
        if not self.quant:
            n_bytes = self.target.bytes if self.target else int(self.params * 1e9 * self.bits / 8)
            return (Need(name=self.name, quant="", bytes=n_bytes, memory=self._memory(n_bytes)),)
        found = []
        for quant in dict.fromkeys((self.quant, *LISTED)):
            bits = BITS.get(quant, self.bits if quant == self.quant else 0.0)
            n_bytes = int(self.params * 1e9 * bits / 8)
            name = self.name if quant == self.quant else f"{self.name}:{quant}"
            found.append(Need(name=name, quant=quant, bytes=n_bytes, memory=self._memory(n_bytes)))
        return tuple(found)

    def _memory(self, n_bytes: int) -> int:
        return n_bytes + int(self.beside * (1 << 30)) if n_bytes and self.beside else 0

    def check(self) -> None:
        """Raise ConfigError if the entry cannot run, or has no source."""
        if not self.runs:
            raise ConfigError(not_run(f"'{self.name}'", self.arch))
        if self.target is None:
            raise ConfigError(f"the catalogue has no download for '{self.name}'; name its file with -m")

    def fetch(self) -> tuple[Path, Path | None]:
        """(target, drafter or None), downloaded if necessary. Raises ConfigError, DownloadError."""
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

    Raises ConfigError for another quantisation of a packaged model.
    """
    entries = {key.lower(): entry for key, entry in catalogue().items()}
    if (entry := entries.get(name.lower())) is not None:
        return entry
    base, _, quant = name.partition(":")
    entry = entries.get(base.lower()) if quant else None
    return None if entry is None else entry.quantised(quant)


def paired_kind(name: str) -> str:
    """Kind of the drafter paired with a catalogue entry; "" if it has none, or the name is unknown."""
    entry = find(name)
    return entry.draft.kind if entry is not None and entry.draft is not None else ""


def resolve(name_or_path: str) -> tuple[Path, Path | None]:
    """(target path, path of its paired drafter or None) of a file or a catalogue name.

    Raises ConfigError for a name that is neither (with the nearest one), DownloadError if a download fails.
    """
    found = lookup(name_or_path)
    return found.fetch() if isinstance(found, Entry) else (found, None)


def lookup(name_or_path: str) -> Path | Entry:
    """A local file, or the entry of that name; downloads nothing. Raises ConfigError for other names."""
    path = Path(os.path.expanduser(name_or_path))
    if os.path.isfile(path):  # methods of Path raise for too long names, and for unreadable folders
        return path
    entry = find(name_or_path)
    if entry is not None:
        entry.check()
        return entry
    if os.path.isdir(path):
        raise ConfigError(f"{path} is a folder; name a GGUF file in it")
    raise ConfigError(_unknown(name_or_path, path))


def _unknown(name: str, path: Path) -> str:
    is_path = path.suffix == ".gguf" or len(path.parts) > 2 or name.startswith((".", "/", "~"))
    if is_path:
        beside = [p.name for p in path.parent.glob("*.gguf")] if os.path.isdir(path.parent) else []
        near = get_close_matches(path.name, beside, 1)
        return f"no file {name}" + (f"; did you mean {path.parent / near[0]}?" if near else "")
    if len(path.parts) == 2:
        return f"no file {name}; for a Hugging Face repository use -hf {name}"
    hint = (
        f"did you mean '{meant}'?"
        if (meant := _near(name.lower()))
        else "`-hf USER/REPO` takes any GGUF repository"
    )
    return f"'{name}' is neither a file nor in the catalogue (`pyspec models`); {hint}"


_SIZE = re.compile(r"(?<![\d.a-z])(?:\d+x)?(\d+(?:\.\d+)?)([mbt])(?![a-z])")
NEAR = 1.5  # times as many parameters, at most


def _near(name: str) -> str:
    """The entry that may have been meant: of the same family, and of nearly the size if the name has one; "" if there is none."""
    size = _SIZE.search(name)
    billions = float(size[1]) * {"m": 1e-3, "b": 1.0, "t": 1e3}[size[2]] if size else 0.0
    able = [
        entry.name
        for entry in catalogue().values()
        if _same_family(name, entry.name)
        and (not billions or 1 / NEAR <= entry.params / billions <= NEAR)
    ]
    return next(iter(get_close_matches(name.replace(":", "-"), able, 1, 0.5)), "")


def _same_family(typed: str, name: str) -> bool:
    """Whether two names begin with the same word, but for one wrong, lost, added or swapped letter behind the first."""
    a, b = (Counter(re.split(r"[^a-z-]", word)[0].replace("-", "")) for word in (typed, name))
    return typed[:1] == name[:1] and (a - b).total() <= 1 and (b - a).total() <= 1
