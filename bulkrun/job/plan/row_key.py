"""What a row's result depends on, as one hash: its prompt's tokens, its own values, model, adapter and sampling.

Made from the columns of a shard, so the key that a part keeps and the key that the next night computes from its
input are one function of one thing. A row that the plan refuses has no prompt: its result is the error and the columns
that pass through, and so is its key. A comparison has what its prompt would be made of beside these (`told_by`): a
retry may have answered such a row, and another text that is refused alike is another row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from hashlib import blake2b
from itertools import pairwise

import pyarrow as pa

from bulkrun.data.inputs.python_rows import python_rows
from bulkrun.job.prompts.own_values import own_values
from bulkrun.job.store.fingerprint import KeySalt

ROW_KEY = "row_key"  # the column of an incremental run's results


def row_keys(rows: pa.Table | pa.RecordBatch, salt: KeySalt) -> list[str]:
    """The key of each row (32 hex digits) from its shard columns.

    `salt` is what they depend on beside these (`RunRecord.key_salt`).
    """
    overrides, refused, begin_of = rows["overrides"].to_pylist(), _refused_keys(rows), cache(partial(_begin, salt))
    prompts = zip(rows["error_code"].is_null().to_pylist(), overrides, prompt_bytes(rows["token_ids"]), strict=True)
    return [_key(begin_of(own), tokens) if runs else next(refused) for runs, own, tokens in prompts]


def told_by(rows: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """The rows with these of their columns alone passing through."""
    payload = rows["passthrough"]
    fields = [payload.type.field(name) for name in names]
    narrow = pa.StructArray.from_arrays([payload.field(name) for name in names], fields=fields)
    return rows.set_column(rows.schema.get_field_index("passthrough"), "passthrough", narrow)


def _begin(salt: KeySalt, overrides: str | None) -> bytes:
    """What is hashed before a prompt with these values of its own."""
    adapter = salt.adapters[name] if salt.adapters and (name := own_values(overrides).adapter) else ""
    return f"{salt.common}{adapter}|{overrides or ''}|".encode("utf-8", "surrogatepass")


def _key(begin: bytes, tokens: memoryview) -> str:
    digest = blake2b(begin, digest_size=16)
    digest.update(tokens)
    return digest.hexdigest()


def _refused_keys(rows: pa.Table | pa.RecordBatch) -> Iterator[str]:
    """The keys of the refused rows alone. The message is not part of them: it may name the line the row was found in,
    and a row whose line moved is still the same row."""
    refused = rows.select(["error_code", "passthrough"]).filter(rows["error_code"].is_valid())
    for batch in refused.to_batches() if isinstance(refused, pa.Table) else [refused]:
        values, _ = python_rows(pa.RecordBatch.from_struct_array(batch["passthrough"]))
        for code, row in zip(batch["error_code"].to_pylist(), values, strict=True):
            yield blake2b(f"{code}|{row!r}".encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def prompt_bytes(token_ids: pa.ListArray | pa.ChunkedArray) -> Iterator[memoryview]:
    """The int32 tokens of each row as bytes, without copying them."""
    for chunk in token_ids.chunks if isinstance(token_ids, pa.ChunkedArray) else [token_ids]:
        values = chunk.values
        data = memoryview(values.buffers()[1] or b"")
        starts = [4 * (values.offset + offset) for offset in chunk.offsets.to_pylist()]
        yield from (data[begin:end] for begin, end in pairwise(starts))
