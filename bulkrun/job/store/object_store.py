"""Objects below one `s3://` prefix, with the few verbs that results are delivered with: list, put, put if absent.

A put is whole or not at all: an upload in several pieces cannot be seen until its last request (a kill before that
leaves pieces until `end_uploads`). `put_new` is exclusive, as `publish_new` is for files:
of any number of writers one wins, and content decides who, not the reply, which may be lost. Knows no runs and no
parts. Every failing request is a RunError that names the object, the reason and the way out, never a key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bulkrun.data.storage.durable import encode_json
from bulkrun.data.storage.remote import SCHEME, connect
from bulkrun.data.storage.store_errors import error_code, has_no_time, plain_errors
from bulkrun.errors import InputError, RunError

_PIECE_BYTES = 32 * 2**20  # of an upload; two of them are in memory
_NONCE = "bulkrun-nonce"
_ANSWER_S = 60.0  # for a put that a slow store is still writing; botocore asks some times
_UPLOAD_GONE = "NoSuchUpload"  # complete, where the reply was lost, or ended by somebody
_TRANSIENT = ("RequestTimeout", "OperationAborted", "ConditionalRequestConflict", "409", _UPLOAD_GONE)
_EXISTS = ("PreconditionFailed", "412")


class ObjectPrefix:
    """The objects whose keys begin with a prefix; names are what follows it."""

    def __init__(self, url: str) -> None:
        """Raises RunError where s3fs is not installed."""
        self.url = url.rstrip("/")
        self._bucket, _, key = self.url.removeprefix(SCHEME).partition("/")
        self._key = f"{key}/" if key else ""
        try:
            self._files = connect(read_timeout=_ANSWER_S)
        except InputError as error:
            raise RunError(f"output.path: {error}") from error
        self._files.retries = 1  # of s3fs, each of which would be all of botocore's

    def list(self) -> dict[str, str]:
        """The name of every object -> its ETag. Empty objects that stand for folders are left out."""
        start = f"{self._bucket}/{self._key}"
        with self._request("listing", ""):
            found = self._files.find(start, detail=True)
        objects = {name: entry for name, entry in found.items() if entry["type"] == "file" and not name.endswith("/")}
        # Where nothing is below the prefix, s3fs finds the object of the prefix's own name, which is beside it.
        below = {name: entry for name, entry in objects.items() if name.startswith(start)}
        return {name.removeprefix(start): entry["ETag"].strip('"') for name, entry in below.items()}

    def parents(self) -> Iterator[ObjectPrefix]:
        """The prefixes that this one lies in, the bucket's root last."""
        url = self.url
        while "/" in url.removeprefix(SCHEME):
            url = url.rpartition("/")[0].rstrip("/")
            yield ObjectPrefix(url)

    def has(self, name: str) -> bool:
        """Whether there is an object `name`; one that may not be looked at is none."""
        try:
            self._head(name)
        except RunError as error:
            if isinstance(error.__cause__, FileNotFoundError | PermissionError):
                return False
            raise
        return True

    def put(self, path: Path, name: str, nonce: str) -> None:
        """Make the object `name` this file, whatever was there before."""
        with self._request("uploading", name):
            self._put(path, name, nonce, "overwrite")

    def put_new(self, path: Path, name: str, nonce: str) -> bool:
        """Make the object `name` this file if there is none. Returns whether the object there is this file now.

        `nonce` tells this content from any other's.
        """
        try:
            self._put(path, name, nonce, "create")
        except Exception as error:
            code = error_code(error)
            is_there = code in (*_EXISTS, _UPLOAD_GONE) and self.nonce(name) == nonce
            if is_there or code in _EXISTS:
                return is_there
            with self._request("uploading", name):
                raise
        return True

    def _put(self, path: Path, name: str, nonce: str, mode: str) -> None:
        target = f"{self._bucket}/{self._key}{name}"
        options: dict[str, Any] = {"chunksize": _PIECE_BYTES, "max_concurrency": 1, "Metadata": {_NONCE: nonce}}
        self._files.put_file(str(path), target, mode=mode, **options)

    def holds(self, path: Path, name: str, nonce: str, etag: str) -> bool:
        """Whether the object `name`, listed with `etag`, is this file."""
        with path.open("rb") as file:
            if etag == hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest():
                return True
        return self.nonce(name) == nonce  # ETags of several pieces, or under encryption, are not digests

    def nonce(self, name: str) -> str | None:
        """The nonce that the object `name` was put with; None without one, and where there is no such object."""
        try:
            found: str | None = self._head(name).get("Metadata", {}).get(_NONCE)
        except RunError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
        return found

    def _head(self, name: str) -> dict[str, Any]:
        with self._request("looking at it", name):
            facts: dict[str, Any] = self._files.call_s3("head_object", Bucket=self._bucket, Key=self._key + name)
        return facts

    def put_new_json(self, name: str, document: dict[str, Any]) -> bool:
        """Make the object `name` this JSON object if there is none; whether this call did."""
        try:
            self._put_document(name, document, IfNoneMatch="*")
        except Exception as error:
            if error_code(error) not in _EXISTS:
                with self._request("writing", name):
                    raise
            return False
        return True

    def put_json(self, name: str, document: dict[str, Any]) -> None:
        """Make the object `name` this JSON object, whatever was there before."""
        with self._request("writing", name):
            self._put_document(name, document)

    def _put_document(self, name: str, document: dict[str, Any], **condition: str) -> None:
        body = encode_json(document)
        self._files.call_s3("put_object", Bucket=self._bucket, Key=self._key + name, Body=body, **condition)

    def read_json(self, name: str) -> dict[str, Any]:
        """A JSON object. Raises RunError when there is none, or something else."""
        with self._request("reading", name):
            data = self._files.cat_file(f"{self._bucket}/{self._key}{name}")
        try:
            document = json.loads(data)
        except ValueError as error:
            raise RunError(f"{self.url}/{name}: not JSON ({error}); another program wrote it") from error
        if not isinstance(document, dict):
            raise RunError(f"{self.url}/{name}: not a JSON object; another program wrote it")
        return document

    def remove(self, name: str) -> None:
        """Remove one object, if it exists."""
        with self._request("removing", name):
            self._files.call_s3("delete_object", Bucket=self._bucket, Key=self._key + name)

    def end_uploads(self, names: Collection[str]) -> None:
        """Remove the pieces of uploads of these objects that were broken off, as far as that is allowed.

        Who is at such an upload just now begins it anew.
        """
        keys = {self._key + name for name in names}
        with suppress(RunError), self._request("listing uploads", ""):
            listed = self._files.call_s3("list_multipart_uploads", Bucket=self._bucket, Prefix=self._key)
            for upload in listed.get("Uploads", ()):
                if upload["Key"] in keys:
                    self._files.call_s3(
                        "abort_multipart_upload", Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                    )

    @contextmanager
    def _request(self, doing: str, name: str) -> Iterator[None]:
        with plain_errors(doing, f"{self.url}/{name}", RunError):
            yield


def is_transient(error: RunError) -> bool:
    """Whether the same request may well succeed later."""
    cause = error.__cause__
    return cause is not None and (has_no_time(cause) or error_code(cause) in _TRANSIENT)
