"""Names of drafters and architectures, with the module of each. A new one needs only a line here.

Names and modules are strings, so that the command line, the settings and the catalogue can read them without torch; a module is
imported when needed. Other packages add drafters as entry points of the group `pyspec.drafters`, whose value is a module as in
`pyspec.draft.drafter.DrafterModule` or `pyspec.draft.host` (`examples/own_drafter`), and architectures as entry points of `pyspec.architectures`, whose
name is that of the GGUF file and whose value is a module with `read(file) -> ModelSpec`.
"""

from __future__ import annotations

import difflib
import sys
from functools import cache

DRAFTERS = {  # the first one that recognises a file drafts with it
    "dflash2": "pyspec.draft.dflash2",
    "dspark": "pyspec.draft.dspark",
    "dflash": "pyspec.draft.dflash",
    "mtp": "pyspec.draft.mtp",
    "ngram": "pyspec.draft.ngram",
    "eagle3": "pyspec.draft.eagle3",
    "assistant": "pyspec.draft.assistant",
    "draft": "pyspec.draft.draft_model",
}
LLAMA_CPP = {"ngram": "ngram-simple", "draft": "draft-simple"}
"""Drafters that llama.cpp does not spell draft-NAME."""
ALSO = {"dflash": ("dflash2",), "mtp": ("assistant",)}
"""Drafters that llama.cpp's name of another one means, too, where the file is theirs."""
ARCHITECTURES = {  # by their GGUF name; a module with `read(file) -> ModelSpec`
    "gemma2": "pyspec.models.arch.gemma2",
    "gemma3": "pyspec.models.arch.gemma3",
    "gpt-oss": "pyspec.models.arch.gpt_oss",
    "gemma4": "pyspec.models.arch.gemma4",
    "llama": "pyspec.models.arch.llama",
    "llama4": "pyspec.models.arch.llama4",
    "qwen2": "pyspec.models.arch.qwen2",
    "qwen3": "pyspec.models.arch.qwen3",
    "qwen3moe": "pyspec.models.arch.qwen3moe",
    "qwen3next": "pyspec.models.arch.qwen3next",
    "qwen3vl": "pyspec.models.arch.qwen3vl",
    "qwen35": "pyspec.models.arch.qwen35",
    "qwen35moe": "pyspec.models.arch.qwen35moe",
    "qwen4exp": "pyspec.models.arch.qwen4exp",
    "nemotron_h": "pyspec.models.arch.nemotron",
    "nemotron_h_moe": "pyspec.models.arch.nemotron",
    "granite": "pyspec.models.arch.granite",
    "granitemoe": "pyspec.models.arch.granite",
    "granitehybrid": "pyspec.models.arch.granite",
    "smollm3": "pyspec.models.arch.smollm3",
    "seed_oss": "pyspec.models.arch.seed_oss",
    "qwen2moe": "pyspec.models.arch.qwen2moe",
    "dots1": "pyspec.models.arch.dots1",
    "bailingmoe2": "pyspec.models.arch.dots1",
    "ernie4_5": "pyspec.models.arch.ernie4_5",
    "ernie4_5-moe": "pyspec.models.arch.ernie4_5",
    "glm4": "pyspec.models.arch.glm4",
    "phi3": "pyspec.models.arch.phi3",
    "olmo2": "pyspec.models.arch.olmo2",
    "exaone4": "pyspec.models.arch.olmo2",
    "exaone-moe": "pyspec.models.arch.exaone_moe",
    "muse-glimmer": "pyspec.models.arch.muse",
    "k2-horizon": "pyspec.models.arch.k2_horizon",
    "laguna": "pyspec.models.arch.laguna",
    "step35": "pyspec.models.arch.step35",
    "falcon-h1": "pyspec.models.arch.falcon_h1",
    "cohere2": "pyspec.models.arch.cohere2",
    "hunyuan-dense": "pyspec.models.arch.hunyuan",
    "hunyuan-moe": "pyspec.models.arch.hunyuan",
    "kimi-linear": "pyspec.models.arch.kimi_linear",
    "kimi-k3": "pyspec.models.arch.kimi_k3",
    "bailingmoe3": "pyspec.models.arch.kimi_linear",
    "mistral3": "pyspec.models.arch.mistral3",
    "glm4moe": "pyspec.models.arch.glm4moe",
    "minimax-m2": "pyspec.models.arch.minimax",
    "lfm2moe": "pyspec.models.arch.lfm2",
    "lfm2": "pyspec.models.arch.lfm2",
    "deepseek2": "pyspec.models.arch.deepseek2",
    "mistral4": "pyspec.models.arch.deepseek2",
    "glm-dsa": "pyspec.models.arch.glm_dsa",
    "glm5-next": "pyspec.models.arch.glm5_next",
    "deepseek4": "pyspec.models.arch.deepseek4",
}
GROUP, ARCHITECTURE_GROUP = "pyspec.drafters", "pyspec.architectures"
RESERVED = ("auto", "none")  # other values of --spec-type: chosen at load, and no drafter
SUFFIX = "suffix"  # drafts from the text itself and from finished answers: alone, or beside a drafter as "NAME,suffix"


