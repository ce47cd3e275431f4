"""Token ids in, scores of labels out: an encoder, one state of each text, and a head. Knows no requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bulkrun.models.embedding.pooling import text_states
from bulkrun.models.embedding.text_encoder import TextEncoder
from bulkrun.settings import Pooling, ScoreActivation

Head = Callable[[torch.Tensor], torch.Tensor]  # states [S, E] -> logits [S, C] of the labels

_ACTIVATIONS: dict[ScoreActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits_SC: logits_SC.softmax(-1),
    "sigmoid": torch.sigmoid,
    "none": lambda logits_SC: logits_SC,
}


class Classifier:
    """One model and the way from its hidden states to scores."""

    def __init__(
        self,
        encoder: TextEncoder,
        head: Head,
        *,
        pooling: Pooling,
        num_labels: int,
        activation: ScoreActivation,
        row_by_row: bool,
    ) -> None:
        """`row_by_row`: the head takes one text at a time, so that its sums do not depend on how many there are."""
        self.encoder = encoder
        self.dimensions = num_labels
        self._head, self._pooling, self._row_by_row = head, pooling, row_by_row
        self._activate = _ACTIVATIONS[activation]

    @torch.inference_mode()
    def __call__(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Scores float32 [S, C] on the device, in the order of the model's labels; nothing waits for them.

        texts: token ids of the model, the shortest text first, each of at least one token and no more than the model
        has positions.
        """
        states_SE = text_states(self.encoder, texts, self._pooling).to(self.encoder.dtype)
        rows = states_SE.split(1) if self._row_by_row else (states_SE,)
        logits_SC = torch.cat([self._head(row) for row in rows]).float()
        return self._activate(logits_SC).contiguous()
