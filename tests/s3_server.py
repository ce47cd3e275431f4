"""A local S3 store for tests: moto's server as a process of its own, on a free loopback port, ended by its pid."""

from __future__ import annotations

import functools
import importlib.util
import os
import secrets
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_SERVER = """
import sys, threading
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
KEY, SECRET = "test-key-id", "test-secret-nobody-may-see"


MODULES = ("moto", "s3fs", "flask", "flask_cors")


@contextmanager
def local_store(**variables: str) -> Iterator[str]:
    """The URL of a store that runs meanwhile; its process has these environment variables too."""
    command, pipe = [sys.executable, "-c", _SERVER], subprocess.PIPE
    environment = {**os.environ, **variables}
    server = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environment)
    assert server.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.kill()
        server.communicate()


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The URL of a running store; skips where moto or s3fs is not installed."""
    for module in MODULES:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs `pip install s3fs 'moto[s3]' flask flask-cors` ({module} is missing)")
    with local_store() as url:
        yield url


def s3_environment(endpoint: str) -> dict[str, str]:
    """The variables with which every AWS library finds the local store and nothing else."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


class Bucket:
    """A bucket of the local store, as a test looks at it: by plain requests, not through bulkrun."""

    def __init__(self, files: Any) -> None:
        self.name = f"bucket-{secrets.token_hex(4)}"
        self.files = files
        self.files.call_s3("create_bucket", Bucket=self.name)

    def url(self, key: str = "") -> str:
        return f"s3://{self.name}/{key}"

    def put(self, key: str, data: bytes) -> str:
        self.files.call_s3("put_object", Bucket=self.name, Key=key, Body=data)
        return self.url(key)

    def get(self, key: str) -> bytes:
        data: bytes = self.files.cat_file(f"{self.name}/{key}")
        return data

    def list(self, prefix: str = "") -> list[str]:
        found = self.files.find(f"{self.name}/{prefix}")
        return sorted(name.removeprefix(f"{self.name}/") for name in found)


class Requests:
    """What this process asks of the store.

    `failing`: methods, and how often each is refused from now on, with `refusal` or a 503.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import s3fs

        self.asked: Counter[str] = Counter()
        self.failing: Counter[str] = Counter()
        self.refusal: Exception | None = None
        real = s3fs.S3FileSystem._call_s3

        async def call(files: Any, method: str, *arguments: Any, **options: Any) -> Any:
            self.asked[method] += 1
            if self.failing[method] > 0:
                self.failing[method] -= 1
                raise self.refusal or OSError("busy") from self._no_time(method)
            return await real(files, method, *arguments, **options)

        monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", call)

    def _no_time(self, method: str) -> Exception:
        from botocore.exceptions import ClientError

        answer: Any = {"Error": {"Code": "ServiceUnavailable"}, "ResponseMetadata": {"HTTPStatusCode": 503}}
        return ClientError(answer, method)


@pytest.fixture
def requests_made(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Requests:
    """Counts the requests for single objects, and can refuse them."""
    return Requests(monkeypatch)


@functools.cache
def _loader(search_path: str | None = None) -> Any:
    """botocore's reader of what it knows of each service, which takes most of the time of a new connection."""
    from botocore.loaders import create_loader

    return create_loader(search_path)


@pytest.fixture
def bucket(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A new bucket in a local store that the environment points to."""
    import botocore.session
    import s3fs

    monkeypatch.setattr(botocore.session, "create_loader", _loader)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    for name, value in s3_environment(s3_endpoint).items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()  # bulkrun's connections are for another environment
    return Bucket(s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False))
