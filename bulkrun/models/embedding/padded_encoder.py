"""Any other transformer as an encoder: transformers' own code over padded batches, with its own attention.

Texts of similar lengths share a batch, so that little of it is padding, and a batch of equal lengths needs no mask.
Knows no architecture.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence

import torch
from transformers import PreTrainedModel

from bulkrun.models.config.model_config import ModelConfig
from bulkrun.models.embedding.packed_texts import PackedTexts

MAX_PADDING = 0.1  # of a batch's tokens
FREE_PADDING = 64  # tokens: they take less time than another pass through the model would


class PaddedEncoder:
    """Implements `TextEncoder`."""

    def __init__(self, model: PreTrainedModel, config: ModelConfig, pair_separator: int | None = None) -> None:
        """pair_separator: of texts that are pairs; without effect on a model that has no types of tokens."""
        self.model, self.config = model, config
        self.dtype, self.device = model.dtype, model.device
        self.pair_separator = pair_separator if pair_separator is not None and _has_types(model) else None
        padding = getattr(model.config, "pad_token_id", None)
        self._padding_id = padding if isinstance(padding, int) and 0 <= padding < config.vocab_size else 0

    def __call__(self, texts: PackedTexts, kept: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states [T, E], or [S, E] of `kept`."""
        parts = [self._hidden(texts.slice(first, end)) for first, end in similar_lengths(texts.lens)]
        hidden_TE = parts[0] if len(parts) == 1 else torch.cat(parts)
        return hidden_TE if kept is None else hidden_TE[kept]

    def free_scratch(self) -> None:
        """Nothing is kept between steps."""

    def _hidden(self, texts: PackedTexts) -> torch.Tensor:
        """Hidden states [T, E] of one batch."""
        num_texts, longest = len(texts.lens), texts.lens[-1]
        inputs = {"input_ids": texts.token_ids_T} | typed(texts, self.pair_separator)
        if texts.lens[0] == longest:
            as_rows = {name: of_T.view(num_texts, longest) for name, of_T in inputs.items()}
            return self._run(as_rows, None).flatten(0, 1)
        text_T = texts.text_of_token()
        places_T = text_T * longest + texts.positions(text_T)
        padded = {}
        for name, of_T in inputs.items():
            filled = of_T.new_full((num_texts * longest,), self._padding_id if name == "input_ids" else 0)
            padded[name] = filled.index_copy_(0, places_T, of_T).view(num_texts, longest)
        mask_SL = torch.arange(longest, device=self.device) < texts.lens_S[:, None]
        return self._run(padded, mask_SL.long()).flatten(0, 1).index_select(0, places_T)

    def _run(self, inputs: Mapping[str, torch.Tensor], mask_SL: torch.Tensor | None) -> torch.Tensor:
        hidden_SLE: torch.Tensor = self.model(**inputs, attention_mask=mask_SL).last_hidden_state
        return hidden_SLE


def typed(texts: PackedTexts, pair_separator: int | None) -> dict[str, torch.Tensor]:
    """What transformers' code is told of the types of pairs' tokens: int64 [T] under its name, or nothing."""
    return {} if pair_separator is None else {"token_type_ids": texts.types(pair_separator)}


def _has_types(model: PreTrainedModel) -> bool:
    num_types = getattr(model.config, "type_vocab_size", None) or 0
    return num_types > 1 and "token_type_ids" in inspect.signature(model.forward).parameters


def similar_lengths(lens: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending lengths cut into runs (first, end) of which each is one batch."""
    first = num_tokens = 0
    for index, length in enumerate(lens):
        padded = (index + 1 - first) * length
        if padded - num_tokens - length > max(MAX_PADDING * padded, FREE_PADDING):
            yield first, index
            first, num_tokens = index, 0
        num_tokens += length
    yield first, len(lens)
