"""Models, properties and slots as JSON values: llama-server's shapes with pyspec's additions, and vLLM's and SGLang's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyspec
from pyspec.request import EngineInfo, Metrics, SlotInfo
from pyspec.server.api.params import settings_dict
from pyspec.server.api.pictures import MARKER
from pyspec.server.service import Service


def draft_view(info: EngineInfo) -> dict[str, Any]:
    """The drafter and the planner's decisions about it."""
    return {
        "type": info.drafter,
        # no folders: this needs no API key
        "path": Path(info.draft_path).name if info.draft_path else "",
        "n_max": info.n_draft_max,
        "note": info.draft_note,
        "synthetic_len": info.synthetic_len,
    }


def model_head(name: str, aliases: Sequence[str], tags: Sequence[str], started: float) -> dict[str, Any]:
    """The begin of a row of `/v1/models`."""
    row: dict[str, Any] = {"id": name, "aliases": list(aliases), "tags": list(tags), "object": "model"}
    return row | {"created": int(started), "owned_by": "pyspec"}


def model_view(service: Service) -> dict[str, Any]:
    """One row of `/v1/models`."""
    info = service.engine.info
    head = model_head(service.model, service.names[1:], service.settings.tags, service.started)
    return head | {
        "meta": {
            "arch": info.arch,
            "n_vocab": info.n_vocab,
            "n_ctx": info.n_ctx,
            "n_ctx_train": info.n_ctx_train,
            "n_embd": info.n_embd,
            "n_params": info.n_params,
            "size": info.n_bytes,
            "ftype": info.file_type,
            "draft": draft_view(info),
        },
    }


def models_view(service: Service) -> dict[str, Any]:
    """`/v1/models`: OpenAI's list, and the list that clients of Ollama read."""
    details = {"format": "gguf", "family": service.engine.info.arch}
    models = [named(service.model, bool(service.media)) | {"details": details}]
    return {"object": "list", "data": [model_view(service)], "models": models}


def named(name: str, sees: bool) -> dict[str, Any]:
    """A row for clients of Ollama."""
    able = ["completion", "multimodal"] if sees else ["completion"]
    return {"name": name, "model": name, "type": "model", "capabilities": able}


