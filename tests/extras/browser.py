"""Chromium for tests of pages, by its DevTools protocol over two pipes. It has no network."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

LAYOUT_PROBLEMS = """
(() => {
  const problems = [];
  const page = document.documentElement;
  if (page.scrollWidth > innerWidth) problems.push(`page is ${page.scrollWidth} px wide`);
  const name = (e) => `${e.tagName}.${e.className} ${e.textContent.slice(0, 30)}`;
  const overlap = (a, b) => {
    const [p, q] = [a.getBoundingClientRect(), b.getBoundingClientRect()];
    const width = Math.min(p.right, q.right) - Math.max(p.left, q.left);
    const height = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
    return Math.min(width, height) > 1;
  };
  const check = (elements) => elements.forEach((a, i) => elements.slice(i + 1).forEach((b) => {
    if (overlap(a, b)) problems.push(`${name(a)} is over ${name(b)}`);
  }));
  const inside = (parent) => [...parent.children].filter((e) => e.getClientRects().length);
  for (const parent of document.querySelectorAll("body, main, .numbers, .grid, .gallery, .bar"))
    check(inside(parent));
  for (const card of document.querySelectorAll(".card, .number, .gallery figure"))
    check(inside(card));
  for (const plot of document.querySelectorAll(".plot svg")) {
    check([...plot.querySelectorAll("text")]);
    const frame = plot.getBoundingClientRect();
    for (const text of plot.querySelectorAll("text")) {
      const box = text.getBoundingClientRect();
      if (box.left < frame.left - 1 || box.right > frame.right + 1)
        problems.push(`${name(text)} is outside its figure`);
    }
  }
  for (const box of document.querySelectorAll(".number, .hint, .note, h1, h2, h3, figcaption"))
    if (box.getBoundingClientRect().right > innerWidth) problems.push(`${name(box)} is cut off`);
  return problems;
})()
"""


class Browser:
    """A page of Chromium. messages: errors and warnings of its console. urls: that it requested."""

    def __init__(self, commands: int, answers: int):
        self._commands = commands
        self._answers = answers
        self._received = b""
        self._number = 0
        self._session: str | None = None
        self.messages: list[str] = []
        self.urls: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        call: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            call["sessionId"] = self._session
        os.write(self._commands, json.dumps(call).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            received = os.read(self._answers, 1 << 20)
            assert received, "Chromium has ended"
            self._received += received
        line, _, self._received = self._received.partition(b"\0")
        message = json.loads(line)
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.messages.append(json.dumps(params["exceptionDetails"])[:500])
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.messages.append(params["entry"]["text"])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.messages.append(json.dumps(params["args"])[:500])
            case "Network.requestWillBeSent":
                self.urls.append(params["request"]["url"])
        return message

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page; of a promise, when it is fulfilled."""
        result = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def open(self, page: Path, width: int = 1400) -> None:
        """Open a page, and wait until it is loaded."""
        self.messages.clear()
        self.urls.clear()
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        self.settle()
        self.send("Page.navigate", url=page.as_uri())
        for _ in range(600):
            ready = "document.readyState === 'complete'"
            if self.evaluate(ready):
                break
            time.sleep(0.1)
        else:
            raise AssertionError(f"The page is not loaded: {self.messages}")
        self.settle()

    def settle(self) -> None:
        """Wait for the next frames, in which figures follow the size of the window."""
        self.evaluate("new Promise((done) => setTimeout(() => requestAnimationFrame(done), 250))")

    def layout_problems(self) -> list[str]:
        """Elements that are wider than the window or over another one."""
        return self.evaluate(LAYOUT_PROBLEMS)


@contextmanager
def open_browser(profile: Path) -> Iterator[Browser]:
    """profile: a folder for Chromium's files."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("needs a browser (Debian: chromium)")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    flags += ["--remote-debugging-pipe", "--disable-background-networking"]
    flags += ["--host-resolver-rules=MAP * ~NOTFOUND"]
    command_end, commands = os.pipe()
    answers, answer_end = os.pipe()
    # Chromium reads from descriptor 3 and writes to 4.
    script = f'exec 3<&{command_end} 4>&{answer_end}; exec "$@"'
    words = ["bash", "-c", script, "bash", program, *flags, f"--user-data-dir={profile}"]
    with subprocess.Popen(
        words, pass_fds=(command_end, answer_end), stderr=subprocess.DEVNULL
    ) as process:
        os.close(command_end)
        os.close(answer_end)
        try:
            yield Browser(commands, answers)
        finally:
            process.kill()
            os.close(commands)
            os.close(answers)
