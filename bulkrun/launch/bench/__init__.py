"""Benchmarks of this machine and this engine: `bulkrun bench`. Results are plain dicts, ready to be a JSON line."""
