"""A checkpoint's tensors with those that an adapter holds whole in their places, and what it adds to the others.

For the decoder's families: names are those of a plain text model, as in `stored_weights`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from bulkrun.errors import ModelError
from bulkrun.models.config.adapter_fit import refuse_quantized_base
from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.files.checkpoint import StoredTensor
from bulkrun.models.loading.adapter import Adapter, base_name
from bulkrun.models.loading.common_names import common_name
from bulkrun.models.loading.stored_weights import BODY, is_ignored, text_name
from bulkrun.models.loading.tensor_names import EMBEDDING, HEAD, HEAD_BIAS, OF_HEADS

_OF_VOCABULARY = (EMBEDDING, HEAD)


def on_text_model(
    adapter: Adapter, tensors: Mapping[str, StoredTensor], config: DecoderConfig, *, has_head: bool
) -> tuple[Adapter, dict[str, StoredTensor], DecoderConfig]:
    """The adapter under the names of `tensors`, these with its own in their places, and what they are a model of.

    Where the head is the embedding and the adapter changes one of the two, both are there: in training, too, the
    other one stayed. A vocabulary that grew in training is the model's. Raises ModelError for a base that is stored in
    8 or 4 bits, and where the two do not fit or nothing of the adapter is for a text model.
    """
    refuse_quantized_base(config.stored_quantization)

    def name_of(stored: str) -> str | None:
        name = common_name(text_name(stored), config.architecture)
        is_left_out = is_ignored(name) or (name.startswith(OF_HEADS) and not has_head)
        return None if is_left_out else base_name(name, tensors, BODY)

    if all(is_ignored(text_name(stored)) for stored in adapter.names):
        raise ModelError(f"{adapter.path}: all that it changes is beside the text model, which alone is run")
    adapter, tensors = adapter.named(name_of), dict(tensors)
    grown = next((one for one in _vocabulary(adapter).values() if one.shape[:1] != (config.vocab_size,)), None)
    if grown is not None:
        config = dataclasses.replace(config, vocab_size=grown.shape[0])
        tensors = {name: one for name, one in tensors.items() if name not in (*_OF_VOCABULARY, HEAD_BIAS)}
        tensors |= _grown_vocabulary(adapter, grown, config, has_head=has_head)
    elif has_head and config.tie_word_embeddings and EMBEDDING in tensors and adapter.names & {*_OF_VOCABULARY}:
        tensors.setdefault(HEAD, tensors[EMBEDDING]._replace(name=HEAD))
    adapter.check_fits({name: one.shape for name, one in tensors.items()})
    return adapter, tensors | dict(adapter.whole), config


def _vocabulary(adapter: Adapter) -> dict[str, StoredTensor]:
    """The matrices with a row for each token that the adapter holds whole."""
    return {
        name: one for name in _OF_VOCABULARY if (one := adapter.whole.get(name)) is not None and len(one.shape) == 2
    }


def _grown_vocabulary(
    adapter: Adapter, grown: StoredTensor, config: DecoderConfig, *, has_head: bool
) -> dict[str, StoredTensor]:
    """The embedding and the head, with its bias, of a vocabulary of another size, from the adapter.

    The base's are too short. Of a head that is the embedding it need hold one: what is added to one of them in training
    leaves the other as it is. Raises ModelError where it does not hold what is needed.
    """
    matrices = (EMBEDDING, HEAD) if has_head else (EMBEDDING,)
    needed = (*matrices, HEAD_BIAS) if has_head and config.has_head_bias else matrices
    shared = {name: grown._replace(name=name) for name in matrices} if config.tie_word_embeddings else {}
    own = shared | {name: one for name, one in adapter.whole.items() if name in needed}
    if missing := [name for name in needed if name not in own]:
        raise ModelError(
            f"{adapter.path}: its vocabulary has {grown.shape[0]} tokens, and it lacks {missing[0]} of that size: PEFT "
            "saves embed_tokens and lm_head where both are in modules_to_save, or in target_modules; or merge the two "
            "with PEFT"
        )
    return own
