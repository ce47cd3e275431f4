"""A checkpoint's tensors with those that an adapter holds whole in their places, and what it adds to the others.

For the decoder's families: names are those of a plain text model, as in `stored_weights`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from bulkrun.errors import ModelError
from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.files.checkpoint import StoredTensor
from bulkrun.models.loading.adapter import Adapter, base_name
from bulkrun.models.loading.stored_weights import BODY, is_ignored, text_name
from bulkrun.models.loading.tensor_names import EMBEDDING, HEAD, OF_HEADS

_OF_VOCABULARY = {EMBEDDING, HEAD}


def on_text_model(
    adapter: Adapter, tensors: Mapping[str, StoredTensor], config: DecoderConfig, *, has_head: bool
) -> tuple[Adapter, dict[str, StoredTensor], DecoderConfig]:
    """The adapter under the names of `tensors`, these with its own in their places, and what they are a model of.

    Where the head is the embedding and the adapter changes one of the two, both are there: in training, too, the
    other one stayed. A vocabulary that grew in training is the model's. Raises ModelError for a base that is stored in
    8 or 4 bits, and where the two do not fit.
    """
    if config.stored_quantization is not None:
        raise ModelError(
            "engine.adapter: the model's weights are stored quantized, and an adapter is added to whole ones; take the "
            "model's bfloat16, float16 or float32 checkpoint (engine.quantization quantizes the sum)"
        )

    def name_of(stored: str) -> str | None:
        name = text_name(stored)
        is_left_out = is_ignored(name) or (name.startswith(OF_HEADS) and not has_head)
        return None if is_left_out else base_name(name, tensors, BODY)

    adapter, tensors = adapter.named(name_of), dict(tensors)
    embedding = adapter.whole.get(EMBEDDING)
    if embedding is not None and embedding.shape[0] != config.vocab_size:
        config = dataclasses.replace(config, vocab_size=embedding.shape[0])
        tensors = {name: one for name, one in tensors.items() if name not in _OF_VOCABULARY}
        tensors |= {name: one for name, one in adapter.whole.items() if name in _OF_VOCABULARY}
    elif has_head and config.tie_word_embeddings and EMBEDDING in tensors and adapter.names & _OF_VOCABULARY:
        tensors.setdefault(HEAD, tensors[EMBEDDING]._replace(name=HEAD))
    adapter.check_fits({name: one.shape for name, one in tensors.items()})
    return adapter, tensors | dict(adapter.whole), config
