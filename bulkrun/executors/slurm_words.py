"""Slurm's words for why a job waits and how it ended, and what whoever submitted it can do about it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from bulkrun.errors import Interrupted

# Of a job in the queue: its reason or its state. Those that time alone settles (Resources, Priority) need no words.
_WAITING = {
    r"JobHeldUser|JobHoldMaxRequeue|requeued.held": "it is held; `scontrol release {job}` lets it go",
    r"JobHeldAdmin": "it is held by an administrator, or by Slurm after a start that failed; ask them to release it",
    r"DependencyNeverSatisfied": "it never starts, for what it depends on failed: bulkrun cancel, then submit again",
    r"PartitionTimeLimit|WallDuration": (
        "slurm.time is longer than that allows: bulkrun cancel, then submit with a shorter one"
    ),
    r"PerJob|PerNode|PartitionNodeLimit|PartitionConfig|MaxMemPerLimit|QOSMin|Constraints": (
        "it asks for what it may not have there: bulkrun cancel, then submit with other keys under slurm:"
    ),
    # RunMinutes are those that running jobs may still take: they come back as these end
    r"(?<!Run)Minutes|GrpWall|TimeLimit": (
        "the account's time is used up: another slurm.account or slurm.qos, or ask for more"
    ),
    r"ReservationDeleted|ReservationInvalid": (
        "the reservation that it asks for is no more: bulkrun cancel, then submit without it (slurm.extra)"
    ),
    r"Invalid|NotAllowed": "that account or qos may not be used there: bulkrun cancel, then submit with another one",
    r"NodeNotAvail|NodeDown|PartitionDown|PartitionInactive|are DOWN, DRAINED": (
        "its nodes or its partition are not there, or reserved; `sinfo --list-reasons` says why"
    ),
    r"SUSPENDED|STOPPED": "it goes on when Slurm or an administrator resumes it",
    r"REQUEUE_HOLD|SPECIAL_EXIT": "it is held; `scontrol release {job}` lets it go",
}
_ENDED = {
    "TIMEOUT": "it was ended at its time limit; a longer slurm.time or slurm.warn leaves it time to save",
    "OUT_OF_MEMORY": "raise slurm.mem, or lower engine.max_num_seqs",
    "NODE_FAIL": "its node failed",
    "BOOT_FAIL": "its node did not start",
    "DEADLINE": "the deadline that it was given passed",
    "PREEMPTED": "a job with a higher priority took its place",
    "CANCELLED": "bulkrun cancel, scancel or an administrator took it out of the queue",
    "REVOKED": "a sibling of it runs on another cluster",
    "FAILED": "its script ended with an error",
    "EXIT 75": "it saved what it had, and Slurm did not start it again",
}


def advice(job_id: str, state: str, reason: str) -> str | None:
    """What to do about a job of the queue that waits for more than its turn; None where there is nothing to do."""
    for pattern, words in _WAITING.items():
        if re.search(pattern, reason if state == "PENDING" else state):
            return words.format(job=job_id.split("_")[0])
    return None


def ending(states: Sequence[tuple[str, str]]) -> str | None:
    """How a job's elements ended, those that did not do so well; None where there are none.

    `states`: of each element, with its exit status where that is known.
    """
    saved = ("FAILED", str(Interrupted.exit_code))  # to Slurm an exit status is a failure or none
    ended = Counter("EXIT 75" if one == saved else one[0] for one in states)
    many = len(states) > 1
    parts = [
        f"{f'{count} of {len(states)} ' if many else ''}{state}, {_ENDED[state]}"
        for state, count in ended.items()
        if state in _ENDED
    ]
    return "; ".join(parts) or None
