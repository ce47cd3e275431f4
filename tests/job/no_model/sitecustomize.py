"""What Python runs at its start where this folder is on PYTHONPATH (`tests/job/without_model.py`): in the place of the
module that loads models, one that gives the tests' engine without one. So `bulkrun` and its workers are whole, but
nothing imports torch, which is most of a worker's start."""

from __future__ import annotations

import os
import sys
import time
from types import ModuleType
from typing import Any


class LLMEngine:
    """As far as `bulkrun.launch.engine` uses it."""

    @staticmethod
    def from_model_dir(model_dir: object, *, max_num_seqs: int = 4, **others: object) -> Any:
        from tests.job.fake_engine import FakeEngine

        time.sleep(float(os.environ["BULKRUN_TEST_LOAD_S"]))
        return FakeEngine(max_num_seqs, step_s=float(os.environ["BULKRUN_TEST_STEP_S"]))


module = ModuleType("bulkrun.engine.llm_engine")
module.__dict__["LLMEngine"] = LLMEngine
sys.modules[module.__name__] = module
