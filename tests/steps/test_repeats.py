"""Repetitions of an arm: intervals that the textbook gives, and none where there are too few pairs."""

from __future__ import annotations

from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steps.repeats import FEWEST, ratio_interval, repetition, spread

VALUES = st.lists(st.floats(0.01, 1.0), min_size=FEWEST, max_size=40)


def test_a_textbook_interval() -> None:
    """Log-ratios 1, 2, 3, 4, 5: mean 3, standard deviation 1.5811, t of 4 degrees 2.776."""
    ratio, interval = ratio_interval([exp(n) for n in (1, 2, 3, 4, 5)], [1.0] * 5)
    assert ratio == pytest.approx(exp(3))
    assert interval is not None
    assert [log(end) for end in interval] == pytest.approx([3 - 1.963, 3 + 1.963], abs=1e-3)


def test_too_few_pairs_give_a_point() -> None:
    assert ratio_interval([2.0, 2.0], [1.0, 1.0]) == (pytest.approx(2.0), None)


@given(VALUES)
def test_an_arm_against_itself_is_one(values: list[float]) -> None:
    ratio, interval = ratio_interval(values, values)
    assert (ratio, interval) == (1.0, (1.0, 1.0))


@given(VALUES, st.floats(0.1, 10.0))
def test_what_both_arms_share_falls_out(values: list[float], factor: float) -> None:
    """A machine that drifts slows both arms of a pair."""
    ratio, interval = ratio_interval([value * factor for value in values], values)
    assert interval is not None
    assert (ratio, *interval) == pytest.approx((factor,) * 3)


def test_values_without_partners_are_refused() -> None:
    with pytest.raises(ValueError, match="no pairs"):
        ratio_interval([1.0], [])


def test_the_spread() -> None:
    assert spread([0.2, 0.25, 0.22]) == pytest.approx(0.25)
    assert spread([0.3, 0.3]) == 0.0


def test_the_name_says_which_repetition_it_is() -> None:
    assert [repetition(run) for run in ("sets-best", "sets-best-2", "sets-best-12", "sets-sync-2-nodes", "20")] == [1, 2, 12, 1, 1]
