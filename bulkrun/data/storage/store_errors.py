"""Which object store is asked, and what its errors mean: in plain words, and whether they go away by themselves.

Words are made of codes and names alone: a server's own may hold a key. Knows no objects and no requests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from bulkrun.errors import BulkrunError, InputError, RunError

STAYS = "give the run an input that does not change"
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_UNREACHED = {"HTTPClientError", "ConnectionError", "TimeoutError", "ClientConnectionError"}
_BROKEN_OFF = {"ClientPayloadError", "FlexibleChecksumError", "IncompleteReadError", "ResponseParserError"}
_KEYS = "check the keys (AWS_ACCESS_KEY_ID...)"
_ELSEWHERE = "the bucket is in another region or at another endpoint; set AWS_DEFAULT_REGION, or AWS_ENDPOINT_URL"
_OLD_TOKEN = "a token that has expired; renew it (AWS_SESSION_TOKEN, AWS_PROFILE)"
_UNKNOWN = "does not know what was asked ({code}); results need `If-None-Match: *`: use a store that has it"
_CAUSES = {  # by the store's code, or by the name of what botocore raises; the first word is the store
    "NoSuchBucket": "there is no such bucket in {where}; check its name, and AWS_ENDPOINT_URL",
    "NoSuchUpload": "the upload was ended by another program or a rule of the bucket; run the same command again",
    "400": "{where} refuses (400), most often because of " + _OLD_TOKEN,
    "ExpiredToken": "{where} refuses ({code}): " + _OLD_TOKEN,
    "TokenRefreshRequired": "{where} refuses ({code}): " + _OLD_TOKEN,
    "InvalidToken": "{where} refuses (InvalidToken); " + _KEYS + " and AWS_SESSION_TOKEN",
    "RequestTimeTooSkewed": "the clock of this machine and that of {where} differ; set this one (NTP)",
    "InvalidObjectState": "it is archived, in a storage class that cannot be read; restore it first",
    "NotImplemented": "{where} " + _UNKNOWN,
    "501": "{where} " + _UNKNOWN,
    "PermanentRedirect": _ELSEWHERE,
    "301": _ELSEWHERE,
    "AuthorizationHeaderMalformed": _ELSEWHERE,
    "IllegalLocationConstraintException": _ELSEWHERE,
    "ProfileNotFound": "AWS_PROFILE names a profile that is not in the AWS files; correct it, or AWS_CONFIG_FILE",
    "NoCredentialsError": "no keys were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "PartialCredentialsError": "no keys were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "FileExpired": f"it was changed or removed since the run looked at it; {STAYS}",
    "PreconditionFailed": f"it was changed or removed since the run looked at it; {STAYS}",
    "412": f"it was changed or removed since the run looked at it; {STAYS}",
}


def endpoint() -> str:
    """Which store is asked, without any user or password in it; "" is Amazon's own. Raises InputError for no URL."""
    variable = next((name for name in _ENDPOINT_VARIABLES if os.environ.get(name)), None)
    if variable is None:
        return ""
    try:
        url = urlsplit(os.environ[variable])
        port = f":{url.port}" if url.port else ""
    except ValueError:  # a port beyond 65535, a bracket that is not closed
        url, port = urlsplit(""), ""
    if url.scheme not in ("http", "https") or not url.hostname:
        raise InputError(f"{variable}: not the URL of a store; write http://HOST:PORT or https://HOST")
    return f"{url.scheme}://{url.hostname}{port}"


@contextmanager
def plain_errors(doing: str, url: str, kind: type[BulkrunError] = InputError) -> Iterator[None]:
    """Turn what s3fs and its libraries raise into one line: the object, what failed, why, what to do.

    Raises RunError in place of `kind` where the store failed for a time: nothing that the user gave is wrong then.
    """
    from aiohttp import ClientError
    from botocore.exceptions import BotoCoreError
    from botocore.parsers import ResponseParserError

    try:
        yield
    except (OSError, BotoCoreError, ClientError, ResponseParserError) as error:
        raise (RunError if fails_for_a_time(error) else kind)(f"{url}: {doing} failed: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Why a request failed and what to do."""
    code, name = error_code(error), type(error).__name__
    where = endpoint() or "the store"
    if cause := _CAUSES.get(code or name):
        return cause.format(where=where, code=code)
    if isinstance(error, FileNotFoundError):
        return "there is no such object; check the path"
    if isinstance(error, PermissionError):
        return f"{where} refuses ({code or 'access denied'}); {_KEYS} and their policy"
    if _is_any_of(error, _BROKEN_OFF):
        return f"the answers of {where} are cut off or damaged on the way; run the same command again"
    if not_reached(error):
        return f"{where} does not answer; check AWS_ENDPOINT_URL and the network"
    return f"{code or name}; run the same command again"


def not_reached(error: BaseException) -> bool:
    """Whether a request got no answer at all."""
    return _is_any_of(error, _UNREACHED)


def fails_for_a_time(error: BaseException) -> bool:
    """Whether a store that does answer failed with what goes away: it had no time, or its answer came in part."""
    return overloaded(error) or _is_any_of(error, _BROKEN_OFF)


def error_code(error: BaseException) -> str | None:
    """The store's own code of a failed request (`NoSuchBucket`, `SlowDown`...), if it sent one."""
    response = _response(error)
    return response["Error"].get("Code") if response else None


def overloaded(error: BaseException) -> bool:
    """Whether the store said that it cannot answer just now: HTTP's 429 and 5xx, but for 501, which it never can."""
    status = int((_response(error) or {}).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return status == 429 or (status >= 500 and status != 501)


def has_no_time(error: BaseException) -> bool:
    """Whether the same request to a store that answered before may well succeed later."""
    return fails_for_a_time(error) or not_reached(error)


def _is_any_of(error: BaseException, names: set[str]) -> bool:
    return not names.isdisjoint(kind.__name__ for kind in type(error).__mro__)


def _response(error: BaseException) -> dict[str, Any] | None:
    return getattr(error, "response", None) or getattr(error.__cause__, "response", None)
