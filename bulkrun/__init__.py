"""bulkrun: offline bulk LLM inference, every row exactly once."""
