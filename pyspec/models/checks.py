"""Whether a file has the tensors that a model wants and no others, and whether ranks can divide them."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping

from pyspec.config import MAX_RANKS
from pyspec.cuda.ops.linear.dequant import SUPPORTED
from pyspec.errors import BadTensors, ModelError
from pyspec.gguf import GGUFFile, TensorInfo
from pyspec.models.cuts import Cut, flaws
from pyspec.models.wants import WHOLE, Want, scale_of
from pyspec.ranges import quoted

log = logging.getLogger(__name__)

SAID = 6  # flaws of tensors that one error lists
LISTED = 8  # numbers of ranks that one lists
_BLOCK = re.compile(r"blk\.(\d{1,6})\.")


def check_tensors(
    file: GGUFFile, wants: Mapping[str, Want], alias: Mapping[str, str] | None = None
) -> None:
    """Raise BadTensors with the number of missing, misshaped and unreadable tensors, and the flaws of the first ones.

    `alias` maps the names in `wants` to those of the file, for writers that use other names.
    """
    alias, bad = alias or {}, []
    for name, want in wants.items():
        n_expert = ((want.shape[0],),) if len(want.shape) == 3 else ()
        beside = wants.get(scale_of(name), Want((1,), optional=True, also=n_expert))
        for part, need in ((name, want), (scale_of(name), beside)):
            if flaw := _flaw(file.tensors.get(alias.get(part, part)), need):
                bad.append(f"{part}: {flaw}")
    if bad:
        more = f"; and {len(bad) - SAID} more" if len(bad) > SAID else ""
        what = "1 tensor does" if len(bad) == 1 else f"{len(bad)} tensors do"
        raise BadTensors(f"{what} not fit {file.architecture}: " + "; ".join(bad[:SAID]) + more)


def _flaw(info: TensorInfo | None, want: Want) -> str:
    """The flaw of a tensor; "" if it has none."""
    if info is None:
        return "" if want.optional else f"missing, want {list(want.shape)}"
    if info.shape != want.shape and info.shape not in want.also:
        return f"want {list(want.shape)}, file has {list(info.shape)}"
    if info.type not in SUPPORTED:
        return f"type {info.type.name} is not supported"
    if (info.type in WHOLE) != want.whole:
        return (
            f"type {info.type.name} is for {'tables' if info.type in WHOLE else 'weights'}, not for this"
        )
    return ""


def check_read(
    file: GGUFFile, wants: Iterable[str], n_block: int, alias: Mapping[str, str] | None = None
) -> None:
    """Raise BadTensors if the file has blocks beyond `n_block` that nothing reads; warn of other tensors that nothing reads.

    A drafter reads the tensors of an MTP block.
    """
    alias = alias or {}
    read = {alias.get(part, part) for name in wants for part in (name, scale_of(name))}
    blocks = {name: int(found[1]) for name in file.tensors if (found := _BLOCK.match(name))}
    mtp = {blocks[name] for name in blocks if ".nextn." in name}
    rest = sorted(name for name in file.tensors if name not in read and blocks.get(name) not in mtp)
    if beyond := [name for name in rest if blocks.get(name, -1) >= n_block]:
        numbers = sorted({blocks[name] for name in beyond})
        raise BadTensors(
            f"{file.hparams.key('block_count')} makes {n_block} blocks, and the file has {len(beyond)} tensors of "
            f"{len(numbers)} more, from {quoted(beyond[0])} on: it would be another model"
        )
    if rest:
        names = ", ".join(map(quoted, rest[:SAID])) + (" ..." if rest[SAID:] else "")
        log.warning(
            "%s: nothing reads %d of its %d tensors: %s", file.path, len(rest), len(file.tensors), names
        )


def check_ranks(file: GGUFFile, cuts: Mapping[str, Cut], n: int) -> None:
    """Raise ModelError with the tensor that does not divide by `n`, and the numbers of ranks that would do."""
    if (flaw := next(flaws(file, cuts, n), None)) is None:
        return
    good = [m for m in range(1, MAX_RANKS + 1) if next(flaws(file, cuts, m), None) is None]
    listed = " or ".join(map(str, good[:LISTED])) + (
        f" (and more, to {good[-1]})" if len(good) > LISTED else ""
    )
    raise ModelError(f"--tp {n} does not divide {file.path.name}: {flaw}; --tp {listed} would do")
