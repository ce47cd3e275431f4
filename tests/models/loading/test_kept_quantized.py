"""Which projections stay as a checkpoint has them: none of which a part is plain, whatever its family calls that.

And none in four bits whose rows lie otherwise there than here.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
import transformers

from bulkrun.models.config.families import FAMILIES
from bulkrun.models.config.model_config import DecoderConfig, ModelConfig
from bulkrun.models.decoder.decoder import Decoder
from bulkrun.models.decoder.layers import ExpertLinear
from bulkrun.models.files.checkpoint import StoredTensor
from bulkrun.models.loading.kept_quantized import kept_projections
from bulkrun.models.loading.quantization import projections
from bulkrun.models.loading.row_orders import reordered_projections
from bulkrun.models.loading.stored_quantized import StoredWeights
from bulkrun.models.loading.tensor_names import targets
from tests.models.tiny_models import SMALL, VARIANTS, known

FAST = [variant for variant in known(VARIANTS) if VARIANTS[variant][0] in FAMILIES]


def plain(name: str) -> StoredTensor:
    return StoredTensor(Path("model.safetensors"), name, torch.bfloat16, (1, 1), 0, 2)


@pytest.mark.parametrize("variant", FAST)
def test_a_projection_with_a_plain_part_is_no_quantized_one(variant: str) -> None:
    """By the names that the loader puts there: with one that is not looked at, a plain weight was quantized."""
    model = without_memory(variant)
    config = model.config
    memory = {name: _memory(target.view) for name, target in targets(model, {}) if name.endswith(".weight")}
    for i, layer in enumerate(model.layers):
        for projection, module in projections(layer):
            parts = [name for name, one in memory.items() if one == _memory(module.weight)]
            assert parts or isinstance(module, ExpertLinear), "those may be one tensor of another name"
            for name in parts:
                is_stored_so = kept_projections(config, StoredWeights({name: plain(name)}, {}, None, False))
                assert not is_stored_so(i, projection), name


@pytest.mark.parametrize("variant", FAST)
def test_rows_that_are_put_in_another_order_are_told_by_their_projections_names(variant: str) -> None:
    """Codes of four bits are stored as they lie: those of a projection that is not named would be other rows'."""
    model = without_memory(variant)
    orders = [(target.view, target.order) for _, target in targets(model, {}) if target.order is not None]
    moved = {_memory(view) for view, order in orders if not torch.equal(order, torch.arange(len(order)))}
    for layer in model.layers:
        found = {name for name, module in projections(layer) if _memory(module.weight) in moved}
        assert found <= reordered_projections(model.config)


def without_memory(variant: str) -> Decoder:
    """A variant, whose weights are nowhere."""
    architecture, changes = VARIANTS[variant]
    theirs = getattr(transformers, architecture).config_class(**deepcopy(SMALL | changes))
    config = ModelConfig.from_dict(theirs.to_dict() | {"architectures": [architecture]})
    assert isinstance(config, DecoderConfig)
    with torch.device("meta"):
        return Decoder(config)


def _memory(tensor: torch.Tensor) -> int:
    """What the parts of a fused matrix share, where it has no memory yet."""
    return tensor.untyped_storage()._cdata
