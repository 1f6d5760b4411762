"""Datasets of the hub, by the real client: against a small server that speaks the hub's protocol, and with no server at all."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pytest

from posttrain.data import hub_data
from posttrain.data.source import DataOptions, open_rows
from posttrain.errors import DataError

COMMIT = "a" * 40
CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train.jsonl}
  - {split: test, path: main/test.jsonl}
- config_name: other
  data_files: other/*.jsonl
---
"""
FILES = {
    "README.md": CARD.encode(),
    "main/train.jsonl": b"".join(json.dumps({"question": f"{i}+1"}).encode() + b"\n" for i in range(30)),
    "main/test.jsonl": b'{"question": "9+9"}\n',
    "other/x.jsonl": b'{"a": 1}\n',
}


class Hub(http.server.BaseHTTPRequestHandler):
    """One dataset, `me/tiny`; `me/closed` is gated, everything else is not there."""

    def answer(self) -> None:
        path = unquote(urlparse(self.path).path)
        if path == "/":
            self.send(b"")
        elif path.startswith("/datasets/me/tiny/resolve/"):
            body = FILES.get(path.split("/", 6)[6])
            tag = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(body or b"").hexdigest()}"'}
            self.send(body, tag) if body is not None else self.send(b"", {"X-Error-Code": "EntryNotFound"}, 404)
        elif path == f"/api/datasets/me/tiny/revision/{COMMIT}":
            files = [{"rfilename": name} for name in FILES]
            self.send(json.dumps({"id": "me/tiny", "sha": COMMIT, "private": False, "tags": [], "siblings": files}).encode())
        elif path.startswith("/api/datasets/me/tiny/tree/"):
            folder = path.split("/", 7)[7] + "/"
            found = [{"type": "file", "path": n, "size": len(b), "oid": n} for n, b in FILES.items() if n.startswith(folder)]
            self.send(json.dumps(found).encode())
        elif "me/closed" in path:
            self.send(b"", {"X-Error-Code": "GatedRepo"}, 403)
        else:
            self.send(b"", {"X-Error-Code": "RepoNotFound"}, 404)

    do_GET = do_HEAD = do_POST = answer

    def send(self, body: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None: ...


SCRIPT = """
import json, sys
from posttrain.data.source import DataOptions, open_rows
from posttrain.errors import DataError
for options in json.loads(sys.argv[1]):
    made = DataOptions(**options)
    try:
        train, test = open_rows(made, "train"), open_rows(made, "test")
        said = [len(train), train[0], train.where(0), list(test)]
    except DataError as exc:
        said = [exc.code, exc.message, exc.cause, exc.fix]
    print(json.dumps(said))
"""


def ask(server: str, cache: Path, options: list[dict[str, Any]]) -> list[Any]:
    """What `open_rows` gives in a process of its own: the client reads its settings when it is imported."""
    environment = {**os.environ, "HF_ENDPOINT": server, "HF_HOME": str(cache)}
    environment = {k: v for k, v in environment.items() if not k.endswith("_OFFLINE") and not k.lower().endswith("_proxy")}
    done = subprocess.run([sys.executable, "-c", SCRIPT, json.dumps(options)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def test_a_hub_name_is_loaded_and_is_there_again_without_a_network(
    server: http.server.ThreadingHTTPServer, tmp_path: Path
) -> None:
    cases: list[dict[str, Any]] = [
        {"data": "me/tiny", "data_config": "main"},
        {"data": "me/tiny", "data_config": "main", "data_split": "train[:10]"},
        {"data": "me/tiny", "data_config": "main", "streaming": True, "take": 5},
        {"data": "me/tiny"},
        {"data": "me/tiny", "data_config": "main", "data_split": "trian"},
        {"data": "me/absent"},
        {"data": "me/closed"},
    ]
    url = f"http://127.0.0.1:{server.server_port}"
    test = [{"id": "1", "question": "9+9"}]
    row = {"id": "1", "question": "0+1"}
    whole, part, stream, several, split, absent, closed = ask(url, tmp_path, cases)
    assert whole == [30, row, "me/tiny/main (train), row 1", test]
    assert part == [10, row, "me/tiny/main (train[:10]), row 1", test]
    assert stream == [5, row, "me/tiny/main (train), row 1", test]
    assert several == ["dataset-config", "the dataset me/tiny has several configurations", "they are main, other",
                       "choose one: options.data_config=main"]
    assert split[1:] == ["me/tiny has no split 'trian'", "its splits: train, test", "set options.data_split=train"]
    assert absent[:2] == ["dataset-absent", "there is no dataset me/absent on the hub, and no file or folder of this name"]
    assert closed[:2] == ["dataset-gated", "the dataset me/closed is gated or private"]
    nobody = "http://127.0.0.1:9"
    whole, absent = ask(nobody, tmp_path, [cases[0], cases[5]])
    assert whole == [30, row, "me/tiny/main (train), row 1", test]
    assert absent[:2] == ["dataset-absent",
                          "the dataset me/absent is not in this machine's cache, and the hub cannot be reached from here"]


def test_without_a_network_nothing_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(hub_data, "reachable", lambda: False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("a retry"))
    with pytest.raises(DataError, match="the dataset no-such/data is not in this machine's cache") as caught:
        open_rows(DataOptions(data="no-such/data"), "train")
    assert "load it once where there is a network" in caught.value.fix
    assert (constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE) == (False, False)
