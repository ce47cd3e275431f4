"""What the commands of `bench` are told of a model and its engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

_ENGINE_SETTINGS = (
    "device",
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "load_format",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "batching_window_s",
)


def options(*added: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Several options as one decorator, in their order in the help."""

    def apply(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(added):
            command = option(command)
        return command

    return apply


def flags_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's settings among a command's options, those that are set."""
    return {name: given[name] for name in _ENGINE_SETTINGS if given.get(name) is not None}


engine_options = options(
    click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), help="Default: the GPU if there is one."),
    click.option("--dtype", type=click.Choice(["auto", "bfloat16", "float16", "float32"]), help="As in a job file."),
    click.option(
        "--quantization", type=click.Choice(["fp8", "int8"]), help="For weights and activations. Default: none."
    ),
    click.option("--load-format", type=click.Choice(["auto", "dummy"]), help="dummy: random weights."),
    click.option("--max-num-batched-tokens", type=click.IntRange(1), help="Maximum number of tokens in a step."),
)


def override_option(example: str) -> Callable[..., Any]:
    """`--set`, for the keys that have no option of their own."""
    shown = f"Override another key: --set {example}"
    return click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help=shown)
