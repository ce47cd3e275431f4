"""A checkpoint's tensors under the names of a plain text model, whoever wrote it, and whether they are all there.

Beside a vision tower the names have prefixes, in a body saved by itself they lack one, and heads are stored that
config.json calls tied. Headers tell nearly everything; of weights only such a head is read, and the embedding.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch

from bulkrun.errors import ModelError
from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.files.checkpoint import StoredTensor, stored_tensors
from bulkrun.models.files.read_ahead import PIECE_BYTES, read_tensors
from bulkrun.models.loading.common_names import common_name
from bulkrun.models.loading.layer_input_names import is_of_shared_keys
from bulkrun.models.loading.target import Target
from bulkrun.models.loading.tensor_names import EMBEDDING, HEAD

# some checkpoints store constants; beside a text model there may be others, a value head of its training, and one
# that guesses several tokens ahead
_IGNORED = re.compile(
    r"rotary_emb\.inv_freq$|\.masked_bias$|\.self_attn\.(bias|causal_mask)$|\.act_fn\.(beta|eps)$"
    r"|^(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|embed_vision)\."
    r"|^(model\.)?(audio_tower|embed_audio|vision_embedder)\.|^v_head\.|^mtp\."
    r"|^(model\.)?image_newline$|^model\.mtp_"
)
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_QUANTIZED = re.compile(
    r"(qweight|qzeros|g_idx|scales|_scale(_inv|_2)?|_zero_point|_packed|absmax|quant_map|SCB|W_q)$|\.quant_state\."
)
_NOT_SUPPORTED = (
    "which are not supported unless config.json says how they are meant; use the model's bfloat16, float16 or float32 "
    "checkpoint"
)
BODY = "model."  # what the names of all but the head begin with
_BODY_EMBEDDING = EMBEDDING.removeprefix(BODY)
_TEXT_PREFIX = re.compile(r"^(model\.language_model|language_model\.model)\.|^language_model\.(?=lm_head)")


def text_tensors(files: list[Path], architecture: str, *, is_tied: bool) -> dict[str, StoredTensor]:
    """What the files hold for a text model, by name. Raises ModelError for a torn file."""
    named = {common_name(text_name(stored.name), architecture): stored for stored in stored_tensors(files)}
    kept = {name: stored for name, stored in named.items() if not is_ignored(name)}
    prefix = BODY if _BODY_EMBEDDING in kept else ""  # a body saved by itself
    whole = {name if name == HEAD else prefix + name: stored for name, stored in kept.items()}
    if is_tied and EMBEDDING not in whole and HEAD in whole:
        whole[EMBEDDING] = whole.pop(HEAD)  # one of the two is enough
    return {name: stored._replace(name=name) for name, stored in whole.items()}


def is_ignored(name: str) -> bool:
    """Whether a tensor of this name is none of a text model's weights."""
    return _IGNORED.search(name) is not None


def has_own_head(tensors: Mapping[str, StoredTensor], dtype: torch.dtype) -> bool:
    """Whether a head is stored that in `dtype` is not the embedding: then it counts, as in transformers.

    A model that was trained on may have a head of its own under a config.json that says otherwise. Both are read, a
    piece of each at a time, until they differ.
    """
    if HEAD not in tensors or EMBEDDING not in tensors:
        return False
    head, embedding = tensors[HEAD], tensors[EMBEDDING]
    if head.shape != embedding.shape:
        return True
    pairs = zip(_pieces(head), _pieces(embedding), strict=True)
    pieces = (piece.to(dtype) for _, piece in read_tensors([one for pair in pairs for one in pair], lambda _: None))
    return not all(torch.equal(ours, theirs) for ours, theirs in zip(pieces, pieces, strict=True))


def checked_tensors(
    wanted: Mapping[str, Target],
    tensors: Mapping[str, StoredTensor],
    scaled: Collection[str],
    config: DecoderConfig,
    path: Path,
) -> list[StoredTensor]:
    """The stored tensors that are wanted, in the files' order. Raises ModelError unless all are as they must be.

    Of those that are `scaled` 8 bits are no surprise. Layers beyond num_hidden_layers are left alone, as in
    transformers: lowering it is how a model is cut.
    """
    for name, stored in tensors.items():
        if name in wanted:
            _check(stored, wanted[name], path, is_scaled=name in scaled)
    _refuse_others({name: one for name, one in tensors.items() if name not in wanted}, config, path)
    missing = sorted(set(wanted) - set(tensors))
    if missing == [HEAD]:
        raise ModelError(f"{path}: there is no {HEAD}, so this is not a text-generating model (one for embeddings?)")
    if missing:
        raise ModelError(
            f"{path}: {len(missing)} of {len(wanted)} tensors are missing: {_shown(missing)}; download it again"
        )
    return [stored for name, stored in tensors.items() if name in wanted]


def _refuse_others(tensors: Mapping[str, StoredTensor], config: DecoderConfig, path: Path) -> None:
    """Raise ModelError for tensors without a place in the model, unless it is clear why they have none."""
    for name in tensors:
        if _QUANTIZED.search(name):
            raise ModelError(f"{path}: tensor {name} is of quantized weights, {_NOT_SUPPORTED}")
    cut_off = [name for name in tensors if (match := _LAYER.match(name)) and int(match[1]) >= config.num_layers]
    if cut_off:
        logging.getLogger(__name__).warning(
            "%s: config.json has num_hidden_layers %d and the files hold more layers; those are left out",
            path,
            config.num_layers,
        )
    without_use = {name for name in tensors if is_of_shared_keys(name, config)}
    others = sorted({*tensors} - {*cut_off} - without_use - ({HEAD} if config.tie_word_embeddings else set()))
    if others and not _are_zero_biases([tensors[name] for name in others]):
        raise ModelError(
            f"{path}: a {config.architecture} with this config.json has no place for {len(others)} of the tensors: "
            f"{_shown(others)}; without them it might be another model. Correct config.json (a bias, for one, needs "
            "attention_bias or mlp_bias), or take a checkpoint that does not have them"
        )


def _are_zero_biases(stored: list[StoredTensor]) -> bool:
    """As AutoGPTQ wrote them for layers that have none."""
    are_biases = all(one.name.endswith(".bias") for one in stored)
    return are_biases and not any(tensor.any() for _, tensor in read_tensors(stored, lambda _: None))


def _shown(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def text_name(name: str) -> str:
    """A tensor's name as it is where there is nothing but a text model."""
    match = _TEXT_PREFIX.match(name)
    return name if match is None else name.replace(match[0], BODY if match[1] else "", 1)


def _pieces(stored: StoredTensor) -> Iterator[StoredTensor]:
    """The tensor as consecutive runs of its numbers; another one of its shape is cut at the same places."""
    total, step = math.prod(stored.shape), PIECE_BYTES // 4
    for first in range(0, total, step):
        count = min(step, total - first)
        offset = stored.offset + first * stored.dtype.itemsize
        yield stored._replace(shape=(count,), offset=offset, num_bytes=count * stored.dtype.itemsize)


def _check(stored: StoredTensor, target: Target, path: Path, *, is_scaled: bool) -> None:
    if not (stored.dtype.is_floating_point or is_scaled):
        raise ModelError(f"{path}: tensor {stored.name} holds {stored.dtype}: quantized weights, {_NOT_SUPPORTED}")
    if stored.shape != target.shape:
        raise ModelError(
            f"{path}: tensor {stored.name} is {list(stored.shape)}, but config.json makes it {list(target.shape)}; "
            "config.json and weights are of different models"
        )
