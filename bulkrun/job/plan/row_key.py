"""What a row's result depends on, as one hash: its prompt's tokens, its own sampling values, model and sampling.

Made from the columns of a shard, so the key that a part keeps and the key that the next night computes from its
input are one function of one thing. A row that the plan refuses has none: its key is null.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from itertools import pairwise

import pyarrow as pa

ROW_KEY = "row_key"  # the column of an incremental run's results


def row_keys(rows: pa.Table | pa.RecordBatch, salt: str) -> list[str | None]:
    """The key of each row (32 hex digits) from the shard columns `token_ids` and `overrides`; None without tokens.

    `salt` is what all rows have in common (`RunRecord.key_salt`).
    """
    begin, overrides = salt.encode(), rows["overrides"].to_pylist()
    prompts = zip(rows["token_ids"].is_valid().to_pylist(), overrides, prompt_bytes(rows["token_ids"]), strict=True)
    return [_key(begin, own, tokens) if valid else None for valid, own, tokens in prompts]


def _key(salt: bytes, overrides: str | None, tokens: memoryview) -> str:
    digest = blake2b(salt, digest_size=16)
    digest.update(f"|{overrides or ''}|".encode("utf-8", "surrogatepass"))
    digest.update(tokens)
    return digest.hexdigest()


def prompt_bytes(token_ids: pa.ListArray | pa.ChunkedArray) -> Iterator[memoryview]:
    """The int32 tokens of each row as bytes, without copying them."""
    for chunk in token_ids.chunks if isinstance(token_ids, pa.ChunkedArray) else [token_ids]:
        values = chunk.values
        data = memoryview(values.buffers()[1] or b"")
        starts = [4 * (values.offset + offset) for offset in chunk.offsets.to_pylist()]
        yield from (data[begin:end] for begin, end in pairwise(starts))
