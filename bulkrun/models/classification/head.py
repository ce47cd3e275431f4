"""The head of a sequence classification model: transformers' own code over states that were computed elsewhere.

Such a model calls its transformer and takes the states of one token, or a mean, from what that returns. In the place of
the transformer stands what returns states that are given: any head runs so, and none has to be known here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


class TransformersHead:
    """The head of a model, which has no transformer afterwards."""

    def __init__(self, model: PreTrainedModel) -> None:
        name = model.base_model_prefix
        self._model, self._states = model, _GivenStates(getattr(model, name))
        setattr(model, name, self._states)
        model.float()  # what is left of it: few weights, and scores are read to more digits than states
        config = model.config.get_text_config()
        self.padding_id: int | None = config.pad_token_id  # a head over the last token leaves these out at a text's end
        if self.padding_id is None:  # without one, such a head takes one text at a time
            config.pad_token_id = 0
        self._no_padding = 1 if config.pad_token_id == 0 else 0

    def __call__(self, states_SE: torch.Tensor) -> torch.Tensor:
        """States float32 [S, E] of texts, each as of a text of one token, to logits float32 [S, C]."""
        self._states.given = states_SE[:, None]
        ids = torch.full((len(states_SE), 1), self._no_padding, device=states_SE.device)
        logits: torch.Tensor = self._model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        return logits


class _GivenStates(nn.Module):
    """What a head calls as its transformer."""

    given: torch.Tensor

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.pooler = getattr(transformer, "pooler", None)
        self.activation = getattr(transformer, "pooler_activation", None)  # ALBERT's pooler is a product alone
        if self.pooler is not None:
            transformer.register_module("pooler", None)  # it belongs to the head

    def forward(self, *_: Any, **__: Any) -> _Outputs:
        return _Outputs(self.given, None if self.pooler is None else self._pooled(self.pooler))

    def _pooled(self, pooler: nn.Module) -> torch.Tensor:
        pooled: torch.Tensor = (
            pooler(self.given) if self.activation is None else self.activation(pooler(self.given[:, 0]))
        )
        return pooled


class _Outputs:
    """States, and what a pooler makes of them, by place or by name; there is nothing else."""

    def __init__(self, last_hidden_state: torch.Tensor, pooler_output: torch.Tensor | None) -> None:
        self.last_hidden_state, self.pooler_output = last_hidden_state, pooler_output

    def __getitem__(self, place: int) -> torch.Tensor | None:
        return (self.last_hidden_state, self.pooler_output)[place]

    def __getattr__(self, name: str) -> None:
        return None
