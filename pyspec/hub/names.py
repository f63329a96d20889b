"""Names of a repository's files: the choice of a GGUF, and the drafters beside it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import PurePosixPath

from pyspec.errors import ConfigError

DEFAULT_QUANTS = ("Q4_K_M", "Q8_0")
"""Default quantisations: the first one present is taken, as in llama.cpp."""
DRAFTERS_ALONE = re.compile(
    r"(?:^|/)(?:mtp|assistant)(?=[-_.][^/]*$)|(?<![a-z])(?:d-?flash2?|d-?spark|eagle[-_]?[0-9]*"
    r"|draft|drafts|drafter|drafters|speculators?)(?![a-z0-9])"
)
"""Patterns in names of drafters. "mtp" only at the start: elsewhere it means that a model's file includes the block. So is "assistant", which names chat models, too."""
PROJECTORS = re.compile(r"mm[-_.]?proj|projector")
MATRICES = re.compile(r"i-?matrix")
KINDS = ("dflash", "mtp", "dspark", "eagle3")
"""Drafters beside a target in llama.cpp's repositories, as KIND-*.gguf; the first supported one is taken."""
QUANT = r"(?<![A-Za-z0-9])(?:UD-)?((?:I?Q\d+|MXFP4|NVFP4|BF16|F16|F32)(?:_[A-Z0-9]+)*)(?![A-Za-z0-9])"
SHARD = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)


def split_name(name: str) -> tuple[str, str]:
    """ "user/repo:quant" to (repo, quant); quant may be empty. Raises ConfigError."""
    repo, _, quant = name.partition(":")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise ConfigError(f"-hf wants user/repo[:quant], got '{name}'")
    return repo, quant


def is_plain(name: str) -> bool:
    """Whether a file's name stays within its repository, and can be shown."""
    return (
        name.isprintable()
        and not PurePosixPath(name).is_absolute()
        and not {"..", "\\"} & {*name.split("/"), *name}
    )


