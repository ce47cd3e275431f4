"""How a model's weights are loaded and computed with, whatever the model: what every loader is told."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bulkrun.models.loading.adapter import Adapter
from bulkrun.settings import DEFAULT_BLOCK_SIZE, EngineArgs, LoadFormat, Quantization


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Names are those of the engine's keys.

    load_format: "dummy" makes random weights, the same on every run, of config.json alone. quantization: of the
    projections' weights, as each is read; None: what is stored in 8 or 4 bits stays so where that is fast.
    deterministic: a row's numbers depend on that row alone. adapter: added to the weights as they are read. block_size:
    tokens, of the cache of one step through which a decoder embeds.
    """

    dtype: torch.dtype
    device: torch.device
    load_format: LoadFormat = "auto"
    quantization: Quantization | None = None
    deterministic: bool = False
    adapter: Adapter | None = None
    block_size: int = DEFAULT_BLOCK_SIZE

    @classmethod
    def of(cls, args: EngineArgs, dtype: torch.dtype, device: torch.device) -> LoadOptions:
        """Those of an engine's settings, whose dtype and device were found. Reads the adapter: raises ModelError."""
        return cls(
            dtype=dtype,
            device=device,
            load_format=args.load_format,
            quantization=args.quantization,
            deterministic=args.deterministic,
            adapter=Adapter.of(args.adapter),
            block_size=args.block_size or DEFAULT_BLOCK_SIZE,
        )
