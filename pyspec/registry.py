"""What can be named: drafters and architectures, and the module behind each name. A line here is all that makes one known.

Names and modules stand here as text: the command line, the settings and the catalogue read them without torch, and a module is
imported when it is wanted. Drafters of other packages are entry points of the group `pyspec.drafters`, whose value is a module
with what `pyspec.draft.drafter.DrafterModule` says (`examples/own_drafter`).
"""

from __future__ import annotations

DRAFTERS = {
    "dflash": "pyspec.draft.dflash",
    "mtp": "pyspec.draft.mtp",
    "ngram": "pyspec.draft.ngram",
}
ARCHITECTURES = {  # by their GGUF name; a module with `read(file) -> ModelConfig`
    "llama": "pyspec.models.llama",
    "qwen3": "pyspec.models.qwen3",
    "qwen35": "pyspec.models.qwen35",
    "qwen35moe": "pyspec.models.qwen35moe",
    "nemotron_h": "pyspec.models.nemotron",
    "nemotron_h_moe": "pyspec.models.nemotron",
    "deepseek4": "pyspec.models.deepseek4",
}
FAMILIES = (
    "Llama (llama), Qwen3 (qwen3), Qwen3.5 to 3.8 (qwen35, qwen35moe), Nemotron-H and Nemotron 3 (nemotron_h, "
    "nemotron_h_moe), DeepSeek-V4 (deepseek4)"
)
"""The same by the names of models, for people."""
NEXT_STEP = 'llama-server runs most others; docs/architecture.md, "Adding things", says how one is added here'
GROUP = "pyspec.drafters"
WHETHER = ("auto", "none")  # what a drafter's name may be given as besides: decided at load, and no drafter


def not_run(what: str, arch: str) -> str:
    """What to say of a file, or an entry of the catalogue, whose architecture is none of these."""
    return f"{what} is a model of the architecture {arch!r}, which pyspec does not run. It runs {FAMILIES}. {NEXT_STEP}"


def added_drafters() -> dict[str, str]:
    """Name and module of the drafters that other packages bring; a name that is taken stays ours."""
    from importlib.metadata import entry_points  # it takes longer to import than the command line has for its help

    taken = {*DRAFTERS, *WHETHER}
    return {e.name: e.value for e in entry_points(group=GROUP) if e.name not in taken}


def drafters() -> dict[str, str]:
    """Name and module of every drafter there is, ours first."""
    return DRAFTERS | added_drafters()


def is_spec_type(name: str) -> bool:
    """Whether `--spec-type NAME` means something. Other packages are looked through only for a name that is not ours."""
    return name in WHETHER or name in DRAFTERS or name in added_drafters()
