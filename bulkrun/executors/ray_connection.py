"""Connecting this process to Ray, so that it stays the master of its time and of its signals.

`ray.init` tries for ever where something takes the connection and is no head, inside C code that lets no signal
through; and in the main thread it takes SIGTERM, to end the process where that stands. So it gets a thread.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import signal
import socket
import threading
from pathlib import Path
from typing import Any

from bulkrun.data.storage.paths import user_path
from bulkrun.errors import ExecutorError
from bulkrun.job.jobfile.cluster import RaySpec

_CONNECT_S = 5.0
_ANSWER_S = 45.0  # longer than the first of Ray's own tries, which takes 40
_TOKEN = Path("~/.ray/auth_token")  # where Ray keeps it
_THIS_PORT = "is the head running, and is this its port (usually 6379, with ray:// 10001)?"


def head_address(spec: RaySpec) -> str | None:
    """Where the cluster's head is, as the job or Ray's own variable has it; None for a Ray that is started here."""
    stated = None if spec.address == "auto" else spec.address
    return stated or os.environ.get("RAY_ADDRESS") or spec.address


def connected(address: str | None) -> Any:
    """The module `ray`, connected to the cluster (a local one is started where there is no address).

    Raises ExecutorError where Ray is not installed, or nobody at the address answers as its head does.
    """
    if address not in (None, "auto") and user_path(_TOKEN).exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # a stated address is shown a token only where that is wanted
    try:
        import ray
    except ImportError:
        raise ExecutorError("run.executor ray needs Ray: pip install 'ray[client]>=2.40'") from None
    if not ray.is_initialized():
        _refuse_unreachable(address)
        _init(ray, address)
        _take_back_sigterm()
    return ray


def gist(error: Exception) -> str:
    """The first line of what Ray says, and the last one where that is the cause, at the end of a traceback."""
    said = "\n".join(str(one) for one in (error, error.__cause__) if one is not None)
    lines = [line.strip() for line in said.splitlines() if line.strip()] or [type(error).__name__]
    has_cause = re.search(r'^\s*File "|Traceback \(most recent', said, re.MULTILINE) is not None
    return f"{lines[0].removesuffix(':')}: {lines[-1]}" if has_cause else lines[0]


def _refuse_unreachable(address: str | None) -> None:
    """Raise ExecutorError where nothing listens, within seconds."""
    if (match := re.fullmatch(r"(?:ray://)?\[?([^/]+?)\]?:(\d{1,5})", address or "")) is None:
        return
    try:
        socket.create_connection((match[1], int(match[2])), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ExecutorError(f"ray.address {address!r}: nothing answers there ({error}); {_THIS_PORT}") from None


def _init(ray: Any, address: str | None) -> None:
    """`ray.init`, for which signals need not wait.

    Given no address it joins what was started on this machine before, and tries for ever where that was killed.
    """
    options = {"address": address or "local", "include_dashboard": False, "log_to_driver": False}
    ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def init() -> None:
        try:
            ray.init(**options, logging_level=logging.ERROR)
        except Exception as error:  # whoever waits raises it
            ended.put(error)
        else:
            ended.put(None)
            threading.Event().wait()  # a local Ray ends with the thread that started it

    threading.Thread(target=init, name="ray-init", daemon=True).start()
    try:
        error = ended.get(timeout=None if address is None else _ANSWER_S)
    except queue.Empty:
        raise ExecutorError(
            f"ray.address {address!r}: no Ray head answers there in {_ANSWER_S:.0f} s; {_THIS_PORT}"
        ) from None
    if isinstance(error, ConnectionError | RuntimeError | ValueError):
        where = "a local Ray" if address is None else f"ray.address {address!r}"
        raise ExecutorError(f"{where}: {gist(error)}") from error
    if error is not None:
        raise error


def _take_back_sigterm() -> None:
    """Let Python hear it first again: Ray's C code prints a stack before it passes it on."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
