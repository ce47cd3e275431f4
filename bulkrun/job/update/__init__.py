"""Changing a finished run: a retry or an incremental night is a staged run beside it, then a merge into it."""
