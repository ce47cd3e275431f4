"""Rows on their way, in bounded memory: DuckDB with its doors shut, rows on disk for a while, batches put together."""
