"""What a benchmark says that it ran."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bulkrun.launch.bench.engine import LoadedModel
from bulkrun.launch.preparation.prepare import BUNDLED_ROOT
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.models.loading import kept_quantized
from bulkrun.settings import EngineArgs
from tests.models.tiny_quantized import FORMATS


@pytest.mark.parametrize(
    ("stored", "device", "settings", "quantization"),
    [
        ("fbgemm", "cuda", {}, "fp8"),
        ("fbgemm", "cuda", {"deterministic": True}, None),
        ("fbgemm", "cpu", {}, None),
        ("fbgemm", "cpu", {"quantization": "fp8"}, "fp8"),
        ("int8_channel", "cuda", {}, None),
        ("int8_channel", "cpu", {}, "int8"),
        ("int8_channel", "cpu", {"deterministic": True}, "int8"),
        (None, "cuda", {}, None),
    ],
)
def test_products_are_in_8_bits_where_the_checkpoint_is_and_the_device_can(
    stored: str | None,
    device: str,
    settings: dict[str, object],
    quantization: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    monkeypatch.setattr(kept_quantized, "can_pack_int8", lambda columns, size: True)
    raw = json.loads((BUNDLED_ROOT / "tiny" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": stored and FORMATS[stored].config}))
    engine = SimpleNamespace(config=SimpleNamespace(device=torch.device(device)))
    loaded = LoadedModel(engine, ModelConfig.from_dir(tmp_path), tmp_path, 0.0, EngineArgs(**settings))
    assert loaded.quantization == quantization
