"""The bucket of a life, as its user and other programs see it: by plain requests to the store, not through bulkrun."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock
from urllib.parse import quote, unquote
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs
import pyarrow.parquet as pq

from bulkrun.data.storage import patience
from bulkrun.job.store import object_store
from tests.campaigns.kill_update import Doom
from tests.s3_server import KEY, local_store, s3_environment

PREFIX = "results/"
_ANY_PIECE = {"S3_UPLOAD_PART_MIN_SIZE": "1", "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(2**22)}
_CHANGES = ("PutObject", "DeleteObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload")


class Store:
    """One local store for all lives of a campaign, which runs from when the first of them asks for a bucket."""

    def __init__(self) -> None:
        self._server = ExitStack()
        self._endpoint: str | None = None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def bucket(self, name: str, piece_bytes: int) -> Bucket:
        """A new one; all others, of lives before, are gone then."""
        if self._endpoint is None:
            import s3fs  # noqa: F401  (here once, and not in each child)

            self._endpoint = self._server.enter_context(local_store(**_ANY_PIECE))
            os.environ.update(s3_environment(self._endpoint))
            os.environ.pop("AWS_PROFILE", None)
        _ask("POST", f"{self._endpoint}/moto-api/reset")
        return Bucket(self._endpoint, name, piece_bytes)


class Bucket:
    """Its objects below `PREFIX`, by name. Files of twice `piece_bytes` are uploaded in several pieces."""

    def __init__(self, endpoint: str, name: str, piece_bytes: int) -> None:
        self._endpoint, self._name, self.piece_bytes = endpoint, name, piece_bytes
        _ask("PUT", f"{endpoint}/{name}")

    @property
    def url(self) -> str:
        return f"s3://{self._name}/{PREFIX}".rstrip("/")

    def objects(self) -> dict[str, bytes]:
        """All that is there. A life has fewer than the 1,000 objects of one listing."""
        listed = map(unquote, self._listed(f"?list-type=2&encoding-type=url&prefix={PREFIX}", "Key"))
        return {key.removeprefix(PREFIX): _ask("GET", self._address(key)) for key in listed}

    def uploads(self) -> list[str]:
        """The keys of uploads that were begun and neither finished nor ended."""
        return self._listed("?uploads", "Key")

    def remove(self, *names: str) -> None:
        for name in names:
            _ask("DELETE", self._address(PREFIX + name))

    def read(self) -> list[dict[str, Any]]:
        """All rows of the prefix, by pyarrow's own client. In a child: it has threads."""
        remote = pyarrow.fs.S3FileSystem(endpoint_override=self._endpoint.removeprefix("http://"), scheme="http")
        found = pyarrow.dataset.dataset(f"{self._name}/{PREFIX}", filesystem=remote, format="parquet")
        rows: list[dict[str, Any]] = found.to_table().to_pylist()
        return rows

    @contextmanager
    def used(self) -> Iterator[None]:
        """Commands in the body are not patient, and have small pieces."""
        with (
            mock.patch.object(object_store, "_PIECE_BYTES", self.piece_bytes),
            mock.patch.object(patience, "FIRST_PAUSE_S", 0.01),
        ):
            yield

    def _address(self, key: str) -> str:
        return f"{self._endpoint}/{self._name}/{quote(key)}"

    def _listed(self, query: str, what: str) -> list[str]:
        document = ElementTree.fromstring(_ask("GET", f"{self._endpoint}/{self._name}{query}"))
        return [str(found.text) for found in document.iter() if found.tag.rpartition("}")[2] == what]


def rows_of(objects: dict[str, bytes]) -> list[dict[str, Any]]:
    """The rows of the Parquet among them. Raises where one is not whole."""
    parts = [data for name, data in sorted(objects.items()) if name.endswith(".parquet")]
    return [row for data in parts for row in pq.read_table(pa.BufferReader(data), use_threads=False).to_pylist()]


def count_requests(doom: Doom) -> None:
    """Count the requests that change a store as durable operations, each piece of an upload as one."""
    from aiobotocore.client import AioBaseClient

    ask = AioBaseClient._make_api_call

    async def call(client: Any, method: str, *arguments: Any) -> Any:
        if method not in _CHANGES:
            return await ask(client, method, *arguments)
        with doom.operation():
            return await ask(client, method, *arguments)

    mock.patch.object(AioBaseClient, "_make_api_call", call).start()


def _ask(method: str, url: str) -> bytes:
    signed = {"Authorization": f"AWS4-HMAC-SHA256 Credential={KEY}/20260101/us-east-1/s3/aws4_request"}  # unchecked
    request = urllib.request.Request(url, method=method, headers=signed)
    with urllib.request.urlopen(request, timeout=30) as answer:
        data: bytes = answer.read()
    return data
