"""`pyspec ps`: this machine's servers, their models, and the state of their slots."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import ProxyHandler, Request, build_opener

import click

from pyspec.cli import verbose_option
from pyspec.ranges import printable

if TYPE_CHECKING:
    from pyspec.cli.running import Running

ASK_S = 3.0
MOST_BYTES = 16 << 20


@click.command()
@click.argument("address", nargs=-1, metavar="[HOST:PORT]...")
@click.option("--api-key", default="", envvar="LLAMA_API_KEY", help="API key of the servers.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@verbose_option
def ps(address: tuple[str, ...], api_key: str, as_json: bool) -> None:
    """Show running servers: model, slots, drafts.

    Without an address, shows the servers that this user has started here. Exit status 1 if a server does not answer.
    """
    from pyspec.cli.running import running

    if address:
        urls = (one if "://" in one else f"http://{one}" for one in address)
        found = [query_server(url.rstrip("/"), api_key) for url in urls]
    else:
        found = [_with_name(query_server(r.url, api_key), r) for r in running()]
    if as_json:
        click.echo(json.dumps(found, indent=1))
    elif found:
        _show(found)
    else:
        click.echo("this user has no running server here", err=True)
    if any(one["state"] == "no answer" for one in found):
        click.get_current_context().exit(1)


def _with_name(about: dict[str, Any], one: Running) -> dict[str, Any]:
    """A server's report and its file's: while it loads, its only name is the typed one."""
    up_s = round(time.time() - one.began)
    return {"pid": one.pid, "up_s": up_s, **about, "model": about["model"] or one.model}


def query_server(url: str, api_key: str = "") -> dict[str, Any]:
    """A server's report on itself; `state` is "no answer" without one, and `note` gives the reason for missing parts."""
    about: dict[str, Any] = {"url": url, "state": "no answer", "model": "", "slots": [], "note": ""}
    status, health = _get_json(url, "/health", api_key)
    if status == 0:
        return about | {"note": str(health)}
    is_ready = status == 200 and isinstance(health, dict)
    about["state"] = health.get("status", "ok") if is_ready else "loading"
    if status != 200:
        about["progress"] = health.get("progress", {}) if isinstance(health, dict) else {}
        return about
    status, props = _get_json(url, "/props", api_key)
    if status == 200 and isinstance(props, dict):
        about["model"] = str(props.get("model_alias") or props.get("model_path") or "")
        about["total_slots"] = props.get("total_slots")
        if props.get("role") == "router":
            return about | _of_several(url, api_key)
    status, slots = _get_json(url, "/slots", api_key)
    if status == 200 and isinstance(slots, list):
        about["slots"] = [s for s in slots if isinstance(s, dict)]
    elif status in (401, 403):
        about["note"] = "needs a key: --api-key"
    elif status:
        about["note"] = f"/slots answers {status}"
    return about


def _of_several(url: str, api_key: str) -> dict[str, Any]:
    """A report of several models: their states, and the slots of those that are loaded."""
    rows = served_models(url, api_key)
    loaded = [row["id"] for row in rows if row["status"]["value"] == "loaded"]
    slots = []
    for name in loaded:
        _, found = _get_json(url, f"/slots?model={quote(name, safe='')}", api_key)
        slots += found if isinstance(found, list) else []
    states = {row["id"]: row["status"]["value"] for row in rows}
    return {"model": ", ".join(loaded) or "none loaded", "models": states, "slots": slots}


def served_models(url: str, api_key: str = "") -> list[dict[str, Any]]:
    """The rows of a server with several models; none of another one."""
    _, answer = _get_json(url, "/models", api_key)
    rows = answer.get("data", []) if isinstance(answer, dict) else []
    return [row for row in rows if isinstance(row, dict) and isinstance(row.get("status"), dict)]


