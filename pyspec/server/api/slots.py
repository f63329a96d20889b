"""`POST /slots/{id}?action=save|restore|erase`, with llama-server's bodies and answers. Clients whose texts are apart have a folder each."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, cast

from starlette.requests import Request
from starlette.responses import Response

from pyspec.errors import NotSupported, PyspecError, RequestError
from pyspec.server.api.schema import Body
from pyspec.server.http.envelope import JSON
from pyspec.server.service import Service
from pyspec.server.stream import while_connected
from pyspec.slot_action import SlotAction, SlotAnswer, SlotReport

FORBIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f/\\:*?\"<>|\uff0e\u2215\u2216\ufffd\ufeff]|\.\.|^[ .]|[ .]$")
MOST_BYTES = 200  # of a file's name: the temporary file beside it has a longer one


class SlotFileBody(Body):
    """The file of save and restore."""

    filename: str


async def act_on_slot(service: Service, request: Request) -> Response:
    """Wait while the slot is busy, then act. Nothing is done if the client leaves before the body was read."""
    if not service.settings.slot_save_path:
        raise NotSupported("slots are not saved here; start the server with --slot-save-path DIRECTORY")
    slot, kind = request.path_params["slot"], request.query_params.get("action", "")
    if not re.fullmatch(r"[0-9]{1,9}", slot):
        raise RequestError(f"slot {slot[:40]!r} is no number")
    if kind not in ("save", "restore", "erase"):
        raise RequestError(
            f"action is {kind[:40]!r}; want save, restore or erase, as in /slots/0?action=save",
        )
    client = service.client_of(request)
    with service.admitted(client):
        raw = await service.body(request)
        name = ""
        if kind != "erase":
            name = await service.text(file_name, raw, service, n_byte=len(raw), client=client)
        salt = service.salt_of(client)
        folder = Path(service.settings.slot_save_path).absolute() / salt.replace(" ", "-")
        if kind == "save" and salt:
            with suppress(OSError):  # writing says what is wrong
                folder.mkdir(mode=0o700, exist_ok=True)
        path = str(folder / name) if name else ""
        action = SlotAction(
            cast(Literal["save", "restore", "erase"], kind), int(slot), path, client, salt
        )
        report = await while_connected(_done(service, action), request.receive)
    return JSON(view(action, name, report))


def file_name(raw: bytes, service: Service) -> str:
    """The file name of a body. RequestError unless it is a plain name in the directory."""
    name = service.checked(SlotFileBody, raw).filename
    if not name or len(name.encode()) > MOST_BYTES or FORBIDDEN.search(name):
        raise RequestError(
            f"filename: {name[:40]!r} is not a plain file name: 1 to {MOST_BYTES} bytes, no path, "
            'nothing of \\/:*?"<>|, no dot in front'
        )
    return name


async def _done(service: Service, action: SlotAction) -> SlotReport:
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[SlotAnswer] = loop.create_future()

    def settle(answer: SlotAnswer) -> None:
        if not answered.done():
            answered.set_result(answer)

    def deliver(answer: SlotAnswer) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, answer)

    service.engine.act_on_slot(action, deliver)
    answer = await answered
    if isinstance(answer, PyspecError):
        raise answer
    return answer


def view(action: SlotAction, name: str, report: SlotReport) -> dict[str, Any]:
    """llama-server's answer."""
    if action.kind == "erase":
        return {"id_slot": report.slot, "n_erased": report.n_tokens}
    counts, ms = {"save": (("n_saved", "n_written"), "save_ms")}.get(
        action.kind, (("n_restored", "n_read"), "restore_ms")
    )
    values = dict(zip(counts, (report.n_tokens, report.n_bytes), strict=True))
    return {"id_slot": report.slot, "filename": name, **values, "timings": {ms: report.ms}}