def choose(
    names: Sequence[str], quant: str = "", file: str = "", *, repo: str = "", drafter: bool = False
) -> list[str]:
    """The file to load among a repository's files, first shard first, and its other shards.

    names  paths in the repository, "/" between folders
    quant  e.g. "Q8_0", in any case; "" takes one of DEFAULT_QUANTS if present, else the first model file
    file   exact name instead; also allows sidecars (projectors, drafters)
    drafter  prefer files that are named as drafters, if there are any
    Raises ConfigError that lists the choices.
    """
    ggufs = _ggufs(names)
    if file:
        if file not in ggufs:
            near = get_close_matches(file, ggufs, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{repo} has no file {file}{hint}")
        return shards_of(file, ggufs)
    drafters = [n for n in ggufs if DRAFTERS_ALONE.search(n.lower()) and not _is_part(n)]
    models = (drafters if drafter else []) or models_of(names)
    if not models:
        beside = "go beside one (-hff takes a file by its name)"
        others = f": {', '.join(ggufs[:4])} {beside}" if ggufs else ""
        raise ConfigError(f"{repo} has no GGUF model among its {len(names)} files{others}")
    found: list[str] = []
    for wanted in (quant,) if quant else DEFAULT_QUANTS:
        fits = re.compile(rf"(?:^|[-._/]){re.escape(wanted)}(?=[-./]|$)", re.IGNORECASE)
        found = found or [n for n in models if fits.search(n)]
    if not found and quant:
        more = " ..." if models[12:] else ""
        raise ConfigError(f"{repo} has no {quant} file; it has {', '.join(models[:12])}{more}")
    return shards_of((found or models)[0], models)


def models_of(names: Sequence[str]) -> list[str]:
    """The GGUF files of a repository that are models, with all shards: no projectors, no drafters.

    If all names mention an importance matrix, the models were quantised with one.
    """
    others = (PROJECTORS, DRAFTERS_ALONE)
    whole = [n for n in _ggufs(names) if not any(other.search(n.lower()) for other in others)]
    return [n for n in whole if not _is_part(n)] or [n for n in whole if quant_of(n)]


def _ggufs(names: Sequence[str]) -> list[str]:
    return sorted(name for name in names if name.lower().endswith(".gguf"))


def _is_part(name: str) -> bool:
    """True for a file that accompanies a model and cannot run: a projector, an importance matrix."""
    return bool(PROJECTORS.search(name.lower()) or MATRICES.search(name.lower()))


def shards_of(name: str, names: Sequence[str]) -> list[str]:
    """A file and its other shards, the first one first. Raises ConfigError if one is missing."""
    match = SHARD.match(name)
    if match is None:
        return [name]
    stem, count = match[1], int(match[3])
    every = [f"{stem}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
    missing = [n for n in every if n not in names]
    if missing:
        first = ", ".join(missing[:4])
        raise ConfigError(f"{name} has {count} parts and {len(missing)} are missing: {first}")
    return every


@dataclass(frozen=True, slots=True)
class Sidecar:
    """A drafter's file beside a target, and the reason for choosing it among its kind."""

    kind: str
    file: str
    why: str


def sidecars(names: Sequence[str], target: str, quant: str = "") -> list[Sidecar]:
    """The best drafter of each kind beside a target, as llama.cpp chooses.

    Searches the target's folder and its parents, nearest first. Prefers a name with `quant` or the target's own quantisation, else the
    nearest number of bits.
    """
    wanted = quant_of(quant) or quant_of(target)
    found = []
    for kind in KINDS:
        beside = [n for n in names if n.lower().endswith(".gguf") and kind_of(n) == kind]
        around = [n for n in beside if _is_around(n, target)]
        ranked = sorted(around, key=lambda n: _distance(n, wanted))
        if ranked:
            found.append(Sidecar(kind, ranked[0], _why(ranked[0], wanted, len(ranked))))
    return found


def choose_projector(target: str, names: Sequence[str]) -> str:
    """The projector file beside a model's file, as llama.cpp chooses; "" if there is none.

    In the model's folder or one above it, the nearest first; then the nearest number of bits by the names, the first one on ties.
    """
    beside = [
        n
        for n in names
        if "mmproj" in n.lower() and n.lower().endswith(".gguf") and _is_around(n, target)
    ]
    bits = _bits(quant_of(target))
    return min(
        beside, key=lambda n: (-len(PurePosixPath(n).parts), abs(_bits(quant_of(n)) - bits)), default=""
    )


def _why(name: str, wanted: str, n_choice: int) -> str:
    own, among = quant_of(name), f" of {n_choice} there" if n_choice > 1 else ""
    if own and own.lower() == wanted.lower():
        return f"{own} as the target"
    if wanted and own:
        return f"the nearest to {wanted}{among}"
    return f"the first{among}" if among else "the only one there"


def quant_of(name: str) -> str:
    """The quantisation in a file's name, or ""."""
    found = re.findall(QUANT, PurePosixPath(name).name, re.IGNORECASE)
    return found[-1] if found else ""


def _bits(quant: str) -> int:
    digits = re.search(r"\d+", quant)
    return int(digits[0]) if digits else 0


def _is_around(name: str, target: str) -> bool:
    folder = PurePosixPath(name).parent
    return folder == PurePosixPath(target).parent or folder in PurePosixPath(target).parents


def _distance(name: str, wanted: str) -> tuple[int, bool, int, str]:
    """Sort key: smaller is preferred."""
    own = quant_of(name)
    n_part, bits = len(PurePosixPath(name).parts), abs(_bits(own) - _bits(wanted))
    return -n_part, own.lower() != wanted.lower(), bits, name


def kind_of(name: str) -> str:
    """The drafter kind in a file's name; "" for models and other files."""
    head = PurePosixPath(name).name.lower()
    return next((kind for kind in KINDS if head.startswith(f"{kind}-")), "")


def bare_name(name: str) -> str:
    """A served model's name without what clients write in several ways: ollama's `:latest`, a file's ending, spaces, capitals."""
    return name.strip().casefold().removesuffix(".gguf").removesuffix(":latest")
