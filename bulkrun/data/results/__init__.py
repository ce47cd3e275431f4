"""Rows to files: the columns of a result, parts, queries over them, exports."""
