"""Files to rows: readers for each format, one way to read them all, and inputs picked out of others."""
