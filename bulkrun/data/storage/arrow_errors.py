"""What Arrow raises while it reads a file: no memory for it, a failing disk, or a damaged file?"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from bulkrun.data.storage.durable import disk_errors
from bulkrun.data.storage.shortages import MORE, is_shortage
from bulkrun.errors import BulkrunError, first_line


def is_disk_error(error: Exception) -> bool:
    """Else the file is damaged: then Arrow's own OSErrors have no errno, or that of a senseless offset."""
    return isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)


def refuse_shortage(error: Exception, path: object) -> None:
    """Raise BulkrunError where memory or a thread was missing, which tells nothing of the file."""
    if is_shortage(error):
        raise BulkrunError(
            f"{path}: reading failed: {first_line(error)}; the file is as it was: {MORE}, then run the same command "
            "again"
        ) from error


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """`disk_errors` of a body that reads with Arrow; what it raises for a damaged file passes as it is.

    Raises BulkrunError where memory or a thread was missing.
    """
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        refuse_shortage(error, path)
        if not is_disk_error(error):
            raise
        with disk_errors("reading", path):
            raise
