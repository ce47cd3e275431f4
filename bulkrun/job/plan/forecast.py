"""How long a job takes: what its plan says there is to do, at the speed that some of its rows ran at.

Time is taken for a sum of so much for each prompt token and so much for each generated one, fitted to slices of the
probe while the engine was full. Outputs that had not ended when the probe did tell how long they are at least: their
mean is that of Kaplan and Meier's estimator (Nonparametric Estimation from Incomplete Observations, 1958).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]
# However well the slices agree: a while is no better than that, and a run does more beside the model than its probe.
_LEAST_BELOW, _LEAST_ABOVE = 0.1, 0.2
_SIGMAS = 2.0  # of a range: about 19 in 20


class Slice(NamedTuple):
    """A while of a probe: seconds, prompt tokens computed and tokens generated in it."""

    seconds: float
    prompt_tokens: int
    output_tokens: int


class OutputLength(NamedTuple):
    """Tokens that an output has, whether it has ended, and most that it may have."""

    tokens: int
    has_ended: bool
    limit: int


class Range(NamedTuple):
    """A number that is not known exactly: most likely `likely`, between `low` and `high`."""

    likely: float
    low: float
    high: float

    def times(self, factor: float) -> Range:
        """Of so many things that are alike."""
        return Range(*(factor * number for number in self))


@dataclass(frozen=True)
class Forecast:
    """What a whole job comes to on the machine of its probe, by one worker: seconds without loading, output tokens."""

    seconds: Range
    output_tokens: Range


def forecast(
    slices: Sequence[Slice], outputs: Sequence[OutputLength], *, prompt_tokens: int, generations: int
) -> Forecast:
    """Of `generations` whose prompts have so many tokens to compute. `outputs` is empty where nothing is generated."""
    output_tokens = (mean_length(outputs) if outputs else Range(0, 0, 0)).times(generations)
    cost_2, covariance_22 = _costs(slices)
    likely, low, high = (np.array([prompt_tokens, number]) for number in output_tokens)
    seconds = float(likely @ cost_2)
    return Forecast(
        Range(
            seconds,
            max(0.0, min(float(low @ cost_2) - _error(low, covariance_22), seconds * (1 - _LEAST_BELOW))),
            max(float(high @ cost_2) + _error(high, covariance_22), seconds * (1 + _LEAST_ABOVE)),
        ),
        output_tokens,
    )


def mean_length(outputs: Sequence[OutputLength]) -> Range:
    """The mean length of outputs of which some have not ended.

    Beyond the longest one that was seen it is taken to end as often as before, at the earliest at once, and at the
    latest at its limit.
    """
    tokens = np.array([one.tokens for one in outputs])
    ended = np.array([one.has_ended for one in outputs])
    mean, survival, before = 0.0, 1.0, 0
    for length in np.unique(tokens):
        mean += survival * float(length - before)
        survival *= 1 - float((ended & (tokens == length)).sum()) / float((tokens >= length).sum())
        before = int(length)
    rest = max(0.0, float(np.mean([one.limit for one in outputs])) - before)
    error = _SIGMAS * float(tokens.std()) / sqrt(len(outputs))
    as_before = min(rest, float(tokens.sum()) / max(1, int(ended.sum())))
    return Range(mean + survival * as_before, max(0.0, mean - error), mean + survival * rest + error)


def _costs(slices: Sequence[Slice]) -> tuple[_Floats, _Floats]:
    """Seconds of a prompt token and of an output token, and their covariance; none is below 0."""
    seconds = np.array([one.seconds for one in slices])
    work = np.array([[one.prompt_tokens, one.output_tokens] for one in slices], dtype=np.float64)
    cost_2, covariance_22 = _least_squares(work, seconds)
    if (cost_2 >= 0).all():
        return cost_2, covariance_22
    cost_1, covariance_11 = _least_squares(work.sum(1, keepdims=True), seconds)  # as if all tokens cost the same
    return np.repeat(cost_1, 2), np.full((2, 2), covariance_11[0, 0])


def _least_squares(work: _Floats, seconds: _Floats) -> tuple[_Floats, _Floats]:
    cost = np.linalg.lstsq(work, seconds, rcond=None)[0]
    residual = seconds - work @ cost
    freedom = max(1, len(seconds) - work.shape[1])
    return np.asarray(cost), float(residual @ residual) / freedom * np.linalg.pinv(work.T @ work)


def _error(work_2: _Floats, covariance_22: _Floats) -> float:
    return _SIGMAS * sqrt(max(0.0, float(work_2 @ covariance_22 @ work_2)))
