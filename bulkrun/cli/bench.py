"""`bench`: how fast this machine runs a model, how batching policies compare, how far from the hardware's limit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from bulkrun.cli.bench_options import engine_options, flags_of, options, override_option
from bulkrun.cli.bench_texts import texts
from bulkrun.cli.output import counted, json_option, print_facts, print_json, print_table
from bulkrun.errors import UsageError
from bulkrun.launch.bench.shapes import SHAPE_NAMES

_LEAST_SHARE_SHOWN = 0.005  # of the time: ops in the terminal
_BARS = " ▁▂▃▄▅▆▇█"


_model_options = options(
    click.option("--model", help="A directory, a hub id, or bundled:tiny."),
    click.option(
        "--shape",
        type=click.Choice(SHAPE_NAMES),
        help="Instead of --model: a public model's shape, with random weights.",
    ),
    engine_options,
    click.option(
        "--kv-cache-dtype",
        type=click.Choice(["auto", "bfloat16", "float16", "float32", "fp8"]),
        help="Type of the KV cache. Default: the model's.",
    ),
    click.option(
        "--max-model-len", type=click.IntRange(2), help="Maximum number of tokens, prompt and output together."
    ),
    click.option("--max-num-seqs", type=click.IntRange(1), help="Maximum number of sequences running at once."),
    override_option("engine.block_size=32"),
)
_work_options = options(
    click.option(
        "--dataset",
        type=click.Path(path_type=Path),
        help="JSONL rows: prompt_token_ids or prompt, and max_tokens.",
    ),
    click.option("--input-len", help="Tokens in each prompt: 1024 (default), or a range: 100-1024."),
    click.option("--output-len", help="Tokens in each output: 512 (default), or a range."),
    click.option("--num-requests", type=click.IntRange(1), help="Default: 3000."),
    click.option("--shared-prefix", type=click.IntRange(0), help="Tokens that all prompts start with, in addition."),
)


class _NamedEitherWay(click.Group):
    """A group whose command may be written as an option too: `bench --roofline` is `bench roofline`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0].removeprefix("--") in self.commands:
            args = [args[0].removeprefix("--"), *args[1:]]
        return super().parse_args(ctx, args)


