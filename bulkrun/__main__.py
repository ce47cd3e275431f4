"""`python -m bulkrun` is `bulkrun`."""

from bulkrun.cli import run

run()
