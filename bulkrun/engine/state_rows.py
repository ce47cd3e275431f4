"""How many rows of recurrent states an engine has, for models that keep a state of each sequence."""

from __future__ import annotations

import torch

from bulkrun.models.config.model_config import ModelConfig
from bulkrun.models.host_memory import available_ram_bytes
from bulkrun.models.recurrent_state import bytes_per_row
from bulkrun.settings import EngineArgs

KEPT_STATES = 8  # prefixes within prefixes, and some beside them; one takes as much as a sequence
MEMORY_SHARE = 0.25  # of what is free beside the weights, for the states of as many sequences as nobody asked for


def num_kept_states(model_config: ModelConfig, dtype: torch.dtype, args: EngineArgs) -> int | None:
    """States that are kept of prefixes; None for models without any.

    None are kept but with continuous batching: the other policies let nobody in later, so nobody can wait for one.
    """
    if not bytes_per_row(model_config, dtype):
        return None
    return KEPT_STATES if args.enable_prefix_caching and args.batching == "continuous" else 0


def most_sequences(model_config: ModelConfig, dtype: torch.dtype, device: torch.device, default: int) -> int:
    """Sequences that may run at once where nobody says how many: fewer than the default where states are large."""
    row_bytes = bytes_per_row(model_config, dtype)
    if not row_bytes:
        return default
    free_bytes = available_ram_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    num_rows = int(MEMORY_SHARE * free_bytes) // row_bytes
    return min(default, max(1, num_rows - KEPT_STATES))
