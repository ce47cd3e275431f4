"""Tokens in, tokens out: continuous batching over a paged KV cache. Knows no job, file or text."""
