"""Which implementation an op takes, and that a twin takes the same arguments."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import bulkrun.ops
from bulkrun import ops
from bulkrun.ops import dispatch
from bulkrun.ops.experts import expert_pairs
from bulkrun.ops.matmul import four_bit_weight

PACKAGE = Path(bulkrun.ops.__file__).parent
KINDS = ("triton", "cpu")
# a call or two of torch, or for CPUs
NO_TRITON = {"append_tokens", "greedy_tokens", "int8_linear"}
WITHIN_OPS = [expert_pairs.clamped_swiglu, four_bit_weight.unpack_codes]  # which no caller imports
DISPATCHED = [*(op for op in vars(ops).values() if hasattr(op, "__wrapped__")), *WITHIN_OPS]


def twin_files() -> list[tuple[Callable[..., object], Path]]:
    """Each op with a file of each kind of twins; nearly every op has a Triton one."""
    files = [(op, PACKAGE / kind / f"{op.__module__.rsplit('.')[-1]}.py") for op in DISPATCHED for kind in KINDS]
    return [
        (op, path)
        for op, path in files
        if (op.__name__ not in NO_TRITON if path.parent.name == "triton" else path.is_file())
    ]


@pytest.mark.parametrize(("op", "path"), twin_files(), ids=lambda it: getattr(it, "__name__", "") or it.parent.name)
def test_every_twin_has_the_signature_of_its_reference(op, path: Path) -> None:  # type: ignore[no-untyped-def]
    twins = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    twin = next(node for node in twins if node.name == op.__name__)
    reference = ast.parse(inspect.getsource(op.__wrapped__)).body[0]
    assert isinstance(reference, ast.FunctionDef) and reference.returns and twin.returns
    assert ast.unparse(twin.args) == ast.unparse(reference.args)
    assert ast.unparse(twin.returns) == ast.unparse(reference.returns)


def test_there_are_twins() -> None:
    assert {"paged_attention", "norm_rotary_store", "add_rms_norm", "silu_mul"} <= {op.__name__ for op in DISPATCHED}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Module and name of every twin that an op goes to; twins return their first argument."""
    found: list[tuple[str, str]] = []

    def twin(module: str, name: str) -> Callable[..., object]:
        found.append((module, name))
        return lambda *args, **kwargs: args[0]

    monkeypatch.setattr(dispatch, "twin", twin)
    return found


def test_without_compiled_ops_tensors_on_the_cpu_take_the_reference_and_others_triton(
    taken: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "uses_compiled", lambda tensor: False)
    x = torch.randn(2, 4)
    assert torch.equal(ops.silu_mul(x), ops.silu_mul.__wrapped__(x)) and not taken
    monkeypatch.setattr(dispatch, "uses_triton", lambda tensor: tensor is x)
    assert ops.silu_mul(x) is x
    assert taken == [("bulkrun.ops.triton.silu_mul", "silu_mul")]


def test_tensors_on_the_cpu_take_the_compiled_twin_where_there_is_one(
    taken: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "uses_compiled", lambda tensor: tensor.is_cpu)
    x = torch.randn(2, 4)
    assert ops.silu_mul(x) is x
    assert taken == [("bulkrun.ops.cpu.silu_mul", "silu_mul")]
    ops.quantize_rows(x)
    assert len(taken) == 1


def test_experts_in_fp8_take_the_grouped_product_of_a_gpu(
    taken: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    x_TE, ids_Tk = torch.randn(2, 8), torch.zeros(2, 1, dtype=torch.int64)
    monkeypatch.setattr(dispatch, "uses_triton", lambda tensor: tensor is x_TE)
    weight = ops.Fp8Weight(torch.zeros(3, 8, 8).to(torch.float8_e4m3fn), torch.ones(3, 8, 1))
    assert ops.fused_experts(x_TE, weight, weight, torch.ones(2, 1), ids_Tk) is x_TE
    assert taken == [("bulkrun.ops.triton.fp8_experts", "fp8_experts")]


def test_importing_and_calling_ops_on_a_cpu_needs_no_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from bulkrun import ops; ops.silu_mul(torch.ones(1, 2))\n"
        "assert not any(name.startswith('bulkrun.ops.triton') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
