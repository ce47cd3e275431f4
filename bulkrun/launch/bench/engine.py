"""The engine of a benchmark: a model or a shape, loaded with the engine settings asked for. Loading imports torch."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bulkrun
from bulkrun.errors import ModelError, UsageError
from bulkrun.job.jobfile.load import job_of, override_job
from bulkrun.launch.bench.shapes import write_shape
from bulkrun.launch.preparation.adapter import tokenizer_dir
from bulkrun.launch.preparation.prepare import BUNDLED_ROOT
from bulkrun.launch.threads import bound_spinning
from bulkrun.models.config.embedding_config import EmbeddingConfig
from bulkrun.models.config.find_model import resolve_adapter, resolve_model
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.scratch import Scratch
from bulkrun.settings import EngineArgs

if TYPE_CHECKING:
    import torch

    from bulkrun.engine.llm_engine import LLMEngine

SHAPE_MAX_MODEL_LEN = 4096
_ANY_JOB = {"name": "bench", "model": "bundled:tiny", "input": {"path": "-"}, "output": {"path": "-"}}


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """Which model, by name or as a shape (exactly one), and how it is loaded; `settings` are the engine's.

    Raises UsageError, or JobFileError for settings.
    """

    model: str | None = None
    shape: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.model is None) == (self.shape is None):
            raise UsageError("give either --model (a directory, a hub id or bundled:tiny) or --shape")
        own = {"load_format": "dummy"} if self.shape is not None else {}
        job_of({**_ANY_JOB, "engine": {**self.settings, **own}})  # report impossible settings before a model is loaded

    def model_len(self, config: ModelConfig) -> int:
        """The longest sequences of the model. Raises UsageError for settings that want longer ones than it has."""
        return config.model_len(self.settings.get("max_model_len"))

    @property
    def facts(self) -> dict[str, str]:
        """The name under which the result is reported."""
        return {"model": self.model} if self.model is not None else {"shape": self.shape or ""}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to be measured. `tokenizer_of`: its tokenizer's directory, None for a shape, which has none."""

    engine: LLMEngine
    config: ModelConfig
    tokenizer_of: Path | None
    load_s: float
    args: EngineArgs

    @property
    def quantization(self) -> str | None:
        """What the projections are multiplied in, if not in dtype: as asked for, or as the checkpoint has them."""
        from bulkrun.models.loading.kept_quantized import kept_quantization

        kept = kept_quantization(self.config, self.engine.config.device, deterministic=self.args.deterministic)
        return self.args.quantization or kept

    @property
    def facts(self) -> dict[str, Any]:
        """What ran, and on which device."""
        import torch

        config = self.engine.config
        return {
            **machine_facts(config.device),
            "load_format": self.args.load_format,
            "deterministic": self.args.deterministic,
            "async_scheduling": config.async_scheduling,
            "dtype": name_of(config.dtype),
            "kv": "fp8" if config.kv_cache_dtype == torch.float8_e4m3fn else name_of(config.kv_cache_dtype),
            **({} if self.quantization is None else {"quantization": self.quantization}),
        }


def machine_facts(device: torch.device) -> dict[str, Any]:
    """What a model ran on, and with which versions."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    versions = {"bulkrun": bulkrun.__version__, "torch": str(torch.__version__)}
    return {"device": name, "processor": _processor_name(), **versions}


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def name_of(dtype: torch.dtype) -> str:
    """As a job file has it: float32."""
    return str(dtype).removeprefix("torch.")


def engine_settings(overrides: Sequence[str]) -> dict[str, Any]:
    """The engine's settings among `--set engine.KEY=VALUE` options, by the rules of a job file.

    Raises JobFileError for a key or value that no job file could have, UsageError for another section's.
    """
    for override in overrides:
        if not override.startswith("engine."):
            raise UsageError(f"--set {override}: a benchmark takes the engine's keys only: --set engine.block_size=32")
    return override_job(_ANY_JOB, overrides).engine.model_dump(exclude_unset=True)


def load_for_bench(choice: ModelChoice, check: Callable[[ModelConfig], object] | None = None) -> LoadedModel:
    """Load it. Raises ModelError for a model that cannot be used, UsageError for settings that cannot work.

    `check` refuses by raising, before any weights are read.
    """
    bound_spinning()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler tells of every start and stop on stderr
    from bulkrun.engine.llm_engine import LLMEngine

    with ExitStack() as scratch:
        model_dir, args = _asked_for(choice, scratch)
        config = _config_of(model_dir)
        if check is not None:
            check(config)
        start = time.perf_counter()
        engine = LLMEngine.from_model_dir(model_dir, **asdict(args))
        load_s = time.perf_counter() - start
    tokenizer_of = tokenizer_dir(model_dir, args.adapter) if choice.model is not None else None
    return LoadedModel(engine, config, tokenizer_of, load_s, args)


def _config_of(model_dir: Path) -> ModelConfig:
    """Raises ModelError, and UsageError, naming the other benchmark, for a model that makes something else of texts."""
    try:
        return ModelConfig.from_dir(model_dir)
    except ModelError as error:
        with suppress(ModelError):
            EmbeddingConfig.from_dir(model_dir)
            raise UsageError(
                f"{model_dir}: writes no text; bulkrun bench texts measures what embeds or classifies"
            ) from None
        raise error from None


def _asked_for(choice: ModelChoice, scratch: ExitStack) -> tuple[Path, EngineArgs]:
    """The model's directory, that of a shape in `scratch`, and the engine's settings, a shape's own included."""
    settings = {name: value for name, value in choice.settings.items() if value is not None}
    if settings.pop("adapters", None):
        raise UsageError("engine.adapters: one model is measured, and each is as fast; name one in engine.adapter")
    if "adapter" in settings:
        settings["adapter"] = resolve_adapter(settings["adapter"])
    if choice.model is not None:
        return resolve_model(choice.model, bundled_root=BUNDLED_ROOT), EngineArgs(**settings)
    assert choice.shape is not None, "a choice is one of the two"
    max_model_len = settings.pop("max_model_len", SHAPE_MAX_MODEL_LEN)
    args = EngineArgs(**settings | {"max_model_len": max_model_len, "load_format": "dummy"})
    folder = scratch.enter_context(Scratch())
    stored = "bfloat16" if args.dtype == "auto" else args.dtype
    return write_shape(choice.shape, folder, dtype=stored, max_model_len=max_model_len), args
