"""Saving, restoring and erasing slots. A thread per action reads and writes the file: no round waits for a disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspec.device.worker import is_device_error
from pyspec.engine.aside import AsideThread
from pyspec.engine.loop.job import blamed
from pyspec.engine.loop.slot_image import SlotImager
from pyspec.engine.loop.slot_task import OnAnswer, SlotTask, careful
from pyspec.engine.loop.span import StoredSpan, encoded
from pyspec.errors import PyspecError, RequestError
from pyspec.gguf.reader import fingerprint
from pyspec.repeats import limited
from pyspec.request import EngineInfo
from pyspec.slot_action import SlotAction, SlotReport, check_action
from pyspec.slots.prefix import Owner
from pyspec.slots.span_file import SLOT, SpanFile, write
from pyspec.slots.table import SlotTable

log = limited(__name__)

PROPERTIES = {
    "model": "model",
    "drafter": "drafter",
    "draft_model": "draft model",
    "rope": "scaling of rope (--rope-scaling and its like; -c, for longrope)",
    "kv_type": "type of keys and values (-ctk, -ctv)",
    "page_size": "page size (--page-size)",
    "layout": "layout of caches and states (--tp counts)",
}
"""Properties that must match when a slot is restored, with their names for people."""


def models_of(info: EngineInfo) -> dict[str, Any]:
    """The models that a state belongs to."""
    draft = info.draft_path
    return {
        "model": fingerprint(Path(info.model_path)),
        "drafter": info.drafter,
        "draft_model": fingerprint(Path(draft)) if draft else "",
        "rope": info.rope,
    }


class SlotActions:
    """Safe to call from any thread."""

    def __init__(self, imager: SlotImager, info: EngineInfo) -> None:
        self.imager, self.info = imager, info
        self._identity: dict[str, Any] | None = None

    def begin(self, action: SlotAction, on_answer: OnAnswer, add: Callable[[SlotTask], None]) -> None:
        """Start an action. `on_answer` gets its result once. `add` hands a task to the engine's thread."""
        on_answer = careful(on_answer)
        try:
            check_action(action, self.info.n_slot)
        except RequestError as e:
            on_answer(e)
            return
        if action.kind == "save":
            add(SlotTask(action.slot, lambda: self._take(action, on_answer), on_answer))
        elif action.kind == "erase":
            add(SlotTask(action.slot, lambda: self._erase(action, on_answer), on_answer))
        else:
            _aside(lambda: self._read(action, on_answer, add), on_answer)

    # -- on the engine's thread -----------------------------------------------------------------------------------

    def _take(self, action: SlotAction, on_answer: OnAnswer) -> None:
        began = time.perf_counter()
        image = self.imager.take(action.slot, action.cache_salt)
        _aside(lambda: self._write(action, image, began, on_answer), on_answer)

    def _erase(self, action: SlotAction, on_answer: OnAnswer) -> None:
        began = time.perf_counter()
        n = self.imager.erase(action.slot, action.cache_salt)
        on_answer(SlotReport(action.slot, n, ms=_since(began)))

    # -- aside ----------------------------------------------------------------------------------------------------

    def _write(self, action: SlotAction, image: StoredSpan, began: float, on_answer: OnAnswer) -> None:
        head, pieces = encoded(image, self.imager.table.handles)
        of = self.identity() | ({"salt": action.cache_salt} if action.cache_salt else {})
        n_bytes = write(Path(action.path), {"of": of, **head}, pieces, SLOT)
        log.info("slot %d: %d tokens are saved, %d bytes", action.slot, image.n_token, n_bytes)
        on_answer(SlotReport(action.slot, image.n_token, n_bytes, _since(began)))

    def _read(self, action: SlotAction, on_answer: OnAnswer, add: Callable[[SlotTask], None]) -> None:
        began = time.perf_counter()
        with SpanFile(Path(action.path), SLOT) as file:
            self._compare(file, action.cache_salt)
            image, n_bytes = self.imager.decode(file, self.info.n_vocab, self.info.n_ctx), file.size
        read_ms = _since(began)

        def put() -> None:
            began = time.perf_counter()
            self.imager.put(action.slot, image, Owner(action.client, action.cache_salt))
            log.info("slot %d: %d tokens are restored", action.slot, image.n_token)
            on_answer(SlotReport(action.slot, image.n_token, n_bytes, read_ms + _since(began)))

        add(SlotTask(action.slot, put, on_answer))

    def identity(self) -> dict[str, Any]:
        """Models and layout that a file belongs to."""
        if self._identity is None:
            self._identity = {**models_of(self.info), **self.imager.codec.layout()}
        return self._identity

    def _compare(self, file: SpanFile, salt: str) -> None:
        of = file.head.get("of")
        if not isinstance(of, dict):
            raise file.bad("it does not name its model")
        if of.get("salt", "") != salt:
            raise file.bad("it was saved by another client, whose texts are apart (--cache-share)")
        for name, here in self.identity().items():
            there = of.get(name, "")
            if there != here:
                raise file.bad(
                    f"it was saved with another {PROPERTIES[name]}: {str(there)[:64]!r}, here it is {here!r}"
                )


def run_task(task: SlotTask, table: SlotTable) -> bool:
    """Run a task, unless its slot is busy: then return False. Raises only an error of the device."""
    try:
        if table.slots[task.slot].busy:
            return False
        task.do()
    except Exception as e:
        task.failed(blamed(e))
        if is_device_error(e):
            raise
        if not isinstance(e, PyspecError):
            log.exception("a task of slot %s failed", task.slot)
    return True


def _aside(do: Callable[[], None], on_answer: OnAnswer) -> None:
    """Run on a thread of its own; a failure is the answer."""

    def run() -> None:
        try:
            do()
        except PyspecError as e:
            on_answer(e)
        except Exception as e:
            log.exception("a slot's file failed")
            on_answer(PyspecError(f"the slot's file failed: {type(e).__name__}: {str(e)[:200]}"))

    AsideThread(run, "pyspec-slot-file").start()


def _since(began: float) -> float:
    return 1e3 * (time.perf_counter() - began)
