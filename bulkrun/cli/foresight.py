"""What `plan` and `preview` show of a job that has not run: its numbers, and its first rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from bulkrun.cli.output import cell_text, count, counted, duration, in_bytes, print_facts, print_table
from bulkrun.cli.summary import warn_of_undeclared

if TYPE_CHECKING:
    from bulkrun.job.jobfile.spec import JobSpec
    from bulkrun.job.plan.report import PlanCounters, PlanReport
    from bulkrun.launch.runs.memory_needs import MemoryNeeds
    from bulkrun.launch.runs.preview import PreviewedRow
    from bulkrun.launch.runs.probe import Probe

_HISTOGRAM_WIDTH = 40
_SHOWN_NUMBERS = 4


def print_plan(report: PlanReport, spec: JobSpec, memory: MemoryNeeds) -> None:
    """The numbers of a plan, and its prompts by their length."""
    counters = report.counters
    able = counters.rows - sum(counters.errors.values())
    facts = {
        "prompt": report.prompt,
        "rows": f"{count(counters.rows)} ({count(report.samples)} output rows)",
        "prompt tokens": f"{count(counters.prompt_tokens)} (mean {counters.prompt_tokens / max(1, able):.0f}, "
        f"longest {count(counters.max_prompt_tokens)})",
        "identical prompts": f"{count(counters.duplicate_prompts)} run once with another row: "
        f"{count(counters.prompt_tokens - counters.unique_prompt_tokens)} prompt tokens saved",
        **(_of_outputs(counters) if spec.generates else {}),
        "duplicate ids": count(report.duplicate_ids.get("count", 0)),
        "too long": f"{count(counters.too_long)} error rows, {count(counters.truncated)} truncated",
        "error rows": ", ".join(f"{code} {count(rows)}" for code, rows in counters.errors.items()) or "none",
        "shards": f"{count(counters.shards)} in {counted(report.windows, 'window')}",
        **({"memory": _of_memory(memory)} if able else {}),
    }
    print_facts(facts)
    warn_of_undeclared(counters.undeclared_columns)
    histogram = report.histogram()
    top = max((rows for _, _, rows in histogram), default=0)
    if top:
        click.echo("\nprompt tokens")
    for low, high, rows in histogram:
        bar = "█" * round(_HISTOGRAM_WIDTH * rows / top) or ("▏" if rows else "")
        name = f"{low:,}-{high - 1:,}" if high else f"{low:,}+"
        click.echo(f"{name:>17} {count(rows):>11}  {bar}")


def _of_memory(memory: MemoryNeeds) -> str:
    """What the weights take, and each row that runs."""
    told = [] if memory.weight_bytes is None else [f"weights {in_bytes(memory.weight_bytes)} as stored"]
    if memory.kv_bytes_per_token is not None and memory.kv_bytes_per_row is not None:
        state = f", {in_bytes(memory.state_bytes_per_row)} of it a state" if memory.state_bytes_per_row else ""
        told.append(
            f"keys and values in {memory.kv_cache_dtype} {in_bytes(memory.kv_bytes_per_token)} a token, "
            f"at most {in_bytes(memory.kv_bytes_per_row)} a row on average{state}"
        )
    return "; ".join(told) or "-"


def _of_outputs(counters: PlanCounters) -> dict[str, str]:
    """What a plan says of generation alone."""
    return {
        "shared prefixes": f"{count(counters.shared_prefix_tokens)} prompt tokens saved",
        "output tokens": f"at most {count(counters.expected_output_tokens)}",
    }


def print_probe(probe: Probe, spec: JobSpec) -> None:
    """How long the job takes by what some of its rows took."""
    seconds, tokens = probe.forecast.seconds, probe.forecast.output_tokens
    took = f"{counted(probe.rows, 'row')} in {duration(probe.seconds)}, after {duration(probe.load_s)} of loading"
    takes = f"about {duration(seconds.likely)} ({duration(seconds.low)} to {duration(seconds.high)})"
    facts = {"probe": took, "time": f"{takes}, by one worker on this machine as it is now"}
    if probe.num_adapters > 1:
        more = f"{counted(probe.num_adapters - 1, 'more load')} of the model on top; the probe ran with "
        facts["adapters"] = f"{more}{probe.adapter or 'none'}, outputs of others may have other lengths"
    if spec.generates:
        facts["output tokens"] = f"about {count(tokens.likely)} ({count(tokens.low)} to {count(tokens.high)})"
    print_facts(facts)


def json_of_probe(probe: Probe) -> dict[str, Any]:
    """The same for programs: seconds and tokens of the whole job as likely, low and high."""
    ranges = {name: value._asdict() for name, value in vars(probe.forecast).items()}
    loading = {"load_s": probe.load_s, "num_adapters": probe.num_adapters}
    return {"rows": probe.rows, "seconds": probe.seconds, **loading, "job": ranges}


def print_row(row: PreviewedRow) -> None:
    """A row as it went through the job: its prompt, and what the model made of it."""
    click.secho(f"row {cell_text(row.row_id)}", bold=True)
    thoughts = [("reasoning", row.reasoning)] if row.reasoning is not None else []
    print_table(["", ""], [("prompt", row.prompt), *thoughts, *_answer(row), ("ended by", row.ended_by)])


def _answer(row: PreviewedRow) -> list[tuple[str, str | None]]:
    if row.embedding is not None:
        return [("embedding", _beginning(row.embedding))]
    if row.embeddings is not None:
        shown = [(f"embedding {number}", _beginning(one)) for number, one in enumerate(row.embeddings[:_SHOWN_NUMBERS])]
        return [*shown, ("embeddings", counted(len(row.embeddings), "vector"))]
    if row.scores is not None:
        return [("label", row.label), ("scores", _likeliest(row.scores))]
    calls = [("calls", f"{call['name']}({call['arguments']})") for call in row.tool_calls or ()]
    return [*calls] if calls and row.response is None else [("response", row.response), *calls]


def _likeliest(scores: Mapping[str, float]) -> str:
    """The highest scores, and how many there are."""
    best = sorted(scores, key=scores.__getitem__, reverse=True)[:_SHOWN_NUMBERS]
    more = f", ... ({counted(len(scores), 'score')})" if len(scores) > len(best) else ""
    return ", ".join(f"{label} {scores[label]:.4f}" for label in best) + more


def _beginning(vector: list[float]) -> str:
    """The first numbers of a vector, and how many there are."""
    numbers = [f"{number:.4f}" for number in vector[:_SHOWN_NUMBERS]]
    more = ", ..." if len(vector) > len(numbers) else ""
    return f"[{', '.join(numbers)}{more}] ({counted(len(vector), 'number')})"