def not_run(what: str, arch: str) -> str:
    """The message for a file or a catalogue entry of another architecture."""
    if arch == "clip":
        return f"{what} is a projector, which reads images for a model: give the model's file with -m, and this one with --mmproj"
    near = ", ".join(difflib.get_close_matches(arch, ARCHITECTURES, 3))
    return (
        f"{what} is a model of the architecture {arch!r}, which pyspec does not run. It runs {len(ARCHITECTURES)} others "
        f"(docs/features.md){near and f', with names like this one: {near}'}. llama-server runs most; CONTRIBUTING.md describes how to add one"
    )


def _entry_points(group: str) -> dict[str, str]:
    """Name and module of the entry points of other packages."""
    return _found(group, tuple(sys.path))


@cache
def _found(group: str, path: tuple[str, ...]) -> dict[str, str]:
    """Searched once for a `sys.path`: a search reads every installed package, and a plan asks hundreds of times."""
    from importlib.metadata import entry_points  # its import takes longer than the whole help

    return {e.name: e.value for e in entry_points(group=group)}


def added_drafters() -> dict[str, str]:
    """Name and module of other packages' drafters; pyspec's own names take precedence."""
    taken = {*DRAFTERS, *RESERVED, SUFFIX}
    return {name: module for name, module in _entry_points(GROUP).items() if name not in taken}


def architecture_module(arch: str) -> str | None:
    """The module of an architecture; None if it is unknown. Other packages are searched only for a name that is not pyspec's."""
    return ARCHITECTURES.get(arch) or _entry_points(ARCHITECTURE_GROUP).get(arch)


def drafters() -> dict[str, str]:
    """Name and module of every drafter, pyspec's own first."""
    return DRAFTERS | added_drafters()


def spelt_here(kind: str) -> str:
    """The name of a drafter that may be spelt as llama.cpp does."""
    return next(
        (own for own, theirs in LLAMA_CPP.items() if theirs == kind), kind.removeprefix("draft-")
    )


def is_spec_type(name: str) -> bool:
    """True for a valid `--spec-type`. Other packages are searched only for a name that is not pyspec's."""
    name, _ = split_spec_type(name)
    return name in RESERVED or name in DRAFTERS or name in added_drafters()


def split_spec_type(name: str) -> tuple[str, bool]:
    """The drafter of a `--spec-type`, and whether suffix drafts go beside it: "suffix" is ("none", True), as "none,suffix" is."""
    if name == SUFFIX:
        return "none", True
    return name.removesuffix(f",{SUFFIX}"), name.endswith(f",{SUFFIX}")
