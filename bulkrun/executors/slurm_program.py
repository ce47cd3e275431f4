"""Asking one of Slurm's programs."""

from __future__ import annotations

import subprocess

from bulkrun.errors import ExecutorError

PATIENCE_S = 60.0


class SlurmRefused(ExecutorError):
    """Slurm's program is not there, or ended with an error."""


def slurm(program: str, *arguments: str, patience_s: float = PATIENCE_S) -> str:
    """What the program prints. Raises SlurmRefused, and ExecutorError where no answer comes in time."""
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, errors="replace", timeout=patience_s, check=False
        )
    except FileNotFoundError:
        raise SlurmRefused(f"{program}: not found; is this a machine of a Slurm cluster?") from None
    except OSError as error:
        raise SlurmRefused(f"{program}: cannot be started: {error.strerror or error}") from None
    except subprocess.TimeoutExpired:
        raise ExecutorError(f"{program}: no answer in {patience_s:.0f} s; is its controller down?") from None
    if done.returncode != 0:
        raise SlurmRefused(f"{program}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout
