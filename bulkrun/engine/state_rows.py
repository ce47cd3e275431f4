"""How many rows of recurrent states an engine has, for models that keep a state of each sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from bulkrun.models.config.model_config import ModelConfig
from bulkrun.models.recurrent_state import bytes_per_row
from bulkrun.settings import EngineArgs

KEPT_STATES = 8  # prefixes within prefixes, and some beside them; one takes as much as a sequence
# Of what an engine may take beside the weights, for the states of as many sequences as nobody asked for; the rest is
# for keys and values. On a CPU that is a part of the RAM already, and rows that nobody uses take none.
MEMORY_SHARE: Mapping[str, float] = MappingProxyType({"cpu": 0.5, "cuda": 0.25})
# Where no layer attends there are none: the rest is for what a step makes, which on a CPU is outside this memory.
SHARE_WITHOUT_KEYS: Mapping[str, float] = MappingProxyType({"cpu": 1.0, "cuda": 0.75})


def num_kept_states(model_config: ModelConfig, dtype: torch.dtype, args: EngineArgs) -> int | None:
    """States that are kept of prefixes; None for models without any.

    None are kept but with continuous batching: the other policies let nobody in later, so nobody can wait for one.
    """
    if not bytes_per_row(model_config, dtype):
        return None
    return KEPT_STATES if args.enable_prefix_caching and args.batching == "continuous" else 0


def most_sequences(
    model_config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    usable_bytes: Callable[[], int],
    num_kept: int | None,
    default: int,
) -> int:
    """Sequences that may run at once where nobody says how many: fewer than the default where states are large.

    `usable_bytes`: what the engine may take beside the weights; asked for only where there are states. `num_kept`:
    states of prefixes, which take rows too.
    """
    row_bytes = bytes_per_row(model_config, dtype)
    if not row_bytes:
        return default
    shares = MEMORY_SHARE if model_config.kv_size else SHARE_WITHOUT_KEYS
    num_rows = int(shares[device.type] * usable_bytes()) // row_bytes
    return min(default, max(1, num_rows - (num_kept or 0)))
