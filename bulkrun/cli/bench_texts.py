"""`bench texts`: how fast this machine embeds or classifies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bulkrun.cli.bench_options import engine_options, flags_of, options, override_option
from bulkrun.cli.output import json_option, print_facts, print_json
from bulkrun.settings import Task

_text_options = options(
    click.option("--model", required=True, help="A directory, a hub id, or bundled:tiny."),
    click.option(
        "--task",
        type=click.Choice(["embed", "classify"]),
        help="Default: classify for a model with a head for labels, else embed.",
    ),
    engine_options,
    click.option("--max-model-len", type=click.IntRange(2), help="Maximum number of tokens of a text."),
    click.option("--max-num-seqs", type=click.IntRange(1), help="Maximum number of texts in a step."),
    override_option("embedding.pooling=mean"),
    click.option("--dataset", type=click.Path(path_type=Path), help="JSONL rows: prompt_token_ids or prompt."),
    click.option("--input-len", help="Tokens in each text: 128 (default), or a range: 16-256."),
    click.option("--num-requests", type=click.IntRange(1), help="Number of texts. Default: 3000."),
)


@click.command()
@_text_options
@json_option
def texts(
    as_json: bool,
    model: str,
    task: Task | None,
    overrides: tuple[str, ...],
    dataset: Path | None,
    input_len: str | None,
    num_requests: int | None,
    **given: Any,
) -> None:
    """Texts per second of a model that embeds or classifies.

    All are there at once; tokenizing is not in the time. A classifier's texts are single ones, not pairs.

    \b
    bulkrun bench texts --model sentence-transformers/all-MiniLM-L6-v2 --input-len 16-256 --json
    bulkrun bench texts --model bundled:tiny --set embedding.pooling=mean --dataset prompts.jsonl
    """
    from bulkrun.launch.bench.texts import AskedTexts, TextModelChoice, bench_texts

    choice = TextModelChoice(model, task, flags_of(given), overrides)
    facts = bench_texts(choice, AskedTexts(dataset, input_len, num_requests))
    print_json(facts) if as_json else print_facts(facts)
