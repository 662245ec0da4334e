"""Two ranks train from a server that answers as the Hugging Face Hub: each file is downloaded once,
and the cache is enough for a resume without the server.
"""

import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from helpers import TRAIN, arguments, digits_as_rows, free_port, losses, run

COMMIT = "0123456789" * 4
FILE = r"/datasets/user/digits/resolve/[^/]+/(.+)"
JSON = {"Content-Type": "application/json"}


class Hub(ThreadingHTTPServer):
    """Serves the dataset `user/digits` at one commit.

    files: content by name. downloads: how often each was sent.
    """

    def __init__(self, files: dict[str, bytes]):
        super().__init__(("127.0.0.1", 0), Answer)
        self.files = files
        self.downloads = Counter[str]()


class Answer(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def send(self, code: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def answer(self) -> None:
        path = self.path.partition("?")[0]
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        files = self.server.files
        if (found := re.fullmatch(FILE, path)) and found[1] in files:
            content = files[found[1]]
            self.server.downloads[found[1]] += self.command == "GET"
            etag = hashlib.sha1(content).hexdigest()
            self.send(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
        elif re.fullmatch(r"/api/datasets/user/digits/(tree|paths-info)/.*", path):
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
                for name, content in files.items()
            ]
            self.send(200, json.dumps(entries).encode(), JSON)
        elif path.startswith("/api/datasets/user/digits"):
            siblings = [{"rfilename": name} for name in files]
            info = {"id": "user/digits", "sha": COMMIT, "siblings": siblings, "tags": []}
            self.send(200, json.dumps(info).encode(), JSON)
        else:
            self.send(404, b"", {"X-Error-Code": "EntryNotFound"})

    do_GET = do_HEAD = do_POST = answer


@pytest.fixture
def hub(digits: Path, tmp_path: Path) -> Iterator[Hub]:
    for number in range(2):
        name = f"train-{number:05d}-of-00002.parquet"
        digits_as_rows(digits).shard(2, number).to_parquet(tmp_path / "files" / name)
    server = Hub({file.name: file.read_bytes() for file in (tmp_path / "files").iterdir()})
    Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.nightly
def test_ranks_download_once_and_resume_without_the_hub(hub: Hub, tmp_path: Path) -> None:
    settings = {
        "data__name": "hf:user/digits",
        "data__val": "train",
        "data__val_fraction": "null",
        "data__kwargs": f"{{revision: '{COMMIT}'}}",
        "train__epochs": 1,
    }
    words = [*arguments(".", tmp_path / "run", **settings), "--gpus", 2]
    env = {
        "HF_HOME": str(tmp_path / "home"),
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HUB_OFFLINE": "0",
    }

    def start(*more: str, **changes: str) -> None:
        command = [sys.executable, TRAIN, *words, "--master-port", free_port(), *more]
        done = run([str(word) for word in command], **(env | changes))
        assert done.returncode == 0, done.stderr

    start("train.max_steps=3")
    start("--resume", HF_HUB_OFFLINE="1")
    assert hub.downloads == dict.fromkeys(hub.files, 1)
    assert len(losses(tmp_path / "run")) == 14
