"""Where an engine runs, and whether it can: a GPU that the kernels were made for, and what Triton needs to launch them.

Found out before a model is loaded, so that what is missing is told by name and not by the first kernel.
"""

from __future__ import annotations

import errno
from functools import cache

import torch

from bulkrun.errors import UsageError, described
from bulkrun.ops.dispatch import has_triton

MIN_CAPABILITY = (8, 0)  # Ampere: older GPUs have no bfloat16, less shared memory, and Triton does not support them
_ON_CPU = "engine.device: cpu runs without a GPU"
_COMPILER = (
    "It compiles a small C file on each machine: install gcc and Python's headers (Debian: gcc python3-dev), or name a "
    "compiler in CC"
)
_CACHE = "It keeps what it compiles in a folder: name one that can be written in TRITON_CACHE_DIR"
_CANNOT_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)


def resolve_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one; nothing of it is touched. Raises UsageError where torch sees none."""
    usable = torch.cuda.is_available()
    if name == "cuda" and not usable:
        built = "is built without CUDA" if torch.version.cuda is None and torch.version.hip is None else "sees no GPU"
        raise UsageError(
            f"engine.device: cuda, but torch {torch.__version__} {built} here; `bulkrun doctor` shows what there is, "
            f"{_ON_CPU}"
        )
    return torch.device("cuda" if usable and name == "auto" else "cpu" if name == "auto" else name)


def refuse_gpu_without_kernels() -> None:
    """Raise UsageError where the current GPU is too old, or Triton cannot build what launches its kernels.

    The process has a CUDA context afterwards.
    """
    capability = torch.cuda.get_device_capability()
    if torch.version.hip is None and capability < MIN_CAPABILITY:
        there, needed = (".".join(map(str, c)) for c in (capability, MIN_CAPABILITY))
        raise UsageError(
            f"{torch.cuda.get_device_name()} has compute capability {there}, and bulkrun's kernels need {needed} or "
            f"above (Ampere and later); {_ON_CPU}"
        )
    if has_triton() and (problem := _triton_problem()) is not None:
        raise UsageError(f"Triton cannot launch kernels here: {problem}; {_ON_CPU}")


@cache
def _triton_problem() -> str | None:
    """Why Triton's driver does not load, in a line, and what to do; None: it does. Takes a second where it compiles."""
    from triton.runtime import driver

    try:
        driver.active.get_current_target()
    except Exception as error:  # no compiler, no headers, no libcuda: each Triton raises something else
        is_cache = isinstance(error, OSError) and error.errno in _CANNOT_WRITE
        return f"{described(error)}. {_CACHE if is_cache else _COMPILER}"
    return None
