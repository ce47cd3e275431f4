"""Asking one of Slurm's programs."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable

from bulkrun.errors import ExecutorError

PATIENCE_S = 60.0
# What a user sets for their own eyes: it hides jobs, or writes times in another way.
_HABITS = re.compile(r"SQUEUE_|SACCT_|SLURM_TIME_FORMAT$")
# Whose variables sbatch calls otherwise than SBATCH_ and the option.
_VARIABLES = {"array": "ARRAY_INX", "time": "TIMELIMIT", "mem": "MEM_PER_NODE", "requeue": "NO_REQUEUE"}


class SlurmRefused(ExecutorError):
    """Slurm's program is not there, or ended with an error."""


def slurm(program: str, *arguments: str, patience_s: float = PATIENCE_S, without: Iterable[str] = ()) -> str:
    """What the program prints, which hears of no habits of the user's, and of no variable of `without`.

    Raises SlurmRefused, and ExecutorError where no answer comes in time.
    """
    environment = {key: value for key, value in os.environ.items() if not (_HABITS.match(key) or key in without)}
    try:
        done = subprocess.run(
            [program, *arguments],
            capture_output=True, text=True, errors="replace", timeout=patience_s, check=False, env=environment,
        )  # fmt: skip
    except FileNotFoundError:
        raise SlurmRefused(f"{program}: not found; is this a machine of a Slurm cluster?") from None
    except OSError as error:
        raise SlurmRefused(f"{program}: cannot be started: {error.strerror or error}") from None
    except subprocess.TimeoutExpired:
        raise ExecutorError(f"{program}: no answer in {patience_s:.0f} s; is its controller down?") from None
    if done.returncode != 0:
        raise SlurmRefused(f"{program}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout


def overriding(script: str) -> set[str]:
    """The variables that sbatch would take before the options of a script, and the one that makes it wait."""
    options = re.findall(r"^#SBATCH --([a-z-]+)", script, re.MULTILINE)
    names = (_VARIABLES.get(option, option.upper().replace("-", "_")) for option in options)
    return {"SBATCH_WAIT", *(f"SBATCH_{name}" for name in names)}
