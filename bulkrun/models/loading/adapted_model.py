"""An adapter added to a model of transformers' own code, which has its weights already."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from bulkrun.models.config.adapter_fit import AdapterError
from bulkrun.models.files.read_ahead import read_tensors
from bulkrun.models.loading.adapter import Adapter, LowRank, base_name
from bulkrun.models.loading.stored_weights import text_name
from bulkrun.models.loading.target import Target


@torch.no_grad()
def add_to_model(model: PreTrainedModel, adapter: Adapter) -> None:
    """Change parameters where they lie, rounding each sum once. Raises AdapterError where that does not fit."""
    body, own = f"{model.base_model_prefix}.", dict(model.named_parameters(remove_duplicate=False))
    # trained on a model that sees, it may have that one's names for the text part
    adapter = adapter.named(lambda name: base_name(name if name in own else text_name(name), own, body))
    adapter = adapter._replace(added=dict(_as_they_lie(adapter, model)))
    adapter.check_fits({name: tuple(parameter.shape) for name, parameter in own.items()})
    _part_shared(model, [own[name] for name in adapter.names])
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for one, tensor in read_tensors([*adapter.whole.values()], lambda _: None):
        parameters[one.name].copy_(tensor)
    for name, added in adapter.added.items():
        parameter = parameters[name].data
        added.store(parameter, Target(parameter, tuple(parameter.shape)))


def _as_they_lie(adapter: Adapter, model: PreTrainedModel) -> Iterator[tuple[str, LowRank]]:
    """What is added to each weight, as the weight lies: PEFT looks at the module, not at `fan_in_fan_out`, which is
    one for all. Raises AdapterError for magnitudes of such a weight."""
    transposed = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Conv1D)}
    for name, added in adapter.added.items():
        if name in transposed and added.magnitude_O is not None:
            raise AdapterError(
                f"{adapter.path}: use_dora on {name}, which lies transposed, is not supported; merge the adapter into "
                "its base model with PEFT"
            )
        yield name, added.transposed if name in transposed else added


def _part_shared(model: PreTrainedModel, changed: list[nn.Parameter]) -> None:
    """Give a head that is the embedding its own numbers where one of the two changes: the other one stays."""
    head, shared = model.get_output_embeddings(), model.get_input_embeddings().weight
    if head is not None and head.weight is shared and any(parameter is shared for parameter in changed):
        head.weight = nn.Parameter(shared.clone(), requires_grad=False)
