"""An adapter added to a model of transformers' own code, which has its weights already."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from bulkrun.models.files.read_ahead import read_tensors
from bulkrun.models.loading.adapter import Adapter, base_name
from bulkrun.models.loading.tensor_names import Target


@torch.no_grad()
def add_to_model(model: PreTrainedModel, adapter: Adapter) -> None:
    """Change the model's parameters where they lie, rounding each sum once. Raises ModelError where they do not fit."""
    body, own = f"{model.base_model_prefix}.", dict(model.named_parameters(remove_duplicate=False))
    adapter = adapter.named(lambda name: base_name(name, own, body))
    adapter.check_fits({name: tuple(parameter.shape) for name, parameter in own.items()})
    _part_shared(model, [own[name] for name in adapter.names])
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for one, tensor in read_tensors([*adapter.whole.values()], lambda _: None):
        parameters[one.name].copy_(tensor)
    for name, added in adapter.added.items():
        parameter = parameters[name].data
        added.store(parameter, Target(parameter, tuple(parameter.shape)))


def _part_shared(model: PreTrainedModel, changed: list[nn.Parameter]) -> None:
    """Give a head that is the embedding its own numbers where one of the two changes: the other one stays."""
    head, shared = model.get_output_embeddings(), model.get_input_embeddings().weight
    if head is not None and head.weight is shared and any(parameter is shared for parameter in changed):
        head.weight = nn.Parameter(shared.clone(), requires_grad=False)