def anthropic_model(name: str, started: float) -> dict[str, Any]:
    """A model as Anthropic's clients read it: those that send `anthropic-version`."""
    began = datetime.fromtimestamp(int(started), UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": name, "display_name": name, "created_at": began}


def anthropic_models(names: Sequence[str], started: float) -> dict[str, Any]:
    """`/v1/models`, a page of Anthropic's list."""
    return {
        "data": [anthropic_model(name, started) for name in names],
        "has_more": False,
        "first_id": names[0] if names else None,
        "last_id": names[-1] if names else None,
    }


def props_view(service: Service) -> dict[str, Any]:
    """`/props`."""
    info, settings = service.engine.info, service.settings
    n_most = settings.max_tokens
    params = settings_dict(settings.sampling) | {"n_predict": n_most, "max_tokens": n_most}
    return {
        "default_generation_settings": {"params": params, "n_ctx": info.n_ctx},
        "total_slots": info.n_slot,
        "model_alias": service.model,
        "model_ftype": info.file_type,
        "model_path": info.model_path,
        "modalities": {"vision": service.media is not None, "video": False, "audio": False},
        "media_marker": MARKER,
        "endpoint_slots": settings.slots,
        "endpoint_props": settings.props,
        "endpoint_metrics": settings.metrics,
        "chat_template": info.chat_template,
        "bos_token": info.bos_token,
        "eos_token": info.eos_token,
        "eog_ids": list(info.eog_ids),
        "build_info": f"pyspec {pyspec.__version__}",
        "is_sleeping": False,
        "arch": info.arch,
        "device": info.device,
        **({"cpu_activations": info.cpu_activations} if info.cpu_activations else {}),
        "draft": draft_view(info),
        "memory_plan": dict(info.memory),
    }


def slot_view(slot: SlotInfo, info: EngineInfo) -> dict[str, Any]:
    """One row of `/slots`. `params` appears with the slot's first request, as in llama-server."""
    view: dict[str, Any] = {
        "id": slot.slot,
        "n_ctx": slot.n_ctx,
        "speculative": slot.speculative,
        "is_processing": slot.is_processing,
        "id_task": _task_number(slot.request),
        "request": slot.request,
        "state": slot.state,
        "n_past": slot.n_past,
        "n_prompt_tokens": slot.n_prompt,
        "n_prompt_tokens_processed": slot.n_prompt_processed,
        "n_prompt_tokens_cache": slot.n_cached,
        "next_token": [
            {
                "has_next_token": slot.is_processing,
                "n_remain": slot.n_remain,
                "n_decoded": slot.n_decoded,
            },
        ],
        "draft": {
            "n_draft": slot.n_draft,
            "reason": slot.draft_reason,
            "window": slot.draft_window,
            "window_reason": slot.draft_window_reason,
            "acceptance": slot.acceptance,
            "experts_per_row": slot.experts_per_row,
            "miss_rate": slot.miss_rate,
            "row_ms": slot.row_ms,
            "draft_n": slot.draft_n,
            "draft_n_accepted": slot.draft_n_accepted,
            "drafted_per_pos": list(slot.drafted_per_pos),
            "accepted_per_pos": list(slot.accepted_per_pos),
        },
    }
    if slot.params is not None:
        params = settings_dict(slot.params, info.eog_ids)
        view["params"] = params | {"speculative.types": info.drafter}
    return view


def of_another(slot: SlotInfo) -> SlotInfo:
    """What a client sees of a slot that another one uses."""
    given = {name: getattr(slot, name) for name in ("slot", "n_ctx", "is_processing", "speculative")}
    return SlotInfo(**given)


def _task_number(request: str) -> int:
    """The number at the end of a request's id, because llama-server numbers its tasks. -1: none."""
    digits = re.search(r"\d+$", request)
    return int(digits[0]) if digits else -1


def ready_view(service: Service, metrics: Metrics) -> tuple[bool, dict[str, Any]]:
    """`/ready`: True if new work would be served at once, and the figures behind it."""
    is_stalled = metrics.seconds_since_step > service.settings.limits.stall_s
    state = service.engine.state() if service.engine.alive() else "not alive"
    late = "stalled" if is_stalled else ""
    reason = "draining" if service.is_draining else state if state != "ok" else late
    return not reason, {
        "status": reason or "ready",
        "step_age_s": metrics.seconds_since_step,
        "requests_processing": metrics.requests_processing,
        "requests_queued": metrics.requests_queued,
        "draining": service.is_draining,
    }


# -- what routers and probes of vLLM and SGLang read -----------------------------------------------------------------------


def server_load_view(service: Service, metrics: Metrics) -> dict[str, Any]:
    """vLLM's `/load`."""
    return {"server_load": metrics.requests_processing + metrics.requests_queued}


def load_view(service: Service, metrics: Metrics) -> list[dict[str, Any]]:
    """SGLang's `/get_load`. One row: there is one queue of requests, even if several devices share the model."""
    n_token = sum(slot.n_past for slot in service.engine.slots() if slot.is_processing)
    n = metrics.requests_processing
    n_waiting = metrics.requests_queued
    row = {"dp_rank": 0, "num_reqs": n + n_waiting, "num_waiting_reqs": n_waiting}
    return [row | {"num_tokens": n_token}]


def served_model_view(service: Service, metrics: Metrics) -> dict[str, Any]:
    """SGLang's `/model_info`."""
    info = service.engine.info
    return {
        "model_path": info.model_path,
        "tokenizer_path": info.model_path,
        "served_model_name": service.model,
        "model_type": info.arch,
        "is_generation": True,
        "has_image_understanding": service.media is not None,
        "has_audio_understanding": False,
    }


def server_view(service: Service, metrics: Metrics) -> dict[str, Any]:
    """SGLang's `/server_info`: its names for equal settings; drafting under pyspec's names."""
    info, settings = service.engine.info, service.settings
    return served_model_view(service, metrics) | {
        "version": pyspec.__version__,
        "device": info.device,
        "context_length": info.n_ctx,
        "vocab_size": info.n_vocab,
        "max_running_requests": info.n_slot,
        "dp_size": 1,
        "speculative_algorithm": info.drafter,
        "speculative_num_draft_tokens": info.n_draft_max,
        "tool_call_parser": settings.tool_call_parser,
        "reasoning_format": settings.reasoning_format,
        "enable_metrics": settings.metrics,
        "internal_states": load_view(service, metrics),
    }
