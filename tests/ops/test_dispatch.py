"""Which implementation an op takes, and that a twin takes the same arguments."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bulkrun.ops
from bulkrun import ops
from bulkrun.ops import dispatch

PACKAGE = Path(bulkrun.ops.__file__).parent
DISPATCHED = [op for op in vars(ops).values() if hasattr(op, "__wrapped__")]


@pytest.mark.parametrize("op", DISPATCHED, ids=lambda op: op.__name__)
def test_every_twin_has_the_signature_of_its_reference(op) -> None:  # type: ignore[no-untyped-def]
    path = PACKAGE / "triton" / f"{op.__module__.rsplit('.')[-1]}.py"
    twins = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    twin = next(node for node in twins if node.name == op.__name__)
    reference = ast.parse(inspect.getsource(op.__wrapped__)).body[0]
    assert isinstance(reference, ast.FunctionDef) and reference.returns and twin.returns
    assert ast.unparse(twin.args) == ast.unparse(reference.args)
    assert ast.unparse(twin.returns) == ast.unparse(reference.returns)


def test_there_are_twins() -> None:
    assert {"paged_attention", "norm_rotary_store", "add_rms_norm", "silu_mul"} <= {op.__name__ for op in DISPATCHED}


def test_tensors_on_the_cpu_take_the_reference_and_others_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    class Twins:
        @staticmethod
        def silu_mul(x: torch.Tensor) -> torch.Tensor:
            taken.append("triton")
            return x

    monkeypatch.setattr(dispatch, "import_module", lambda name: {"bulkrun.ops.triton.silu_mul": Twins}[name])
    x = torch.randn(2, 4)
    assert torch.equal(ops.silu_mul(x), ops.silu_mul.__wrapped__(x)) and not taken
    monkeypatch.setattr(dispatch, "uses_triton", lambda tensor: tensor is x)
    ops.silu_mul(x)
    assert taken == ["triton"]


def test_importing_and_calling_ops_on_a_cpu_needs_no_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from bulkrun import ops; ops.silu_mul(torch.ones(1, 2))\n"
        "assert not any(name.startswith('bulkrun.ops.triton') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
