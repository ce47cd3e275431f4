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
from bulkrun.settings import EngineArgs


@pytest.mark.parametrize(
    ("stored", "device", "settings", "quantization"),
    [
        ("fbgemm_fp8", "cuda", {}, "fp8"),
        ("fbgemm_fp8", "cuda", {"deterministic": True}, None),
        ("fbgemm_fp8", "cpu", {}, None),
        ("fbgemm_fp8", "cpu", {"quantization": "fp8"}, "fp8"),
        (None, "cuda", {}, None),
    ],
)
def test_products_are_in_fp8_where_the_checkpoint_is_and_the_device_can(
    stored: str | None,
    device: str,
    settings: dict[str, object],
    quantization: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    raw = json.loads((BUNDLED_ROOT / "tiny" / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(raw | {"quantization_config": stored and {"quant_method": stored}})
    )
    engine = SimpleNamespace(config=SimpleNamespace(device=torch.device(device)))
    loaded = LoadedModel(engine, ModelConfig.from_dir(tmp_path), tmp_path, 0.0, EngineArgs(**settings))
    assert loaded.quantization == quantization
