"""Models with several residual streams, of which one goes through the layers' blocks (Gemma 3n). Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class AltUpConfig(NamedTuple):
    """Alternating updates (Baykal et al., arXiv 2301.13310), and the low-rank branch that goes with them here."""

    num_streams: int
    laurel_rank: int

    def layer_weights(self, hidden_size: int) -> int:
        """Weights of a layer that one token is multiplied with: the branch's, and the router's with what follows it."""
        num = self.num_streams
        return hidden_size * (2 * self.laurel_rank + num) + num**2 * (num + 1)

    def stream_weights(self, hidden_size: int) -> int:
        """Those that make the other streams, and make one of all again."""
        return 2 * (self.num_streams - 1) * hidden_size**2


def altup_of(keys: Mapping[str, Any]) -> AltUpConfig | None:
    """What the keys of a config.json ask for, if anything."""
    num_streams = keys.get("altup_num_inputs")
    return None if num_streams is None else AltUpConfig(num_streams, keys["laurel_rank"])
