"""A headless Chromium that is told what to do through its DevTools protocol, over a pipe.

See https://chromedevtools.github.io/devtools-protocol/ and `--remote-debugging-pipe`: messages are
JSON, each ended by a zero byte.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

#: Chromium wants its pipe as descriptors 3 and 4.
_START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(n), fcntl.F_DUPFD, 10) for n in sys.argv[1:3]]
for end, number in zip(ends, (3, 4)):
    os.dup2(end, number)
os.execvp(sys.argv[3], sys.argv[3:])
"""
_PATIENCE = 60


def chromium() -> str | None:
    """Returns where a Chromium is, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def started(program: str, profile: Path) -> Iterator[Browser]:
    """Starts a browser, and ends it."""
    (reading, their_end), (our_end, writing) = os.pipe(), os.pipe()
    flags = [
        *("--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}"),
        *("--no-first-run", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
        *(("--no-sandbox",) if os.geteuid() == 0 else ()),  # the sandbox refuses root
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", _START, str(our_end), str(their_end), program, *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(our_end, their_end),
    )
    os.close(their_end)
    os.close(our_end)
    try:
        browser = Browser(reading, writing)
        yield browser
        browser.call("Browser.close")
        process.wait(_PATIENCE)
    finally:
        process.kill()
        process.wait()
        os.close(reading)
        os.close(writing)


class Browser:
    """The connection to a browser."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: object) -> Any:
        """Returns the result of a method."""
        self._number += 1
        number = self._number
        message: dict[str, object] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        left = json.dumps(message).encode() + b"\0"
        while left:
            left = left[os.write(self._writing, left) :]
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def wait_for(self, wanted: Callable[[dict[str, Any]], bool], after: int = 0) -> dict[str, Any]:
        """Returns the first event that is wanted, of those so far, but `after`, or still to come."""
        seen = after
        while True:
            for event in self.events[seen:]:
                if wanted(event):
                    return event
            seen = len(self.events)
            self.events.append(self._receive())

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._reading], [], [], _PATIENCE)[0]:
                raise TimeoutError("the browser says nothing")
            data = os.read(self._reading, 1 << 16)
            if not data:
                raise EOFError("the browser has ended")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        found = json.loads(message)
        assert isinstance(found, dict)
        return found


class Tab:
    """One page as somebody sees it."""

    def __init__(self, browser: Browser, *, width: int, dark: bool, media: str = "") -> None:
        self._browser = browser
        browser.events.clear()
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._target = target
        attached = browser.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def call(self, method: str, **params: object) -> Any:
        return self._browser.call(method, self._session, **params)

    def open(self, page: Path) -> None:
        """Loads a page to the end."""
        before = len(self._browser.events)
        self.call("Page.navigate", url=page.as_uri())
        self._browser.wait_for(lambda event: event.get("method") == "Page.loadEventFired", before)

    def evaluate(self, script: str) -> Any:
        """Returns the value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def heard(self, *methods: str) -> list[dict[str, Any]]:
        """Returns the events of these kinds."""
        self.evaluate("0")  # earlier events have been reported by then
        return [e["params"] for e in self._browser.events if e.get("method") in methods]

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)
