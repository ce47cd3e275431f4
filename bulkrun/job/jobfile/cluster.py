"""The sections `slurm` and `ray`: what to ask of a cluster. Names are the cluster's own."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, model_validator

from bulkrun.job.jobfile.section import Section

_LINE = Field(pattern=r"^[^\r\n]+$")
_NAME = r"^[^\r\n\"\\]+$"  # goes between quotes into a line of the script
_TIME = r"^(-1|UNLIMITED|unlimited|INFINITE|infinite|([0-9]+-)?[0-9]+(:[0-9]+){0,2})$"
_GPUS = r"^([A-Za-z][\w.-]*:)?[0-9]+(,([A-Za-z][\w.-]*:)?[0-9]+)*$"


class SlurmSpec(Section):
    """How `submit --executor slurm` asks for machines: an array of identical workers. Names are sbatch's."""

    array: int | None = Field(None, ge=1, le=4096, description="Workers (array elements). Default: run.workers.")
    partition: str | None = Field(None, pattern=_NAME, description="sbatch --partition. Default: Slurm's.")
    account: str | None = Field(None, pattern=_NAME, description="sbatch --account. Default: Slurm's.")
    qos: str | None = Field(None, pattern=_NAME, description="sbatch --qos. Default: Slurm's.")
    time: str | None = Field(
        None, pattern=_TIME, description='sbatch --time, in quotes: "04:00:00", "1-12:00:00". Default: Slurm\'s.'
    )
    gpus: Annotated[int, Field(ge=0)] | Annotated[str, Field(pattern=_GPUS)] | None = Field(
        None, description="GPUs per element (1), or type and count (a100:1). Default: none requested."
    )
    cpus: int | None = Field(None, ge=1, description="CPUs per element. Default: Slurm's.")
    mem: str | None = Field(None, pattern=r"^[0-9]+[KMGT]?$", description="Memory per node: 64G. Default: Slurm's.")
    constraint: str | None = Field(None, pattern=_NAME, description="sbatch --constraint. Default: none.")
    warn: int = Field(
        120, ge=10, le=3600, description="Seconds before the time limit at which Slurm warns the worker (SIGUSR1)."
    )
    extra: list[Annotated[str, _LINE]] = Field([], description="More sbatch options, one per line: --exclude=node7.")
    setup: list[Annotated[str, _LINE]] = Field(
        [], description="Shell lines to run before the worker starts: module load cuda."
    )

    @model_validator(mode="after")
    def _time_to_work(self) -> SlurmSpec:
        limit_s = _seconds(self.time or "")
        if limit_s is not None and limit_s <= self.warn:
            raise ValueError(
                f'time: "{self.time}" is {limit_s} s, and a worker stops {self.warn} s (warn) before its end: '
                "no time is left to work in; allow more time, or set a smaller warn"
            )
        return self


def _seconds(time: str) -> int | None:
    """What a time means to sbatch: MIN, [H:]MIN:SEC or DAYS-H[:MIN[:SEC]]. None for no limit."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        return None
    days, *fields = match.groups()
    given = [int(field) for field in fields if field is not None]
    begins_with_hours = days is not None or len(given) == 3
    hours, minutes, seconds = [*given, 0, 0][:3] if begins_with_hours else [0, *given, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds or None


class RaySpec(Section):
    """How `submit --executor ray` places its workers: one Ray actor each (Ray Core, the extra `bulkrun[ray]`)."""

    address: str | None = Field(
        None,
        description="An existing cluster: auto, HOST:PORT or ray://HOST:10001. Default: RAY_ADDRESS, else a local one.",
    )
    gpus: float | None = Field(
        None,
        ge=0,
        description="GPUs per worker. Default: 1 if the cluster has any and engine.device is not cpu, else 0.",
    )
    cpus: float = Field(1, ge=0, description="CPUs per worker.")
