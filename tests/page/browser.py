"""`Browser`: a headless Chromium, driven over its DevTools protocol through two pipes, so that no
port and no further package is needed."""

from __future__ import annotations

import base64
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
DEADLINE_S = 60.0
# Chromium reads commands from descriptor 3 and writes answers to 4; which numbers the pipes have
# here isn't known beforehand.
_WITH_PIPES = """
import os, sys
read, write = (os.dup2(int(number), 100 + place) for place, number in enumerate(sys.argv[1:3]))
os.dup2(read, 3), os.dup2(write, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, "")}  # name -> virtual key code, text


class Browser:
    """A browser with one page. `errors` holds what the page's console said of errors."""

    def __init__(self, program: str, profile: Path) -> None:
        to_browser, from_browser = os.pipe(), os.pipe()
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--remote-debugging-pipe",
        ]
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _WITH_PIPES,
                str(to_browser[0]),
                str(from_browser[1]),
                program,
                *flags,
                f"--user-data-dir={profile}",
            ],
            pass_fds=(to_browser[0], from_browser[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        self._out, self._in = (
            os.fdopen(to_browser[1], "wb", buffering=0),
            os.fdopen(from_browser[0], "rb"),
        )
        self._ids = itertools.count(1)
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self.errors: list[str] = []
        self._session: str | None = None
        threading.Thread(target=self._read, daemon=True).start()
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            self.command(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        self._out.close()  # Chromium ends when its pipe does
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command, and return its result."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params} | (
            {"sessionId": self._session} if self._session else {}
        )
        self._out.write(json.dumps(message).encode() + b"\0")
        while (answer := self._answers.get(timeout=DEADLINE_S))["id"] != number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, url: str, *, width: int = 1100, scheme: str = "light") -> None:
        """Open a page in a window of this width with this preferred colour scheme. `mobile` isn't
        set: such a window grows with overflowing content."""
        self.errors.clear()
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.command("Emulation.setScrollbarsHidden", hidden=True)
        self.command(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self.command("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        result = self.command(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait_for(self, condition: str) -> Any:
        """Return the value of a JavaScript expression as soon as it is true."""
        until = time.monotonic() + DEADLINE_S
        while not (value := self.evaluate(condition)):
            if time.monotonic() > until:
                raise TimeoutError(
                    f"{condition} isn't true after {DEADLINE_S} s; errors: {self.errors}"
                )
            self.evaluate("new Promise((done) => setTimeout(done, 50))")
        return value

    def type(self, text: str) -> None:
        self.command("Input.insertText", text=text)

    def press(self, key: str, *, ctrl: bool = False, shift: bool = False) -> None:
        code, text = KEYS[key]
        fields = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": code,
            "modifiers": 2 * ctrl + 8 * shift,
        }
        self.command("Input.dispatchKeyEvent", type="keyDown", text=text, **fields)
        self.command("Input.dispatchKeyEvent", type="keyUp", **fields)

    def screenshot(self, path: Path) -> Path:
        """Write a picture of the whole page."""
        size = self.command("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        picture = self.command("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)[
            "data"
        ]
        path.write_bytes(base64.b64decode(picture))
        return path

    def _read(self) -> None:
        text = b""
        while chunk := self._in.read1(1 << 16):
            *messages, text = (text + chunk).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._answers.put(message)
                else:
                    self._heard(message["method"], message["params"])

    def _heard(self, event: str, params: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"].get("exception", params)))
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(str(params["args"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
