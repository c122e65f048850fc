"""A headless Chromium, driven over its debugging pipe (Chrome DevTools Protocol): no driver, no port, no other package."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SECONDS = 60.0  # for one answer

# What the page says of itself once it is loaded.
LOOK = """({
  width: document.documentElement.clientWidth, wide: document.documentElement.scrollWidth,
  images: [...document.images].map(i => i.complete && i.naturalWidth > 0),
  pictures: [...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect()).map(r => [r.left, r.right, r.height]),
  ground: getComputedStyle(document.body).backgroundColor, ink: getComputedStyle(document.body).color,
  letters: Math.min(...[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height)),
  text: document.body.innerText,
})"""


class Browser:
    """One page. `errors` and `requests` collect what Chromium reports of it."""

    def __init__(self, profile: Path):
        assert CHROMIUM is not None
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
                   f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]  # fmt: skip
        # The pipe's ends are 3 and 4 by definition; the shell puts them there.
        script = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command], pass_fds=(to_read, to_write), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._number, self._session = b"", 0, None
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def open(self, page: Path, *, width: int, dark: bool) -> dict:
        """Load a file at a window's width in pixels; return what `LOOK` says."""
        self.errors, self.requests, self._loaded = [], [], False
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Page.navigate", url=page.as_uri())
        while not self._loaded:
            self._take(self._receive())
        return self.call("Runtime.evaluate", expression=LOOK, returnByValue=True)["result"]["value"]

    def screenshot(self, path: Path) -> None:
        """Write the whole page as PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def call(self, method: str, **parameters: object) -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            self._take(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _receive(self) -> dict:
        until = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            part = os.read(self._read, 1 << 20) if ready else b""
            assert part, f"chromium said nothing within {SECONDS:.0f} s, or ended"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def _take(self, event: dict) -> None:
        method, told = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif method == "Runtime.exceptionThrown" or (
            method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning")
        ):
            self.errors.append(json.dumps(told))
        elif method == "Log.entryAdded":
            self.errors.append(told["entry"]["text"])

    def close(self) -> None:
        os.close(self._write)
        os.close(self._read)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
