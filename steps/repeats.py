"""What repeating an arm says: how far it differs from itself, and how sure a difference between two arms is (pure).

Two arms are compared by the logarithm of the ratio of their values, repetition by repetition, so that what drifts during
a benchmark falls out. The 95% interval of its mean is Student's; below five repetitions there are points only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import exp, log, sqrt
from statistics import fmean, stdev

FEWEST = 5
T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""The 97.5% quantile of Student's distribution with 1 to 30 degrees of freedom."""
NUMBER = re.compile(r"-([1-9][0-9]*)$")


def repetition(run: str) -> int:
    """Which repetition of its arm a run is, by the end of its name (``workflows.arms.run_name``); the first bears no number."""
    number = NUMBER.search(run)
    return int(number[1]) if number else 1


def ratio_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, tuple[float, float] | None]:
    """The mean ratio of ``first`` to ``second``, pair by pair, and its 95% interval where there are enough pairs."""
    if len(first) != len(second) or not first:
        raise ValueError(f"{len(first)} and {len(second)} values make no pairs")
    logs = [log(a / b) for a, b in zip(first, second, strict=True)]
    middle = fmean(logs)
    if len(logs) < FEWEST:
        return exp(middle), None
    freedom = len(logs) - 1
    half = T_975[min(freedom, len(T_975)) - 1] * stdev(logs) / sqrt(len(logs))
    return exp(middle), (exp(middle - half), exp(middle + half))


def spread(values: Sequence[float]) -> float:
    """How far an arm is from itself: its largest value over its smallest, less one."""
    return max(values) / min(values) - 1
