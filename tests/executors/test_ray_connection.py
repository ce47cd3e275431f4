"""Connecting to Ray: addresses at which no head answers, and this process's signals. Ray is a stand-in."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from bulkrun.errors import ExecutorError, Interrupted
from bulkrun.executors import ray_connection
from bulkrun.executors.ray_connection import connected, gist, head_address
from bulkrun.job.jobfile.cluster import RaySpec
from bulkrun.launch.processes.signals import drain_on_signal


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Ray before it is connected."""
    ray = SimpleNamespace(is_initialized=lambda: False, init=lambda **_: pytest.fail("asked Ray"))
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "ray://127.0.0.1:{port}", "127.0.0.1:99999"])
def test_an_address_where_nothing_listens_is_said_before_ray_tries_for_minutes(
    ray: SimpleNamespace, address: str
) -> None:
    with socket.socket() as taken:  # bound and not listening
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ExecutorError, match=r"ray\.address .*: nothing answers there \(.*is the head running"):
            connected(address.format(port=taken.getsockname()[1]))


@pytest.fixture
def no_head() -> Iterator[int]:
    """Something that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_what_takes_connections_and_is_no_head_is_said_after_a_while(
    ray: SimpleNamespace, no_head: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forever = threading.Event()
    ray.init = lambda **_: forever.wait()
    monkeypatch.setattr(ray_connection, "_ANSWER_S", 0.1)
    with pytest.raises(ExecutorError, match=r"127.*: no Ray head answers there.*usually 6379"):
        connected(f"127.0.0.1:{no_head}")
    forever.set()


def test_a_signal_is_heard_while_ray_waits(ray: SimpleNamespace, no_head: int) -> None:
    forever = threading.Event()
    ray.init = lambda **_: os.kill(os.getpid(), signal.SIGINT) or forever.wait()
    began = time.monotonic()
    with pytest.raises(Interrupted, match="stopped by SIGINT while starting"), drain_on_signal():
        connected(f"127.0.0.1:{no_head}")
    assert time.monotonic() - began < ray_connection._ANSWER_S
    forever.set()


def test_sigterm_stays_what_it_was(ray: SimpleNamespace) -> None:
    """As Ray's `init` does: it takes SIGTERM where it can."""

    def init(**_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))

    ray.init = init
    with drain_on_signal() as drain:
        drain.started()
        connected(None)
        signal.raise_signal(signal.SIGTERM)
        assert drain.received == "SIGTERM"


def test_the_thread_that_started_a_local_ray_stays(ray: SimpleNamespace) -> None:
    """Its processes end with it."""
    threads: list[threading.Thread] = []
    ray.init = lambda **_: threads.append(threading.current_thread())
    connected(None)
    threads[0].join(0.05)
    assert threads[0].is_alive() and threads[0].daemon


@pytest.mark.parametrize("error", [ConnectionError("no cluster\nand more"), ValueError("no cluster")])
def test_what_ray_refuses_is_said_with_the_address(ray: SimpleNamespace, error: Exception) -> None:
    def refuse(**_: object) -> None:
        raise error

    ray.init = refuse
    with pytest.raises(ExecutorError, match=r"^ray\.address 'auto': no cluster$"):
        connected("auto")


def test_an_error_that_nobody_foresaw_is_not_swallowed(ray: SimpleNamespace) -> None:
    def refuse(**_: object) -> None:
        raise KeyError("defect")

    ray.init = refuse
    with pytest.raises(KeyError, match="defect"):
        connected("auto")


def test_what_ray_says_in_many_lines_is_its_first_one_with_the_cause() -> None:
    traceback = "    ^^^^\n  File \"x.py\", line 5, in __init__\n    ^^^^^\nFileNotFoundError: '/data/run'\n"
    assert gist(RuntimeError(f"The actor died, H.__init__()\n{traceback}")) == (
        "The actor died, H.__init__(): FileNotFoundError: '/data/run'"
    )
    bare = "Traceback (most recent call last):\n  worker.pyx\nModuleNotFoundError: no bulkrun\n"
    assert gist(RuntimeError(f"The actor died\n{bare}")) == "The actor died: ModuleNotFoundError: no bulkrun"
    refused = ConnectionError("Failed to connect")
    refused.__cause__ = RuntimeError(
        'No GCS. Last error: Traceback (most recent call last):\n  File "x"\nBadToken: missing\n'
    )
    assert gist(refused) == "Failed to connect: BadToken: missing"
    assert gist(RuntimeError("The actor is dead.\nclass_name: H")) == "The actor is dead."
    assert gist(RuntimeError()) == "RuntimeError"


@pytest.mark.parametrize(
    ("address", "is_shown"), [("10.0.0.1:6379", True), ("ray://10.0.0.1:10001", True), ("auto", False), (None, False)]
)
def test_a_stated_head_is_shown_the_token_that_is_there(
    ray: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str | None, is_shown: bool
) -> None:
    """A cluster of Ray 2.60 asks for one as it comes; Ray itself looks for one on its own at no stated address."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "")
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setattr(ray_connection, "_refuse_unreachable", lambda _: None)
    ray.init = lambda **_: None
    connected(address)
    assert os.environ.get("RAY_AUTH_MODE") == ("token" if is_shown else None)


@pytest.mark.parametrize(
    ("stated", "variable", "address"),
    [
        (None, None, None),
        (None, "10.0.0.1:6379", "10.0.0.1:6379"),
        ("auto", "10.0.0.1:6379", "10.0.0.1:6379"),
        ("auto", None, "auto"),
        ("10.0.0.2:6379", "10.0.0.1:6379", "10.0.0.2:6379"),
    ],
)
def test_the_head_is_where_the_job_says_or_rays_own_variable(
    monkeypatch: pytest.MonkeyPatch, stated: str | None, variable: str | None, address: str | None
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    assert head_address(RaySpec(address=stated)) == address


def test_without_an_address_ray_is_told_to_start_its_own(ray: SimpleNamespace) -> None:
    """And joins none that somebody started and killed on this machine: it would try for ever."""
    asked: list[object] = []
    ray.init = lambda **options: asked.append(options["address"])
    connected(None)
    assert asked == ["local"]
