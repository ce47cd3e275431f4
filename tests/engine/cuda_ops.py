"""What CUDA does with an op of torch: whether it has it for the dtypes at hand, and whether the host waits for it.

The first is torch's own word, its tests' list of all ops. A stand-in for a GPU computes on the host, where more ops
exist for more dtypes. So each op it is asked for is looked up in `op_db`, which torch's tests hold against real
devices, dtype by dtype. Float32 stands for float16 and bfloat16 too, as a stand-in knows no bf16.
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
_FOR_ALL = {"empty", "empty_like", "new_empty", "detach", "lift_fresh", "_unsafe_view", "zeros", "copy", "_to_copy"}
# Of the float dtypes that experts come in; what it asks of operands: tests/ops/triton/test_operands.py. It waits but in
# bf16 (GroupedMMUtils.h), which is not computed here.
_FOR_ALL |= {"_grouped_mm"}
# CUDA sums these as int64, into which the op turns them; the list leaves them out.
_ALSO = {("cumsum", torch.bool)}
_HALF = (torch.bfloat16, torch.float16)
# What is made of other ops, but of ones that a CPU alone has.
_WHOLE = {"scaled_dot_product_attention"}
# The value or the size of what these give is on the device. (repeat_interleave waits unless it is told a size.)
_WAITING = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "bincount", "_grouped_mm"}
_WAITING |= {"_unique2", "unique_dim", "unique_consecutive"}


class CudaOps(TorchDispatchMode):
    """Within, an op that CUDA has not for the dtypes at hand fails; `waits` names those that the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, _name(func)
        if name not in _WHOLE:
            with self:
                made_of_others = func.decompose(*args, **kwargs)
            if made_of_others is not NotImplemented:
                return made_of_others
        if name in _WAITING or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.waits.append(name)
        result = func(*args, **kwargs)
        if not (func.is_view or name in _FOR_ALL):
            _check(name, _subject(func, tensors_in((args, kwargs)) or tensors_in(result)))
        return result


def _check(op: str, dtype: torch.dtype) -> None:
    assert op in dtypes_by_op(), f"torch's tests do not list {op}: what does CUDA have of it?"
    assert not (lacking := missing(op, dtype)), f"CUDA has no {op} of {lacking}"


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
