"""A process of pytest-xdist ends where a kernel broke its GPU context, and another one goes on.

After an illegal address whatever a process asks of its GPU fails. All its further tests would, each within moments, so
that it would be given most of those that the others have not yet begun.
"""

from __future__ import annotations

import os
import sys
import time

import pytest

_UNTIL_SENT_S = 1.0  # the test's own report is on its way


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish(nodeid: str) -> None:
    """After each test: xdist tells of it that its process crashed, beside why it failed."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"{nodeid}: {error}", file=sys.stderr, flush=True)
        time.sleep(_UNTIL_SENT_S)
        os._exit(1)
