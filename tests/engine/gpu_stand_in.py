"""A stand-in for a CUDA device, in which a machine without one runs the engine's whole GPU path.

Its tensors say that they are on `cuda:0` and have their numbers in host memory; Triton kernels are interpreted. It is
as strict as a GPU, and stricter where a GPU is wrong in silence: new memory is full of NaN, so is a graph's own memory
before and after each replay, a copy to the host holds garbage until its event is waited for, tensors of host and
device do not mix, and an op that CUDA lacks for a dtype fails (`cuda_ops`). Whatever waits for the device is
counted, and is an error while a graph is captured. It knows no streams (everything runs in order), no bf16 and no
speed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from triton.runtime.interpreter import GridExecutor

from bulkrun.engine import device as engine_device
from bulkrun.engine.step.cuda_graphs import capture_stream
from tests.engine.cuda_ops import CudaOps
from tests.engine.stand_in_tensors import PinnedTensor, is_on_device, on_device, spoil, tensors_in
from tests.ops.triton.sanitizer import quicker_interpreter

_CPU = torch.device("cpu")
_UNINITIALIZED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# the value or the size of what these give is on the device
_WAITING = {"item", "tolist", "numpy", "nonzero", "masked_select", "unique", "bincount", "argwhere", "equal"}
_WAITING |= {"__bool__", "__int__", "__float__", "__index__", "__contains__"}
# the numbers of what these make come from the host's ordinary memory, which the copy has to be done with
_WAITING |= {"tensor", "as_tensor", "asarray", "new_tensor"}


class Graph:
    """A CUDA graph: what was launched between begin and end, to be launched again on the same memory."""

    def __init__(self, gpu: GpuStandIn) -> None:
        self._gpu = gpu
        self._launches: list[tuple[Callable[[], Any], list[torch.Tensor]]] = []  # and where new results go
        self._own: list[torch.Tensor] = []  # memory that was taken while capturing

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        """From here on."""
        self._gpu.graph = self
        self._gpu.pools_in_use.append(pool)

    def capture_end(self) -> None:
        """To here. Of a void capture it raises, and leaves the allocator as if it went on, which is what torch does."""
        self._gpu.graph = None
        self._spoil()
        if self._gpu.is_void:
            self._gpu.is_void = False
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self._gpu.pools_in_use.pop()

    def add(self, launch: Callable[[], Any], given: list[torch.Tensor], result: Any, *, is_fresh: bool) -> None:
        """Remember a launch; is_fresh: its result is memory that nobody has written yet."""
        memory = {tensor.untyped_storage().data_ptr() for tensor in given}
        new = [tensor for tensor in tensors_in(result) if tensor.untyped_storage().data_ptr() not in memory]
        self._own += new
        if not is_fresh:
            self._launches.append((launch, new))

    def replay(self) -> None:
        """Launch everything again."""
        self._gpu.num_replays += 1
        self._spoil()
        for launch, new in self._launches:
            result = tensors_in(launch())
            for before, now in zip(new, result if new else [], strict=True):
                before.copy_(now)
        self._spoil()  # another graph of the same pool may use it from here on

    def _spoil(self) -> None:
        for tensor in self._own:
            spoil(tensor)


class GpuStandIn(TorchFunctionMode):
    """The device. `waits` counts what the host waited for; launches go to the graph that is being captured too."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.num_replays = 0
        self.graph: Graph | None = None
        self.is_void = False  # the capture
        self.pools_in_use: list[object] = []  # by captures
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # on their way to the host: (to, from)
        self._ops = CudaOps()
        self._interpret = GridExecutor.__call__

    def wait(self, what: str) -> None:
        """The host waits for the device."""
        assert self.graph is None, f"{what} waits for the device while a graph is captured"
        self.waits[what] += 1

    def void_capture(self) -> None:
        """What an operator does that must not be captured, if one is."""
        if self.graph is not None:
            self.is_void = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def empty_cache(self) -> None:
        """Nothing is cached."""
        if self.pools_in_use:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        kwargs.pop("pin_memory", None)
        tensors = tensors_in((args, kwargs))
        if name in ("to", "cpu") and isinstance(args[0], torch.Tensor):
            return self._to(*args, **kwargs) if name == "to" else self._to(args[0], _CPU)
        if name == "copy_" and is_on_device(args[0]) != is_on_device(args[1]):
            return self._copy(*args, **kwargs)
        if name == "_has_compatible_shallow_copy_type":  # a module moves: its parameters are made anew
            return False
        target = kwargs.get("device")
        if target is None and not any(map(is_on_device, tensors)):
            return func(*args, **kwargs)
        if target is not None and torch.device(target).type != "cuda":
            return func(*args, **kwargs)
        if target is not None:
            kwargs["device"] = _CPU
        num_waits = self.waits.total()
        self._check(name, args, tensors)
        self._ops.waits.clear()
        result = self._launch(lambda: on_device(func(*args, **kwargs)), name, tensors)
        if self._ops.waits and self.waits.total() == num_waits:  # or it is counted by its own name
            self.wait(f"{name}, which is {self._ops.waits[0]} within")
        return result

    def launch_kernel(self, executor: GridExecutor, args: Any, kwargs: Any) -> None:
        """Interpret a Triton kernel."""
        tensors = tensors_in((args, kwargs))
        assert all(map(is_on_device, tensors)), f"{executor.fn.__name__} got a tensor of the host"
        with torch.DisableTorchFunctionSubclass(), torch._C.DisableTorchFunction():
            self._launch(lambda: self._interpret(executor, *args, **kwargs), "", tensors)

    def _launch(self, launch: Callable[[], Any], name: str, tensors: list[torch.Tensor]) -> Any:
        with self._ops if name else nullcontext():  # a kernel's interpreter has ops of its own
            result = launch()
        if name in _UNINITIALIZED:
            spoil(result)
        if self.graph is not None:
            self.graph.add(launch, tensors, result, is_fresh=name in _UNINITIALIZED)
        return result

    def _check(self, name: str, args: Any, tensors: list[torch.Tensor]) -> None:
        """What a GPU would refuse, or wait for."""
        if name in _WAITING:
            self.wait(name)
        if name in ("__getitem__", "__setitem__"):
            self._check_index(name, *args)
        for tensor in tensors:
            assert is_on_device(tensor) or tensor.ndim == 0 or tensor.is_meta, f"{name} of tensors of host and device"

    def _check_index(self, name: str, target: torch.Tensor, given: Any, *value: Any) -> None:
        """A mask is counted, one index of the device, and where torch (2.11) copies a number from the host."""
        indices = given if isinstance(given, tuple) else (given,)
        tensors = tensors_in(indices)
        if any(index.dtype is torch.bool for index in tensors):
            self.wait(f"{name} by a mask")
        if any(index.ndim == 0 for index in tensors):
            self.wait(f"{name} at a place that the device knows")
        is_one_place = len(indices) == target.ndim and all(isinstance(index, int) for index in indices)
        if value and not is_on_device(value[0]) and (tensors or is_one_place):
            self.wait(f"{name} of a number of the host")

    def _to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = [*args, *kwargs.values()]
        dtypes = [value for value in given if isinstance(value, torch.dtype)]
        devices = [torch.device(value) for value in given if isinstance(value, (str, torch.device))]
        devices += [value.device for value in given if isinstance(value, torch.Tensor)]
        if dtypes:
            tensor = self._converted(tensor, dtypes[0])
        if not devices or (devices[0].type == "cuda") == is_on_device(tensor):
            return tensor
        non_blocking = kwargs.get("non_blocking", False)
        if not is_on_device(tensor):
            return on_device(self._of_host(tensor, non_blocking=non_blocking).clone())
        return self._to_host(tensor, non_blocking=non_blocking)

    def _converted(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not is_on_device(tensor):
            return tensor.type(dtype)
        converted: torch.Tensor = self._launch(lambda: on_device(tensor.type(dtype)), "type", [tensor])
        return converted

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if is_on_device(target):
            return target.copy_(on_device(self._of_host(source, non_blocking=non_blocking)))
        return target.copy_(self._to_host(source, non_blocking=False))

    def _of_host(self, tensor: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
        assert self.graph is None, "a graph would read the host's memory at every replay"
        if not (non_blocking and isinstance(tensor, PinnedTensor)):
            self.wait("copy from ordinary memory")
        return tensor.as_subclass(torch.Tensor)

    def _to_host(self, tensor: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
        copied = tensor.as_subclass(torch.Tensor).clone()
        if not non_blocking:
            self.wait("copy to the host")
            return copied
        arriving = torch.empty_like(copied)
        spoil(arriving)
        self.copies.append((arriving, copied))
        return arriving


class _Event:
    def __init__(self, gpu: GpuStandIn) -> None:
        self._gpu = gpu
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def record(self) -> None:
        self._copies, self._gpu.copies = self._gpu.copies, []

    def synchronize(self) -> None:
        with torch.inference_mode():
            for target, source in self._copies:
                target.copy_(source)


class _Stream:
    def __init__(self, device: torch.device | None = None) -> None:
        pass

    def wait_stream(self, other: _Stream) -> None:
        pass

    def synchronize(self) -> None:
        pass


def _vmap(vmap: Any, func: Any, *dims: Any, **options: Any) -> Callable[..., Any]:
    """What torch hands to the function within is of no device that one could ask for; what comes out is."""
    vectorized = vmap(func, *dims, **options)

    def call(*args: Any) -> Any:
        if not any(map(is_on_device, tensors_in(args))):
            return vectorized(*args)
        plain = (arg.as_subclass(torch.Tensor) if isinstance(arg, torch.Tensor) else arg for arg in args)
        return on_device(vectorized(*plain))

    return call


@contextmanager
def gpu_stand_in(memory_bytes: int = 2**33) -> Iterator[GpuStandIn]:
    """`torch.cuda` is the stand-in inside: one device of compute capability 9.0."""
    gpu = GpuStandIn()
    replaced: dict[str, Any] = {
        "is_available": lambda: True,
        "Stream": _Stream,
        "Event": lambda: _Event(gpu),
        "CUDAGraph": lambda: Graph(gpu),
        "current_stream": _Stream,
        "stream": lambda stream: nullcontext(),
        "graph_pool_handle": lambda: (0, 0),
        "synchronize": lambda device=None: gpu.wait("synchronize"),
        "empty_cache": gpu.empty_cache,
        "current_device": lambda: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "memory_reserved": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 2**20,
        "mem_get_info": lambda device=None: (memory_bytes, memory_bytes),
        "get_device_capability": lambda device=None: (9, 0),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in replaced.items():
            patch.setattr(torch.cuda, name, stand_in)
        in_use = gpu.pools_in_use
        patch.setattr(torch._C, "_cuda_endAllocateToPool", lambda index, pool: in_use.remove(pool), raising=False)
        patch.setattr(torch._C, "_cuda_releasePool", lambda index, pool: None, raising=False)
        patch.setattr(torch, "vmap", partial(_vmap, torch.vmap))
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone().as_subclass(PinnedTensor))
        patch.setattr(engine_device, "_triton_problem", lambda: None)
        patch.setattr(
            GridExecutor, "__call__", lambda executor, *args, **kwargs: gpu.launch_kernel(executor, args, kwargs)
        )
        capture_stream.cache_clear()
        with quicker_interpreter(), gpu:
            yield gpu
        capture_stream.cache_clear()
