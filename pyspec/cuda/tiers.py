"""What ops may run as, as a person wants it (`--kernels`): all of them, or some by name. For the whole process."""

from __future__ import annotations

from difflib import get_close_matches

from pyspec.cuda import survey
from pyspec.cuda.examine import EXAMINATION
from pyspec.cuda.ops.linear.op import linear_tall
from pyspec.errors import ConfigError


def use(text: str) -> None:
    """From now on ops are chosen so: "triton", or "linear=triton,attend=reference". ConfigError for an op that is none."""
    wanted = wanted_of(text)
    if wanted != EXAMINATION.tiers:
        EXAMINATION.tiers = wanted
        for op in (*survey.ops(), linear_tall):
            op.decided.clear()


def wanted_of(text: str) -> dict[str, str]:
    """Tiers by op; "" stands for all that are not named."""
    if "=" not in text:
        return {} if text == "auto" else {"": text}
    wanted = dict(part.split("=") for part in text.split(","))
    for name in wanted:
        if name not in survey.OPS:
            near = get_close_matches(name, survey.OPS, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"--kernels: there is no op {name}{hint} (there are {', '.join(survey.OPS)})")
    return wanted
