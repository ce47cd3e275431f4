"""Whether CUDA has an op of torch for the dtypes it is called with, by torch's own word: its tests' list of all ops.

A stand-in for a GPU computes on the host, where more ops exist for more dtypes. So each op it is asked for is looked up
in `op_db`, which torch's tests hold against real devices, dtype by dtype. It stands for float16 and bfloat16 too where
it computes in float32, for a stand-in knows no bf16.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache, reduce
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.stand_in_tensors import tensors_in

# In a process of its own: the import changes switches of torch. It wants `expecttest` for a class to derive from, and
# asks what the GPU can do, whose answer is taken to be: all that Hopper can.
_LIST_OPS = """
import json, re, sys, types, unittest
sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase)
from torch.testing._internal import common_cuda
for name in vars(common_cuda):
    if re.fullmatch(r"SM\\d+OrLater", name):
        setattr(common_cuda, name, True)
from torch.testing._internal.common_methods_invocations import op_db
own = [op for op in op_db if op.variant_test_name != "with_dtype"]  # which converts first
print(json.dumps([(op.name, op.aten_name, sorted(map(str, op.supported_dtypes("cuda")))) for op in own]))
"""

# What the list lacks because it is an op's other name.
_SAME_AS = {
    "index": "__getitem__",
    "_local_scalar_dense": "item",
    "__lshift__": "bitwise_left_shift",
    "__rshift__": "bitwise_right_shift",
    "zero": "fill",
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
}
# What exists for every dtype, fp8 too, which the list never names: no number is looked at, or each dtype is copied
# to each other one (aten/src/ATen/native/cuda/Copy.cu, FillKernel.cu).
_FOR_ALL = {"empty", "empty_strided", "empty_like", "new_empty", "_unsafe_view", "lift_fresh", "detach"}
_FOR_ALL |= {"_to_copy", "copy", "clone", "to", "split", "zeros", "zeros_like", "fill"}
# CUDA sums these as int64, into which the op turns them; the list leaves them out.
_ALSO = {("cumsum", torch.bool)}
_HALF = (torch.bfloat16, torch.float16)


class CudaDtypes(TorchDispatchMode):
    """Within, an op that CUDA has not for the dtypes at hand fails."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, _name(func)
        if func.is_view or name in _FOR_ALL:
            return func(*args, **kwargs)
        if name not in dtypes_by_op():
            with self:
                result = func.decompose(*args, **kwargs)
            assert result is not NotImplemented, f"torch's tests do not list {name}: what does CUDA have of it?"
            return result
        result = func(*args, **kwargs)
        subject = _subject(func, tensors_in((args, kwargs)) or tensors_in(result))
        assert not (lacking := missing(name, subject)), f"CUDA has no {name} of {lacking}"
        return result


def missing(op: str, dtype: torch.dtype) -> list[torch.dtype]:
    """For which dtypes CUDA lacks an op that is asked for in one."""
    wanted = (dtype, *_HALF) if dtype == torch.float32 else (dtype,)
    return [one for one in wanted if one not in dtypes_by_op()[op] and (op, one) not in _ALSO]


@cache
def dtypes_by_op() -> Mapping[str, frozenset[torch.dtype]]:
    """Which dtypes CUDA has an op for, by its name in ATen, in any of its variants: complex numbers have their own."""
    listed = subprocess.run([sys.executable, "-c", _LIST_OPS], capture_output=True, text=True, check=True).stdout
    found: dict[str, frozenset[torch.dtype]] = {}
    for name, aten_name, dtypes in json.loads(listed):
        own = frozenset(getattr(torch, dtype.removeprefix("torch.")) for dtype in dtypes)
        for key in {name.removeprefix("nn.functional."), aten_name}:
            found[key] = found.get(key, own) | own
    return found | {other: found[name] for other, name in _SAME_AS.items()}


def _name(func: Any) -> str:
    """Without the underscore of what is done in place: that is the same kernel."""
    name: str = func._schema.name.split("::")[1]
    return name if name.startswith("__") else name.rstrip("_")


def _subject(func: Any, tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """The dtype that a kernel is chosen by: the first, or of an elementwise op the one its inputs are turned into."""
    dtypes = [tensor.dtype for tensor in tensors]
    if torch.Tag.pointwise not in func.tags:
        return dtypes[0]
    numbers = dtypes[1:] if _name(func) == "where" else dtypes
    return reduce(torch.promote_types, numbers)
