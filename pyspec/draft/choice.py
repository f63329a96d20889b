"""The choice of a load's drafter: by name or by file, with suffix drafts beside it, and of the target's vocabulary."""

from __future__ import annotations

from dataclasses import replace

from pyspec import draft
from pyspec.config import EngineSettings
from pyspec.draft.drafter import NO_DRAFTER, ONLY_SUFFIXES, DraftPlan, TargetFile, refuse_file
from pyspec.errors import ConfigError, PairError, PyspecError
from pyspec.gguf import GGUFFile
from pyspec.ranges import quoted
from pyspec.registry import drafters


def checked_draft(file: GGUFFile | None, target: TargetFile, settings: EngineSettings) -> DraftPlan:
    """The plan of a load's drafter. A file of another vocabulary is refused first, unless the plan maps it."""
    try:
        plan = plan_draft(file, target, settings)
    except PyspecError:
        if file is not None:
            check_vocabulary(target.file, file)
        raise
    if file is not None and not plan.maps_tokens:
        check_vocabulary(target.file, file)
    return replace(plan, remark=plan.remark + plan.check())


def plan_draft(file: GGUFFile | None, target: TargetFile, settings: EngineSettings) -> DraftPlan:
    """What drafts: the drafter's plan, with suffix drafts beside it if they are on."""
    plan = _plan_drafter(file, target, settings)
    how = settings.draft_sampling
    if how != "argmax" and plan.kind != "none" and plan.draws != how:
        raise ConfigError(
            f"--spec-draft-sampling {how} needs a drafter with probabilities, and {plan.kind} has none"
        )
    if settings.n_suffix:
        plan = ONLY_SUFFIXES if plan.kind == "none" else plan
        plan = replace(plan, n_suffix=settings.n_suffix)
    return plan


def _plan_drafter(file: GGUFFile | None, target: TargetFile, settings: EngineSettings) -> DraftPlan:
    """Which drafter runs, and how. One that was given is a request: if it can not run, loading fails with the reason."""
    kind: str | None = settings.drafter
    if kind == "auto":
        kind = draft.recognised(target.file) if file is None else draft.given(file, target)
        if kind is None and file is not None:
            known = ", ".join(drafters())
            raise PairError(
                f"the draft file ({file.architecture}) is for none of the drafters there are ({known}), and no model that pyspec "
                "runs. --spec-type ngram needs no file"
            )
    if kind is None or kind == "none":
        refuse_file(settings.spec_type if settings.n_suffix else "none", file)
        return NO_DRAFTER if kind is None else replace(NO_DRAFTER, remark="(--spec-type none)")
    return draft.find(draft.meant(kind, file)).plan(file, target, settings)


def check_vocabulary(target: GGUFFile, drafter: GGUFFile) -> None:
    """Both files must mean the same token by the same id."""
    key = "tokenizer.ggml.tokens"
    if key not in target.fields or key not in drafter.fields:
        return
    a, b = target.fields.strings(key), drafter.fields.strings(key)
    if a == b:
        return
    if len(a) != len(b):
        raise PairError(
            f"the drafter has {len(b)} tokens, the target {len(a)}: they do not share a vocabulary"
        )
    i = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    raise PairError(
        f"token {i} is {quoted(b[i])} in the drafter and {quoted(a[i])} in the target: not the same vocabulary"
    )
