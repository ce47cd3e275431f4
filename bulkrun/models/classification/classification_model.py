"""Token ids in, scores of labels out: an encoder, one state of each text, and a head. Knows no requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bulkrun.models.embedding.pooling import text_states
from bulkrun.models.embedding.text_encoder import TextEncoder
from bulkrun.ops.tile_workers import TileWorkers
from bulkrun.settings import Pooling, ScoreActivation

Head = Callable[[torch.Tensor], torch.Tensor]  # states float32 [S, E] -> logits float32 [S, C] of the labels

_ACTIVATIONS: dict[ScoreActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits_SC: logits_SC.softmax(-1),
    "sigmoid": torch.sigmoid,
    "none": lambda logits_SC: logits_SC,
}


class ClassificationModel:
    """An encoder and the way from its hidden states to scores."""

    def __init__(
        self,
        encoder: TextEncoder,
        head: Head,
        *,
        pooling: Pooling,
        num_labels: int,
        activation: ScoreActivation,
        row_by_row: bool,
        padding_id: int | None = None,
    ) -> None:
        """`row_by_row`: behind the encoder one text at a time, on one thread, so that no bit depends on anything else.

        `padding_id`: see `text_states`.
        """
        self.encoder = encoder
        self.dimensions = num_labels
        self._head, self._pooling, self._padding_id = head, pooling, padding_id
        self._alone = TileWorkers(1) if row_by_row else None
        self._activate = _ACTIVATIONS[activation]

    @torch.inference_mode()
    def __call__(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Scores float32 [S, C] on the device, in the order of the model's labels; nothing waits for them.

        texts: token ids of the model, the shortest text first, each of at least one token and no more than the model
        has positions.
        """
        states_SE = text_states(self.encoder, texts, self._pooling, padding_id=self._padding_id)
        if self._alone is None:
            return self._scores(states_SE).contiguous()
        with self._alone.one_thread_each():
            return torch.cat([self._scores(row.clone()) for row in states_SE.split(1)])

    def _scores(self, states_SE: torch.Tensor) -> torch.Tensor:
        return self._activate(self._head(states_SE))
