"""A headless Chromium, driven over its DevTools protocol on two pipes, for the tests of the report page."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
#: A machine whose cores test other things draws a page of charts in half a minute.
TIMEOUT_S = 180
#: A page whose scripts are disabled sometimes never answers: it is opened again, in a new browser.
QUIET_S, ATTEMPTS = 20, 3


def executable() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class NoAnswer(RuntimeError):
    """The browser has ended, or says nothing for too long."""


class Page:
    """One page. `errors` and `requests` gather what its scripts raised and what it asked the network for."""

    def __init__(self, profile: Path) -> None:
        self._profile, self._emulated = profile, {"media": "", "features": []}
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._start()

    def _start(self) -> None:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        options += ["--remote-debugging-pipe", f"--user-data-dir={self._profile}", "--no-first-run"]
        # The protocol's pipes are the browser's files 3 and 4.
        command = ["sh", "-c", 'exec "$@" 3<&0 4>&1 0</dev/null 1>/dev/null', "sh", executable(), *options]
        self._pipe = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self._buffer, self._last, self._session = b"", 0, None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        self.send("Emulation.setEmulatedMedia", **self._emulated)

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._pipe.stdin.close()  # the browser ends when nobody drives it any more
        try:
            self._pipe.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(self._pipe.pid, signal.SIGKILL)
            self._pipe.wait()
        self._pipe.stdout.close()

    def send(self, method: str, within_s: float = TIMEOUT_S, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol; returns its result."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        try:
            self._pipe.stdin.write(json.dumps(message).encode() + b"\0")
            self._pipe.stdin.flush()
        except BrokenPipeError:
            raise NoAnswer("the browser has ended") from None
        while True:
            answer = self._receive(within_s)
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def _receive(self, within_s: float = TIMEOUT_S) -> dict[str, Any]:
        until = time.monotonic() + within_s
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._pipe.stdout], [], [], max(0.0, until - time.monotonic()))
            more = self._pipe.stdout.read1(1 << 20) if ready else b""
            if not more:
                raise NoAnswer(f"the browser said nothing for {within_s} s, or has ended")
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, given: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            details = given["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif event == "Log.entryAdded" and given["entry"]["level"] == "error":
            self.errors.append(given["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])

    def open(self, path: Path, fragment: str = "", width: int = 1280, height: int = 900, scripts: bool = True) -> None:
        """Load a file, in a window of the given size in CSS pixels; again in a new browser where this one is silent."""
        for attempt in range(ATTEMPTS):
            try:
                return self._open(path, fragment, width, height, scripts)
            except NoAnswer:
                if attempt == ATTEMPTS - 1:
                    raise
                self.close()
                self._start()

    def _open(self, path: Path, fragment: str, width: int, height: int, scripts: bool) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.send("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.send("Page.navigate", url="about:blank")  # else another fragment of the same file would not load it anew
        self.errors.clear()
        self.requests.clear()
        self.send("Page.navigate", url=f"{path.resolve().as_uri()}{'#' if fragment else ''}{fragment}")
        while self._receive().get("method") != "Page.loadEventFired":
            pass
        if scripts:
            self.wait("'ready' in document.documentElement.dataset")
        else:
            self.send("Runtime.evaluate", within_s=QUIET_S, expression="0")

    def wait(self, condition: str) -> None:
        """Until a JavaScript expression is true."""
        until = time.monotonic() + TIMEOUT_S
        while not self.run(condition):
            if time.monotonic() > until:
                raise RuntimeError(f"after {TIMEOUT_S} s not true: {condition}; errors: {self.errors}")
            time.sleep(0.02)

    def run(self, expression: str, awaits: bool = False) -> Any:
        """The value of a JavaScript expression, or with `awaits` of the promise that it is.

        Where a page's scripts are disabled, Chromium may never settle what it awaits, a plain value neither.
        """
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=awaits)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def texts(self, selector: str) -> list[str]:
        return self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)")

    def choose(self, switch: str, value: str) -> None:
        """Turn a switch of the report."""
        self.run(
            f"(() => {{ const s = document.getElementById('switch-{switch}'); s.value = {json.dumps(value)};"
            "s.dispatchEvent(new Event('change')); })()"
        )

    def charts(self, section: str) -> list[dict[str, Any]]:
        """Draw the charts of a section of the report; of each, the rows behind its points, and some of its layout."""
        self.run(f"document.querySelectorAll('#{section} .chart').forEach(drawChart)")
        return self.run(
            f"[...document.querySelectorAll('#{section} .chart')].map(({{ drawing: {{ data, layout }} }}) => ({{"
            "rows: data.flatMap((trace) => trace.customdata || []).filter(Boolean).map(({ shape }) => ({ shape })),"
            "width: layout.width, drags: layout.dragmode !== false, paper: layout.paper_bgcolor,"
            "scale: layout.yaxis.type ?? 'linear' }))"
        )

    def clean(self) -> None:
        """Assert that there was no error, and no request but for the page itself."""
        assert self.errors == []
        assert len(self.requests) == 1
        assert self.requests[0].startswith("file:")

    def hover(self, selector: str) -> None:
        x, y = self._middle(selector)
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        x, y = self._middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def _middle(self, selector: str) -> tuple[float, float]:
        element = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{element}.scrollIntoView({{block: 'center'}})")
        left, top, width, height = self.run(
            f"(({{left, top, width, height}}) => [left, top, width, height])({element}.getBoundingClientRect())"
        )
        return left + width / 2, top + height / 2

    def press(self, key: str) -> None:
        code = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowRight": 39, "ArrowDown": 40}[key]
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def emulate(self, media: str = "", **features: str) -> None:
        """Media type and features, such as ``prefers_color_scheme="dark"``."""
        pairs = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self._emulated = {"media": media, "features": pairs}
        self.send("Emulation.setEmulatedMedia", **self._emulated)

    def screenshot(self, whole: bool = True) -> bytes:
        return base64.b64decode(self.send("Page.captureScreenshot", captureBeyondViewport=whole)["data"])

    def pdf(self) -> bytes:
        return base64.b64decode(self.send("Page.printToPDF", preferCSSPageSize=True, printBackground=True)["data"])


@contextlib.contextmanager
def page(profile: Path) -> Iterator[Page]:
    """A page of a browser of its own, which keeps its files in `profile`."""
    page = Page(profile)
    try:
        yield page
    finally:
        page.close()
