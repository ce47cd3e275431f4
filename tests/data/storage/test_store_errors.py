"""What an object store's errors are said to mean, and which of them pass."""

from __future__ import annotations

from typing import Any

import pytest

from bulkrun.data.storage.store_errors import endpoint, has_no_time, plain_errors
from bulkrun.errors import BulkrunError, InputError
from tests.s3_server import SECRET

pytest.importorskip("s3fs")
URL = "s3://bucket/rows.jsonl"


def client_error(code: str, status: int) -> Exception:
    from botocore.exceptions import ClientError

    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "GetObject")


@pytest.mark.parametrize(("status", "exit_code"), [(503, 1), (429, 1), (501, 2), (403, 2)])
def test_an_input_is_not_to_blame_for_a_store_that_has_no_time(status: int, exit_code: int) -> None:
    said = "reading failed: Any; run the same command again"
    with pytest.raises(BulkrunError, match=said) as raised, plain_errors("reading", URL):
        raise OSError("sorry") from client_error("Any", status)
    assert raised.value.exit_code == exit_code


def broken_answers() -> list[Exception]:
    from aiohttp import ClientPayloadError
    from botocore.exceptions import FlexibleChecksumError
    from botocore.parsers import ResponseParserError

    return [ClientPayloadError("cut"), FlexibleChecksumError(error_msg="other"), ResponseParserError("no XML")]


@pytest.mark.parametrize("error", broken_answers(), ids=lambda error: type(error).__name__)
def test_an_answer_that_is_broken_off_passes_and_is_nobodys_mistake(error: Exception) -> None:
    with pytest.raises(BulkrunError, match="cut off or damaged on the way") as raised, plain_errors("reading", URL):
        raise error
    assert raised.value.exit_code == 1 and has_no_time(error)


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        ("400", OSError, "refuses .400., most often because of a token that has expired"),
        ("ExpiredToken", PermissionError, "renew it .AWS_SESSION_TOKEN"),
        ("RequestTimeTooSkewed", PermissionError, "clock of this machine"),
        ("InvalidObjectState", PermissionError, "storage class.*restore it first"),
        ("NotImplemented", OSError, "does not know what was asked .NotImplemented.; results need `If-None-Match"),
        ("PermanentRedirect", OSError, "another region or at another endpoint; set AWS_DEFAULT_REGION"),
        ("NoSuchUpload", FileNotFoundError, "run the same command again"),
        ("SignatureDoesNotMatch", PermissionError, "refuses .SignatureDoesNotMatch.; check the keys"),
    ],
)
def test_what_the_store_says_is_told_with_the_way_out(code: str, kind: type[OSError], said: str) -> None:
    with pytest.raises(BulkrunError, match=said), plain_errors("reading", URL):
        raise kind("no") from client_error(code, 400)


def test_a_profile_that_is_not_there_is_named_by_its_variable() -> None:
    from botocore.exceptions import ProfileNotFound

    with pytest.raises(InputError, match="AWS_PROFILE"), plain_errors("reading", URL):
        raise ProfileNotFound(profile="none")


@pytest.mark.parametrize(
    "value", ["localhost:9000", f"http://me:{SECRET}@localhost:99999", "http://[::1", "ftp://host"]
)
def test_an_endpoint_that_is_no_url_is_refused_by_the_name_of_its_variable(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", value)
    with pytest.raises(InputError, match="AWS_ENDPOINT_URL: not the URL of a store; write http://HOST:PORT") as raised:
        endpoint()
    assert SECRET not in str(raised.value)


def test_an_endpoint_is_shown_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, Any] = {"AWS_ENDPOINT_URL_S3": f"https://me:{SECRET}@host:9000/x", "AWS_ENDPOINT_URL": "junk"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert endpoint() == "https://host:9000"
