"""A hub of datasets and models for tests: the few requests of `snapshot_download`, answered by a thread on loopback."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

_REVISION = re.compile(r"/api/(?P<kind>datasets|models)/(?P<name>[^/]+/[^/]+)/revision/(?P<revision>[^?]+)")
_TREE = re.compile(r"/api/(datasets|models)/(?P<name>[^/]+/[^/]+)/tree/(?P<revision>[^/?]+)")
_FILE = re.compile(r"(/datasets)?/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>[^?]+)")


@dataclass
class Hub:
    """Datasets and models by name: of each revision its files.

    `asked` are the paths of all requests, `status` fails them all.
    """

    url: str = ""
    revisions: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    status: int = 200

    def put(self, name: str, files: dict[str, bytes], revision: str = "main") -> str:
        """Make these the files of a revision; their commit."""
        commit = hashlib.sha1(repr((name, sorted(files.items()))).encode()).hexdigest()
        self.revisions[name, revision] = self.commits[commit] = files
        return commit

    def environment(self, home: Path) -> dict[str, str]:
        """The variables with which the hub's library finds this hub, and a cache in `home`."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        if self.status != 200:
            return self.status, {}, b"{}"
        if found := _FILE.match(path):
            data = self.commits[found["revision"]].get(found["path"])
            if data is not None:
                etag = hashlib.sha1(data).hexdigest()
                return 200, {"X-Repo-Commit": found["revision"], "ETag": f'"{etag}"'}, data
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        if found := _TREE.match(path):
            return 200, {}, json.dumps(_tree(self.commits[found["revision"]])).encode()
        if found := _REVISION.match(path):
            return self._revision(found["name"], found["revision"])
        return 404, {}, b"{}"

    def _revision(self, name: str, revision: str) -> tuple[int, dict[str, str], bytes]:
        files = self.revisions.get((name, revision))
        if files is None:
            known = any(name == other for other, _ in self.revisions)
            return 404, {"X-Error-Code": "RevisionNotFound" if known else "RepoNotFound"}, b"{}"
        commit = next(commit for commit, held in self.commits.items() if held is files)
        named = [{"rfilename": path} for path in files]
        return 200, {}, json.dumps({"id": name, "sha": commit, "siblings": named}).encode()


def _tree(files: dict[str, bytes]) -> list[dict[str, object]]:
    return [
        {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        for path, data in files.items()
    ]


@contextmanager
def local_hub() -> Iterator[Hub]:
    """A hub that answers meanwhile."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.asked.append(unquote(self.path))
            status, headers, body = hub.answer(hub.asked[-1])
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that this process finds, with a cache of the test's own."""
    from huggingface_hub import constants

    before = constants.ENDPOINT
    with local_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(before, hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield hub
