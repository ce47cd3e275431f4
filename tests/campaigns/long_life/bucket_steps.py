"""Steps of a life with its results in a bucket: what was deleted there, and what brings it back."""

from __future__ import annotations

from functools import partial

from bulkrun.job.store.bucket_owner import OWNER
from tests.campaigns.long_life.steps import Step, Steps


def bring(steps: Steps) -> Step:
    """`worker` brings into the bucket what it lacks."""
    if steps.life.delivered is None or not steps.life.seen.finished:
        return steps.submit()
    return steps.left_alone(Step("bring", "", steps.command().bring, death=steps.death(), uploads=True))


def objects_lost(steps: Steps) -> Step:
    """Somebody deletes objects from the bucket."""
    if steps.life.delivered is None:
        return steps.submit()
    there = sorted(steps.life.delivered.bucket.objects().keys() - ({OWNER} if steps.rng.random() < 0.9 else set()))
    names = steps.rng.sample(there, min(len(there), steps.rng.choice([1, 1, 2, 9])))
    steps.life.delivered.lose(names)
    steps.life.tally["objects lost"] += len(names)
    step = steps.rng.choice([partial(bring, steps), steps.submit, steps.retry, steps.compact])()
    step.said = f"without {names} {step.said}"
    return step
