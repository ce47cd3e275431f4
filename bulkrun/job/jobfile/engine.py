"""The section `engine`: what a worker's engine is given. Names are vLLM's."""

from __future__ import annotations

from pydantic import Field, model_validator

from bulkrun.job.jobfile.section import Section
from bulkrun.settings import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_ENCODER_TOKENS,
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    DEFAULTS,
    Batching,
    Device,
    Dtype,
    KVCacheDtype,
    LoadFormat,
    Quantization,
)


class EngineSpec(Section):
    """How the engine works, not what it answers: most may change under a run. Names are vLLM's.

    Adapters, random or 8-bit weights, an 8-bit KV cache and `deterministic` are the exceptions: with them it is
    another run.
    """

    device: Device = Field(DEFAULTS.device, description="auto: the GPU if there is one.")
    dtype: Dtype = Field(DEFAULTS.dtype, description="auto: the model's own; float32 on a CPU without bf16 units.")
    load_format: LoadFormat = Field(
        DEFAULTS.load_format,
        description="auto: the model's safetensors; dummy: random weights, for measuring speed without a download.",
    )
    adapter: str | None = Field(
        None,
        min_length=1,
        description="A LoRA adapter, a directory as PEFT saves it or a hub id: added to the model's weights as they "
        "are loaded, which must be stored unquantized. Where it has a tokenizer, that and its chat template count; its "
        "modules.json (pooling, prompts, Dense) does too. Default: none.",
    )
    adapters: dict[str, str] = Field(
        {},
        description="Several LoRA adapters by names, each a directory or hub id as in `adapter`, trained with the "
        "model's own tokenizer. A row names the one that it runs with: in the column `input.adapter`, or in an OpenAI "
        "line as its `model`. Rows of one run together; then the model is loaded for the next one. Default: none.",
    )
    max_num_seqs: int | None = Field(
        None,
        ge=1,
        description="Maximum number of sequences running at once. "
        f"Default: {DEFAULT_MAX_NUM_SEQS['cuda']} on a GPU, {DEFAULT_MAX_NUM_SEQS['cpu']} on a CPU.",
    )
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        description="Maximum number of tokens computed in one step (prompts are chunked to fit). Default: "
        f"{DEFAULT_MAX_NUM_BATCHED_TOKENS['cuda']} on a GPU ({DEFAULT_ENCODER_TOKENS} for encoders), else "
        f"{DEFAULT_MAX_NUM_BATCHED_TOKENS['cpu']}.",
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="Maximum number of tokens of prompt and output together, or of a text to embed. Default: the "
        "model's, if memory allows.",
    )
    block_size: int | None = Field(
        None, ge=1, le=1024, description=f"Tokens per KV cache block. Default: {DEFAULT_BLOCK_SIZE}."
    )
    gpu_memory_utilization: float = Field(
        DEFAULTS.gpu_memory_utilization,
        gt=0,
        le=1,
        description="Share of the GPU's memory that weights and KV cache may take.",
    )
    kv_cache_memory_bytes: int | None = Field(
        None,
        ge=1,
        description="Bytes of KV cache. Default: what gpu_memory_utilization leaves; on CPU a share of RAM.",
    )
    kv_cache_dtype: KVCacheDtype = Field(
        DEFAULTS.kv_cache_dtype,
        description="auto: the model's; fp8: half of bfloat16's bytes, so twice the tokens and less to read for long "
        "contexts, on GPUs and CPUs, at some loss of quality; bfloat16: half of float32's. Other "
        "pairs of it and the model's dtype go through slower code on a CPU.",
    )
    quantization: Quantization | None = Field(
        None,
        description="Weights and activations of the projections, of experts too, in 8 bits, at some loss of quality. "
        "fp8: for GPUs (on a CPU the same numbers, slowly); int8: for CPUs. Default: the model's dtype; a checkpoint "
        "stored in 8 bits with a scale per output channel stays so where its products are fast: fp8 on a GPU, int8 on "
        "a CPU; one in 4 bits stays so on a CPU with AVX2.",
    )
    deterministic: bool = Field(
        DEFAULTS.deterministic,
        description="A row's tokens and log-probabilities have the same bits whatever runs beside it: any batch, "
        "chunking, prefix cache, resume, worker or thread count. Slower.",
    )
    enable_prefix_caching: bool = Field(
        DEFAULTS.enable_prefix_caching, description="Compute a prefix shared by several prompts only once."
    )
    batching: Batching = Field(
        DEFAULTS.batching,
        description="When waiting requests join. continuous: at once; static: when the whole batch has ended; dynamic: "
        "as static, after waiting a while for a full batch.",
    )
    batching_window_s: float = Field(
        DEFAULTS.batching_window_s, ge=0, description="Seconds that batching: dynamic waits for a full batch."
    )
    enforce_eager: bool = Field(
        DEFAULTS.enforce_eager,
        description="On a GPU, launch every kernel from Python instead of whole steps as CUDA graphs.",
    )
    async_scheduling: bool | None = Field(
        None,
        description="Launch a step before the tokens of the previous one have been read. Default: true on a GPU, else "
        "false.",
    )

    @model_validator(mode="after")
    def _deterministic(self) -> EngineSpec:
        if self.deterministic and self.quantization == "fp8":
            raise ValueError(
                f"deterministic: does not go with quantization: {self.quantization}, whose products depend on the "
                "batch; leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _an_adapter_of_something(self) -> EngineSpec:
        key = "adapter" if self.adapter is not None else "adapters"
        if getattr(self, key) and self.load_format == "dummy":
            raise ValueError(
                f"{key}: means nothing to the random weights of load_format: dummy; leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _one_adapter_or_several(self) -> EngineSpec:
        if self.adapters and self.adapter is not None:
            raise ValueError("adapters: goes not with adapter, which all rows have; leave one of the two out")
        if not all(name and where for name, where in self.adapters.items()):
            raise ValueError("adapters: each has a name and a directory or hub id; one of the two is empty")
        return self

    @model_validator(mode="after")
    def _a_token_for_everybody(self) -> EngineSpec:
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if seqs is not None and tokens is not None and tokens < seqs:
            raise ValueError(
                f"max_num_batched_tokens: {tokens} is below max_num_seqs, {seqs}, and every running sequence needs a "
                "token in every step; raise the first or lower the second"
            )
        return self