def routers() -> dict[str, list[dict[str, Any]]]:
    """The rows of this user's servers with several models, by address."""
    from pyspec.cli.running import running

    found = {one.url: served_models(one.url, os.environ.get("LLAMA_API_KEY", "")) for one in running()}
    return {url: rows for url, rows in found.items() if rows}


def posted(url: str, body: dict[str, Any]) -> Iterator[str]:
    """The lines of an answer as they come; an error's body is one."""
    key = os.environ.get("LLAMA_API_KEY", "")
    request = Request(url, json.dumps(body).encode(), {"Authorization": f"Bearer {key}"} if key else {})
    try:
        with build_opener(ProxyHandler({})).open(request) as answer:
            yield from (line.decode("utf-8", "replace") for line in answer)
    except HTTPError as e:
        yield e.read(MOST_BYTES).decode("utf-8", "replace")


def reread() -> None:
    """Let those servers read their sources anew: a model has come."""
    for url in routers():
        _get_json(url, "/models?reload=1", os.environ.get("LLAMA_API_KEY", ""))


def _get_json(url: str, path: str, api_key: str) -> tuple[int, Any]:
    """(status, JSON), or (0, the reason for no answer). Uses no proxy, because these servers are on this network."""
    request = Request(url + path, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=ASK_S) as answer:
            return answer.status, json.loads(answer.read(MOST_BYTES))
    except HTTPError as e:
        with suppress(ValueError, OSError):
            return e.code, json.loads(e.read(MOST_BYTES))
        return e.code, {}
    except (URLError, OSError) as e:
        return 0, getattr(e, "reason", e)
    except ValueError:
        return 0, "the answer is not JSON"


def _show(found: list[dict[str, Any]]) -> None:
    from pyspec.cli.tables import row, show, table

    t = table("url", "pid", "state", "model", "busy", "tokens", "drafts", right=("pid", "tokens"))
    for one in found:
        busy = [s for s in one["slots"] if s.get("is_processing")]
        n_slot = len(one["slots"]) or one.get("total_slots") or "?"
        count = f"{len(busy) if one['slots'] else '?'} of {n_slot}"
        pid, model = str(one.get("pid", "-")), one["model"] or "-"
        row(t, one["url"], pid, _state(one), model, count, _tokens(busy), _drafts(one))
    show(t)
    for one in found:
        for name, state in one.get("models", {}).items():
            click.echo(f"{one['url']}: {printable(name)}: {state}")
        if one["note"]:
            click.echo(f"{one['url']}: {one['note']}", err=True)


def _state(one: dict[str, Any]) -> str:
    """The state in words; while loading, with the progress."""
    progress = one.get("progress")
    if not isinstance(progress, dict) or not isinstance(progress.get("fraction"), float | int):
        return str(one["state"])
    return f"{one['state']}: {progress.get('stage', '')}, {100 * progress['fraction']:.0f} %"


def _tokens(busy: list[dict[str, Any]]) -> str:
    """Tokens in these slots, and how far their prompts are: the first part of a long one may take seconds."""
    tokens = sum(int(s.get("n_past") or 0) for s in busy)
    reading = [s for s in busy if s.get("state") == "prefill"]
    done, whole = (
        sum(int(s.get(name) or 0) for s in reading)
        for name in ("n_prompt_tokens_processed", "n_prompt_tokens")
    )
    return f"{tokens}, reads prompts: {done} of {whole}" if reading else str(tokens)


def _drafts(one: dict[str, Any]) -> str:
    """The state of drafting: for each busy slot its draft length and acceptance rate, or the reason for none."""
    if not any(s.get("speculative") for s in one["slots"]):
        return "off" if one["slots"] else "?"
    said = []
    for draft in (s.get("draft") or {} for s in one["slots"] if s.get("is_processing")):
        n = draft.get("n_draft") or 0
        rate, why = float(draft.get("acceptance") or 0), draft.get("reason") or "?"
        said.append(f"{n} ({rate:.0%})" if n else f"0: {why}")
    return ", ".join(said) or "on"
