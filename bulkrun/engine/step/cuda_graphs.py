"""Steps captured as CUDA graphs: launched with one call, padded to one of a few sizes.

A graph holds the model's forward over static buffers; logits and sampling, a handful of launches that depend on what
requests ask for, stay outside. All graphs use the same buffers and the same memory pool, which is right because steps
run one after another. What is captured and replayed is a matter of `Capture`: padding and buffers are the same
everywhere, so that a CPU can test them. Knows no scheduling and no sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial

import torch

from bulkrun.engine.scheduling.scheduled_batch import ScheduledBatch
from bulkrun.engine.step.model_input import step_metadata
from bulkrun.engine.step.shared_prefixes import SharedPrefixTable
from bulkrun.engine.step.step_shape import CapturedShapes, StepShape
from bulkrun.models.kv_cache import KVCache
from bulkrun.models.language_model import LanguageModel
from bulkrun.ops import StepBuffers

Forward = Callable[[], torch.Tensor]
Capture = Callable[[Forward], Forward]  # a function over static buffers -> one that does the same, faster


class StepGraphs:
    """The captured steps of a model over one KV cache; hidden states come from where the last replay left them."""

    @torch.inference_mode()
    def __init__(
        self,
        model: LanguageModel,
        kv_cache: KVCache,
        shapes: CapturedShapes,
        *,
        max_blocks_per_seq: int,
        prefixes: SharedPrefixTable | None,
        capture: Capture,
    ) -> None:
        """Capture every shape, the largest first: the smaller ones find the memory they need in the pool."""
        self._model, self._kv_cache, self._shapes, self._prefixes = model, kv_cache, shapes, prefixes
        everything = list(shapes)
        num_tokens = max(shape.num_tokens for shape in everything)
        num_seqs = max(shape.num_seqs for shape in everything)
        device = kv_cache.device
        self._buffers = StepBuffers.allocate(num_tokens, num_seqs, max_blocks_per_seq, device)
        self._buffers.clear()
        self._hidden_TE = torch.empty(num_tokens, model.config.hidden_size, dtype=model.dtype, device=device)
        self._replays = {shape: capture(partial(self._forward, shape)) for shape in everything}

    @property
    def num_captured(self) -> int:
        """How many shapes of steps there are graphs for."""
        return len(self._replays)

    def shape_for(self, batch: ScheduledBatch) -> StepShape | None:
        """The captured shape that the batch is padded to; None: it has to be launched kernel by kernel."""
        return self._shapes.fit(batch)

    def buffers(self, shape: StepShape) -> StepBuffers:
        """Where the inputs of a step must stand before its replay."""
        return self._buffers.first(shape.num_tokens, shape.num_seqs)

    def replay(self, shape: StepShape) -> torch.Tensor:
        """Hidden states [T, E] of the step in the buffers; good until the next replay of any shape."""
        return self._replays[shape]()

    def _forward(self, shape: StepShape) -> torch.Tensor:
        buffers = self.buffers(shape)
        shared = None
        if self._prefixes is not None:
            shared = self._prefixes.view(shape.num_decode_seqs)
        meta = step_metadata(buffers, shape, shared_prefixes=shared, is_padded=True)
        hidden_TE = self._model(buffers.input_ids_T, buffers.positions_T, self._kv_cache, meta)
        return self._hidden_TE[: shape.num_tokens].copy_(hidden_TE)  # or each graph would keep memory of its own for it


class CudaCapture:
    """Captures on a stream of its own, after a run that compiles kernels and loads libraries."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = capture_stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._is_first = True

    def __call__(self, forward: Forward) -> Forward:
        """A function that replays what `forward` launches. It must not wait for the device, nor ask it anything."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            forward()
            self._stream.synchronize()
            if self._is_first:  # the largest: while it is captured the allocator gives no cached memory back
                torch.cuda.empty_cache()
                self._is_first = False
            graph.capture_begin(self._pool, capture_error_mode="thread_local")  # other threads go on with their work
            try:
                hidden_TE = forward()
            except BaseException:
                self._abandon(graph)
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)

        def replay() -> torch.Tensor:
            graph.replay()
            return hidden_TE

        return replay

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed; what made it fail matters, not that it is void.

        `capture_end` raises then before it tells torch's allocator, which from there on would give no memory back and
        fail where it is asked to: so that is told here, as `torch.cuda.use_mem_pool` does it.
        """
        try:
            graph.capture_end()
        except RuntimeError:
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            for tell in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
                with suppress(RuntimeError):
                    tell(index, self._pool)


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all graphs of the process: cuBLAS keeps a workspace, on Hopper 32 MiB, for every stream it worked on."""
    return torch.cuda.Stream(device)
