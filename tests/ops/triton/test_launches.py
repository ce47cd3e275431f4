"""Launches whose specialisation must not depend on the number of rows: a kernel is compiled anew for each."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from bulkrun.ops.triton import draw_tokens, token_logprobs


class Recorder:
    """A kernel that only remembers which of its pointers are not aligned to 16 bytes."""

    def __init__(self) -> None:
        self.unaligned: list[int] = []

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._launch

    def _launch(self, *arguments: Any, **options: Any) -> None:
        pointers = [argument.data_ptr() for argument in arguments if isinstance(argument, torch.Tensor)]
        self.unaligned += [pointer for pointer in pointers if pointer % 16]


@pytest.mark.parametrize("num_seqs", [1, 2, 3])
@pytest.mark.parametrize(
    ("module", "kernel", "arguments"),
    [
        (draw_tokens, "_best_of_tile_kernel", lambda rows, ids: (rows, torch.ones(len(ids)), ids, ids)),
        (token_logprobs, "_tile_kernel", lambda rows, ids: (rows, ids, 3)),
    ],
    ids=["draw_tokens", "token_logprobs"],
)
def test_pointers_are_aligned_for_any_number_of_rows(
    module: ModuleType, kernel: str, arguments: Any, num_seqs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    for name in [kernel, kernel.replace("tile", "row")]:
        monkeypatch.setattr(module, name, recorder)
    ids_S = torch.zeros(num_seqs, dtype=torch.int64)
    op = getattr(module, module.__name__.rsplit(".")[-1])
    op(*arguments(torch.zeros(num_seqs, 3 * 4096), ids_S))
    assert not recorder.unaligned
