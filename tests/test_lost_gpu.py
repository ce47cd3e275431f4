"""That a broken GPU context takes one test along; with a stand-in for torch, which only can break."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_CONFTEST = """
import sys
from types import SimpleNamespace

class Cuda:
    is_broken = False
    def is_initialized(self):
        return True
    def synchronize(self):
        if self.is_broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

sys.modules["torch"] = SimpleNamespace(cuda=Cuda())
pytest_plugins = ["tests.lost_gpu"]
"""
_TESTS = """
import sys
import pytest

@pytest.mark.parametrize("number", range(12))
def test_one(number):
    cuda = sys.modules["torch"].cuda
    cuda.is_broken |= number == 3
    cuda.synchronize()
"""


def test_a_broken_context_fails_the_test_that_broke_it_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    (tmp_path / "test_them.py").write_text(_TESTS)
    command = [sys.executable, "-m", "pytest", "-v", "-n", "2", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    env = {key: value for key, value in env.items() if not key.startswith("PYTEST_")}
    done = subprocess.run([*command, str(tmp_path)], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert failed == 2 * ["test_them.py::test_one[3]"], done.stdout + done.stderr
    assert "worker" in done.stdout and "2 failed, 11 passed" in done.stdout
