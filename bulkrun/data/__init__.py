"""Files to rows and rows to files: readers, schema, parts, queries. pyarrow and duckdb only."""
