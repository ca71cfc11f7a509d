"""The linear algebra of the model, against definitions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_select.times.least_squares import cholesky, inverse_diagonal, non_negative_least_squares, solve

ENTRIES = st.floats(-10, 10).map(lambda value: round(value, 3))


@st.composite
def positive_definite(draw: st.DrawFn) -> list[list[float]]:
    size = draw(st.integers(1, 6))
    rows = [[draw(ENTRIES) for _ in range(size)] for _ in range(size)]
    return [[sum(rows[i][k] * rows[j][k] for k in range(size)) + (i == j) for j in range(size)] for i in range(size)]


@given(positive_definite(), st.data())
def test_a_solution_solves(matrix: list[list[float]], data: st.DataObject) -> None:
    right = [data.draw(ENTRIES) for _ in matrix]
    found = solve(cholesky(matrix), right)
    again = [sum(a * x for a, x in zip(row, found, strict=True)) for row in matrix]
    assert again == pytest.approx(right, abs=1e-6)


@given(positive_definite())
def test_the_diagonal_of_the_inverse(matrix: list[list[float]]) -> None:
    factor = cholesky(matrix)
    units = [[float(i == j) for j in range(len(matrix))] for i in range(len(matrix))]
    assert inverse_diagonal(factor) == pytest.approx([solve(factor, unit)[i] for i, unit in enumerate(units)])


@given(st.integers(1, 5), st.integers(1, 12), st.data())
def test_no_step_improves_a_non_negative_solution(columns: int, height: int, data: st.DataObject) -> None:
    positive = st.floats(0, 10).map(lambda value: round(value, 3))
    rows = [[data.draw(positive) for _ in range(columns)] for _ in range(height)]
    right = [data.draw(ENTRIES) for _ in range(height)]
    found = non_negative_least_squares(rows, right)
    assert min(found) >= 0
    left = [sum(a * x for a, x in zip(row, found, strict=True)) - b for row, b in zip(rows, right, strict=True)]
    scale = 1e-3 * (1 + max(map(abs, right))) * (1 + max(max(row) for row in rows)) * height
    for i in range(columns):
        slope = sum(row[i] * each for row, each in zip(rows, left, strict=True))
        assert slope >= -scale
        assert found[i] == 0 or abs(slope) <= scale


def test_what_is_no_covariance_is_refused() -> None:
    with pytest.raises(ValueError, match=r"math domain|expected a nonnegative"):
        cholesky([[1.0, 2.0], [2.0, 1.0]])
