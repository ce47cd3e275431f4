"""The result columns that a job asks for beyond the usual ones, declared before row one. Knows no values."""

from __future__ import annotations

import pyarrow as pa

from bulkrun.job.jobfile.spec import JobSpec

_TOP = pa.struct([("token_id", pa.int32()), ("token", pa.string()), ("logprob", pa.float32())])
_LOGPROBS = pa.list_(pa.struct([*_TOP, ("top", pa.list_(_TOP))]))


def extra_fields(spec: JobSpec) -> tuple[pa.Field, ...]:
    """The columns, in their order in the result."""
    sampling, fields = spec.sampling, []
    if sampling.thinking is not None:
        fields.append(pa.field("reasoning", pa.string()))
    if sampling.logprobs is not None:
        fields.append(pa.field("logprobs", _LOGPROBS))
    if sampling.prompt_logprobs is not None:
        fields.append(pa.field("prompt_logprobs", _LOGPROBS))
    if sampling.logprobs is not None or sampling.best_of is not None:
        fields.append(pa.field("cumulative_logprob", pa.float64()))
    return tuple(fields)