@click.group(cls=_NamedEitherWay, context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure this machine: text, vectors and labels, batching, hardware limits.

    Outputs always have their full length (end-of-sequence is ignored). Compare runs on a quiet machine. A command may
    be written as an option: `bench --roofline`.
    """


@bench.command()
@_model_options
@_work_options
@json_option
def throughput(as_json: bool, **given: Any) -> None:
    """Tokens per second, all requests at once.

    Of a model that writes text; `bench texts` is for those that embed or classify.

    \b
    bulkrun bench throughput --model bundled:tiny --dataset prompts.jsonl --json
    bulkrun bench throughput --shape llama-3.1-8b --input-len 1024 --output-len 512
    """
    from bulkrun.launch.bench.throughput import bench_throughput

    choice = _choice(given)
    _show(bench_throughput(choice, _asked(given)), as_json)


@bench.command()
@_model_options
@_work_options
@json_option
def roofline(as_json: bool, **given: Any) -> None:
    """A throughput run measured against the hardware's limit.

    Measures the GEMM rate and the read bandwidth of this device, and what share of SERIAL (kernels one after another),
    MAX (perfect overlap) and NanoFlow-optimal the run reached. Shared prefixes, and work that short outputs make
    unnecessary, can lift a share above 100%.

    After the run a few steps are traced: for each op its FLOP/s and bytes/s, and how much of its time the ceiling that
    binds it explains (above 100% where the processor's caches hold what it reads); and the share of time in which the
    device sat idle. Tracing slows a CPU's small ops down, and runs layers one by one that otherwise run in one call:
    there no idle share is told, as it would not be the run's.
    """
    from bulkrun.launch.bench.roofline import bench_roofline

    choice = _choice(given)
    facts = bench_roofline(choice, _asked(given))
    if as_json:
        print_json(facts)
    else:
        _show_roofline(facts)


@bench.command()
@_model_options
@click.option("--num-requests", type=click.IntRange(1), help="Default: four batches of --max-num-seqs.")
@click.option(
    "--arrival",
    type=click.Choice(["offline", "poisson"]),
    default="offline",
    help="Whether requests come all at once or one by one.",
)
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Requests per second, with --arrival poisson.")
@click.option(
    "--window", type=click.FloatRange(0), help="Seconds that the dynamic policy waits for a full batch. Default: 0.05."
)
@click.option(
    "--rounds", type=click.IntRange(1), default=3, show_default=True, help="How often each runs, in turns: medians."
)
@json_option
def batching(
    as_json: bool,
    num_requests: int | None,
    arrival: str,
    rate: float | None,
    window: float | None,
    rounds: int,
    **given: Any,
) -> None:
    """Batching policies on the same heavy-tailed requests.

    padding_share is the share of held seats whose sequence had ended; slot_use is the share of all --max-num-seqs seats
    that computed a wanted token. Percentiles are those of the nearest rank.

    The second table says where positions went, those computed and those that a seat sat out; its shares add up to 1.
    needed: the requests' own. prompt_padding: prompts filled up to the longest of their batch. ended_sequences:
    computed for, or held by, a sequence that had ended. empty_seats: nobody's. recomputed: after a preemption.
    computed_padding: the share of padding in the computed positions alone.

    Offline, batches that pad everything or outputs alone are measured too, so that the speed-up of continuous batching
    is a product: not padding prompts, not padding outputs, refilling. The last is the speed-up over static: fewer
    steps, times how much less each of static's takes.
    """
    from bulkrun.launch.bench.batching import BatchingAsked, bench_batching

    if (arrival == "poisson") != (rate is not None):
        raise UsageError("--rate goes with --arrival poisson, and --arrival poisson needs --rate (requests per second)")
    choice = _choice({**given, "batching_window_s": window})
    facts = bench_batching(choice, BatchingAsked(num_requests, rate, rounds))
    if as_json:
        print_json(facts)
    else:
        _show_batching(facts)


bench.add_command(texts)


def _show_roofline(facts: dict[str, Any]) -> None:
    idle, ops = facts.pop("idle"), facts.pop("ops")
    print_facts(facts)
    click.echo()
    shown = [op for op in ops if op["share_of_time"] >= _LEAST_SHARE_SHOWN]
    columns = ["op", "rows", "calls", "ms", "median us", "% of time", "TFLOP/s", "GB/s", "% of ceiling"]
    print_table(columns, [_op_cells(op) for op in shown])
    if len(shown) < len(ops):
        click.echo(f"{len(ops) - len(shown)} more below {_LEAST_SHARE_SHOWN:.1%} of the time each (--json has them)")
    if idle is not None:
        click.echo(
            f"\nidle: {idle['share']:.1%} of {idle['wall_s'] * 1e3:.4g} ms ({idle['steps']} steps): "
            f"{idle['between_steps']:.1%} between steps, {idle['inside_steps']:.1%} inside them; "
            f"traced steps took {idle['slowdown']:.2f} times as long as others"
        )


def _op_cells(op: dict[str, Any]) -> list[Any]:
    ceiling = op["share_of_ceiling"]
    return [
        op["op"],
        op["rows"],
        op["calls"],
        op["seconds"] * 1e3,
        op["median_us"],
        round(op["share_of_time"] * 100, 1),
        op["tflop_s"],
        op["gb_s"],
        None if ceiling is None else round(ceiling * 100, 1),
    ]


def _show_batching(facts: dict[str, Any]) -> None:
    policies, positions = facts.pop("policies"), facts.pop("positions")
    timeline, speedup = facts.pop("timeline"), facts.pop("speedup")
    print_facts(facts)
    for by_policy in (policies, positions):
        click.echo()
        columns = list(next(iter(by_policy.values())))
        print_table(["policy", *columns], [[name, *one.values()] for name, one in by_policy.items()])
    click.echo("\nslot use over time, the longest run being the full width")
    for name, shares in timeline.items():
        click.echo(f"{name:<15} {''.join(_bar(share) for share in shares)}")
    if speedup is not None:
        _show_speedup(speedup, facts["rounds"])


def _show_speedup(speedup: dict[str, Any], rounds: int) -> None:
    spread = f"{speedup['total_min']} to {speedup['total_max']} in {counted(rounds, 'round')}"
    click.echo(
        f"\ncontinuous over padded: {speedup['total']}x ({spread}) = {speedup['no_prompt_padding']}x by not padding "
        f"prompts * {speedup['no_output_padding']}x by not padding outputs * {speedup['refilling']}x by refilling\n"
        f"refilling, static over continuous: {speedup['fewer_steps']}x in steps * {speedup['step_time']}x in their time"
    )
    if speedup["share_refilling"] is not None:
        click.echo(
            f"of the speed-up (as a logarithm) {speedup['share_no_prompt_padding']:.0%} is not padding prompts, "
            f"{speedup['share_no_output_padding']:.0%} not padding outputs, {speedup['share_refilling']:.0%} refilling"
        )


def _bar(share: float) -> str:
    return _BARS[min(len(_BARS) - 1, math.ceil(share * (len(_BARS) - 1)))]


def _choice(given: dict[str, Any]) -> Any:
    from bulkrun.launch.bench.engine import ModelChoice, engine_settings

    return ModelChoice(given["model"], given["shape"], engine_settings(given["overrides"]) | flags_of(given))


def _asked(given: dict[str, Any]) -> Any:
    from bulkrun.launch.bench.throughput import Asked

    names = ("dataset", "input_len", "output_len", "num_requests", "shared_prefix")
    return Asked(**{name: given[name] for name in names})


def _show(facts: dict[str, Any], as_json: bool) -> None:
    print_json(facts) if as_json else print_facts(facts)
