"""bulkrun: offline bulk LLM inference, every row exactly once."""

__version__ = "0.1.0"
