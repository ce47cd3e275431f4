"""What the issue's 3,000 requests would have given where fewer ran: the schedule's share of that, simulated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bulkrun.launch.bench.ceilings import ceilings
from bulkrun.launch.bench.workload import Lengths, random_work
from tests.benchmarks.gpu.items import ASKED_REQUESTS
from tests.benchmarks.gpu.report import table
from tests.benchmarks.gpu.results import Line
from tests.benchmarks.schedule_share import H200, Cost, cost_of_shape, steps_of

_HEADER = (
    "what", "requests", "total tok/s", "share of SERIAL", "simulated share", f"at {ASKED_REQUESTS:,}",
    "faster by", f"total tok/s at {ASKED_REQUESTS:,}",
)  # fmt: skip


def at_asked_requests(lines: Sequence[Line]) -> str:
    """Markdown: measured, simulated with the same pool, seats and step, and scaled by the simulations' ratio."""
    return (
        f"## fewer than {ASKED_REQUESTS:,} requests\n\nTargets that are not below ran with {ASKED_REQUESTS:,} or are "
        f"asked with their number. Simulated by tests/benchmarks/schedule_share.py for an H200.\n\n"
        f"{table(_HEADER, _rows(lines))}"
    )


def _rows(lines: Sequence[Line]) -> Iterator[tuple[Any, ...]]:
    for line in lines:
        facts = line.get("facts", {})
        if line["stage"] != "targets" or "share_of_serial" not in facts or "-" in facts["input_len"]:
            continue
        if facts["requests"] >= ASKED_REQUESTS:
            continue
        share, speed = _simulated(facts, facts["requests"])
        share_asked, speed_asked = _simulated(facts, ASKED_REQUESTS)
        faster = speed_asked / speed
        measured = facts["total_tok_s"], facts["share_of_serial"]
        yield line["name"], facts["requests"], *measured, share, share_asked, faster, faster * facts["total_tok_s"]


def _simulated(facts: dict[str, Any], num_requests: int) -> tuple[float, float]:
    """Share of SERIAL and total tokens/s."""
    lengths = [Lengths.parse(facts[name], name) for name in ("input_len", "output_len")]
    work = random_work(num_requests, *lengths, shared_prefix=facts["shared_prefix"], vocab_size=1000)
    steps = steps_of(
        work,
        num_seqs=facts["max_num_seqs"],
        num_tokens=facts["max_num_batched_tokens"],
        num_blocks=facts["pool_blocks"],
    )
    model = cost_of_shape(facts["shape"], 1 if facts["kv"] == "fp8" else 2)
    wall_s = sum(step.seconds(model, Cost()) for step in steps)
    num_tokens = sum(len(one.prompt_token_ids) + one.num_output_tokens for one in work)
    return ceilings(model, work, H200).serial_s / wall_s, num_tokens / wall_s
