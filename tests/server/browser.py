"""A headless Chromium, driven over WebDriver's HTTP protocol (W3C): only the parts that the tests of the page need."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def chromedriver() -> str | None:
    """Where it is, if Chromium is there, too."""
    driver = shutil.which("chromedriver")
    return driver if driver and (shutil.which("chromium") or shutil.which("google-chrome")) else None


class Browser:
    """One window. Use as a context manager."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._profile = tempfile.TemporaryDirectory(prefix="pyspec-browser-", ignore_cleanup_errors=True)
        driver = chromedriver()
        assert driver is not None
        self._process = subprocess.Popen([driver, f"--port={self._port}"], stdout=subprocess.DEVNULL)
        until(self._is_up, 30)
        options = {"args": [*FLAGS, f"--user-data-dir={self._profile.name}"], "binary": shutil.which("chromium") or shutil.which("google-chrome")}  # fmt: skip
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._session = ""
        self._session = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})[
            "sessionId"
        ]

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._ask("DELETE", "")
        self._process.terminate()
        self._process.wait()
        self._profile.cleanup()

    def _is_up(self) -> bool:
        try:
            return bool(self._ask("GET", "/status")["ready"])
        except OSError:
            return False

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        where = "" if path in ("/status", "/session") else f"/session/{self._session}"
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{where}{path}",
            method=method,
            data=None if method != "POST" else json.dumps(body or {}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, url: str) -> None:
        self._ask("POST", "/url", {"url": url})

    def run(self, script: str) -> Any:
        """The value that a script returns."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": []})

    def _find(self, selector: str) -> str:
        return self._ask("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT]

    def click(self, selector: str) -> None:
        self._ask("POST", f"/element/{self._find(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        """Keys, as a person presses them; "\\n" is Enter."""
        self._ask(
            "POST", f"/element/{self._find(selector)}/value", {"text": text.replace("\n", "\ue007")}
        )

    def text(self, selector: str) -> str:
        """The text in the document's first such element."""
        return self.run(f"return document.querySelector({json.dumps(selector)})?.textContent ?? ''")

    def complaints(self) -> list[str]:
        """New console messages: failed scripts, and violations of the policy."""
        return [entry["message"] for entry in self._ask("POST", "/se/log", {"type": "browser"})]

    def resize(self, width: int, height: int) -> None:
        self._ask("POST", "/window/rect", {"width": width, "height": height})

    def screenshot(self, path: Path) -> None:
        import base64

        path.write_bytes(base64.b64decode(self._ask("GET", "/screenshot")))


def until(claim: Callable[[], Any], limit_s: float = 20.0) -> Any:
    """Wait until the condition holds; returns its value. The limit is for hangs."""
    end = time.monotonic() + limit_s
    while not (value := claim()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)
    return value
