"""A headless Chromium driven over two pipes: no port is opened and no client library is needed."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

_SECONDS = 60.0
_NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    """Return the path of an installed Chromium, or ``None``."""
    return next((found for name in _NAMES if (found := shutil.which(name))), None)


class Browser:
    """One Chromium with one page, spoken to in the DevTools protocol over a pair of pipes.

    Args:
        program: Chromium's path.
        profile: Folder for its profile; made.
    """

    def __init__(self, program: str, profile: Path) -> None:
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        # Chromium reads commands from descriptor 3 and answers on 4; a shell puts the pipes there.
        command = [
            "bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "browser", program,
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
            f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command,
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(profile.parent)},
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._read, self._write = ours_in, ours_out
        self._rest = b""
        self._last_id = 0
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        page = next(
            target for target in self.call("Target.getTargets")["targetInfos"] if target["type"] == "page"
        )
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Closing the pipe is how Chromium is told to end; what hangs is killed, it alone.
        os.close(self._write)
        os.close(self._read)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and return its result; events that come meanwhile are kept."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _SECONDS
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._last_id:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def open(self, address: str) -> None:
        """Load a page and wait until all of it is there."""
        self.events.clear()
        # A new fragment alone loads nothing.
        self.call("Page.navigate", url="about:blank")
        self._wait_for("Page.loadEventFired")
        self.call("Page.navigate", url=address)
        self._wait_for("Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press and release a key, as a person at the keyboard does."""
        named = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **named)
        self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    def type(self, text: str) -> None:
        """Type text into what has the focus."""
        self.call("Input.insertText", text=text)

    def look(self, width: int, *, dark: bool = False, height: int = 900) -> None:
        """Set the width of the window and the colours that the reader prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def named(self, method: str) -> list[dict[str, Any]]:
        """Return the parameters of the events of one kind since the page was opened."""
        return [event["params"] for event in self.events if event.get("method") == method]

    def _wait_for(self, method: str) -> None:
        deadline = time.monotonic() + _SECONDS
        while not self.named(method):
            self.events.append(self._receive(deadline))
        self.events = [event for event in self.events if event.get("method") != method]

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self._read, 1 << 20) if ready else b""
            assert chunk, (
                f"Chromium {'ended' if ready else 'did not answer'} (exit code {self._process.poll()})"
            )
            self._rest += chunk
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)
