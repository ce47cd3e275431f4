"""What Arrow raises while it reads a file: a failing disk, or a damaged file?"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bulkrun.data.storage.durable import disk_errors


def is_disk_error(error: Exception) -> bool:
    """Else the file is damaged: then Arrow's own OSErrors have no errno, or that of a senseless offset."""
    return isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """`disk_errors` of a body that reads with Arrow; what it raises for a damaged file passes as it is."""
    try:
        yield
    except OSError as error:
        if not is_disk_error(error):
            raise
        with disk_errors("reading", path):
            raise
