"""The geometry of the report's figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steps import figures
from trainer.records import LossPoint


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 s"), (0.00002, "0 s"), (0.0412, "41 ms"), (0.9999, "1.00 s"), (3.254, "3.25 s"), (59.94, "59.9 s"), (59.99, "1 min"),
     (125, "2 min 5 s"), (3599.7, "1 h"), (3725, "1 h 2 min"), (90000, "25 h")],
)  # fmt: skip
def test_seconds(value: float, text: str) -> None:
    assert figures.seconds(value) == text


@pytest.mark.parametrize(("value", "text"), [(None, "–"), (0.5, "50.0%"), (0.99999, "> 99.9%"), (1.0, "100.0%"), (0.0, "0.0%")])
def test_percent(value: float | None, text: str) -> None:
    assert figures.percent(value) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (48 * 2**30, "48.0 GiB"), (2**40, "1.0 TiB")])
def test_size(value: int, text: str) -> None:
    assert figures.size(value) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (12, "12"), (1234.5, "1,234"), (2e6, "2,000,000"), (7.268, "7.27"), (353.9, "354")])
def test_number(value: float, text: str) -> None:
    assert figures.number(value) == text


@given(low=st.floats(-1e6, 1e6), width=st.floats(1e-3, 1e7), about=st.integers(2, 8))
def test_round_values_are_inside_and_about_as_many(low: float, width: float, about: int) -> None:
    values = figures.round_values(low, low + width, about)
    assert all(low - width * 1e-6 <= value <= low + width * (1 + 1e-6) for value in values)
    assert len(values) <= about + 2 and values == sorted(set(values))


@given(wall=st.floats(0.01, 3e6))
def test_round_times_are_few_and_inside(wall: float) -> None:
    times = figures.round_times(wall, 6)
    assert times[0] == 0 and times[-1] <= wall * (1 + 1e-6) and 1 <= len(times) <= 10


@given(values=st.lists(st.floats(0, 1e5), max_size=8))
def test_stacked_parts_lie_side_by_side_and_fill_the_bar(values: list[float]) -> None:
    bars = figures.stacked([("x", "x", value) for value in values])
    at = 0.0
    for bar in bars:
        assert bar.left == pytest.approx(at, abs=1e-6)
        at += bar.width
    assert at == pytest.approx(100.0 if any(values) else 0.0)


def test_a_path_of_one_point_is_a_dot() -> None:
    assert figures.path([(0.5, 0.25)]) == "M500.0 750.0h0"
    assert figures.path([(0, 0), (1, 1)]) == "M0.0 1000.0L1000.0 0.0"


def test_the_line_of_steps_breaks_at_interruptions_and_changes_where_it_was_rolled_back() -> None:
    points = [LossPoint(step=s, loss=1.0, time=t, replay=r) for s, t, r in
              ((1, 1.0, False), (2, 2.0, False), (3, 3.0, True), (3, 9.0, False), (4, 10.0, False), (5, 20.0, False))]  # fmt: skip
    runs = figures.rising(points, [3.5, 12.0])
    # The rolled back step hangs on to the one before it; the third run begins after the second interruption.
    assert [[(p.step, p.replay) for p in run] for run in runs] == [
        [(1, False), (2, False)],
        [(2, True), (3, True)],
        [(3, False), (4, False)],
        [(5, False)],
    ]


def test_thinned_keeps_the_ends() -> None:
    run = [LossPoint(step=s, loss=1.0, time=float(s)) for s in range(1, 10_001)]
    (thin,) = figures.thinned([run])
    assert len(thin) < 2 * figures.MOST_POINTS and (thin[0].step, thin[-1].step) == (1, 10_000)
