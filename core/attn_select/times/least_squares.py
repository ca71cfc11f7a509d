"""Small dense linear algebra in plain Python: non-negative least squares, and solving by Cholesky factors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

Matrix = list[list[float]]


def cholesky(matrix: Sequence[Sequence[float]]) -> Matrix:
    """Return the lower factor of a symmetric positive definite matrix, row ``i`` of length ``i + 1``.

    Raises:
        ValueError: the matrix is not positive definite.
    """
    rows: Matrix = []
    for i, given in enumerate(matrix):
        row: list[float] = []
        for j in range(i):
            row.append((given[j] - sum(map(mul, row, rows[j]))) / rows[j][j])
        row.append(math.sqrt(given[i] - sum(map(mul, row, row))))
        rows.append(row)
    return rows


def solve(factor: Matrix, right: Sequence[float]) -> list[float]:
    """Return ``x`` with ``L L^T x = right`` for a factor of ``cholesky``."""
    below: list[float] = []
    for row, value in zip(factor, right, strict=True):
        below.append((value - sum(map(mul, row, below))) / row[-1])
    for i in range(len(below) - 1, -1, -1):
        row = factor[i]
        below[i] /= row[i]
        for j in range(i):
            below[j] -= row[j] * below[i]
    return below


def inverse_diagonal(factor: Matrix) -> list[float]:
    """Return the diagonal of ``(L L^T)^-1``: the squared lengths of the columns of ``L^-1``."""
    size = len(factor)
    diagonal = [0.0] * size
    for column in range(size):
        below = [1.0 / factor[column][column]]
        for i in range(column + 1, size):
            row = factor[i]
            below.append(-sum(map(mul, row[column:i], below)) / row[i])
        diagonal[column] = sum(map(mul, below, below))
    return diagonal


def non_negative_least_squares(rows: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Return the ``x >= 0`` that minimises ``|rows x - right|``.

    The active-set method of Lawson and Hanson (Solving Least Squares Problems, chapter 23) on the normal equations,
    with a ridge of 1e-9 of the diagonal so that equal columns do no harm.
    """
    columns = list(zip(*rows, strict=True))
    size = len(columns)
    normal = [[sum(map(mul, a, b)) for b in columns] for a in columns]
    for i in range(size):
        normal[i][i] *= 1 + 1e-9
    wanted = [sum(map(mul, column, right)) for column in columns]
    smallest = 1e-10 * max(map(abs, wanted), default=0.0)
    found, passive = [0.0] * size, list[int]()
    for _ in range(3 * size):
        slope = [wanted[i] - sum(map(mul, normal[i], found)) for i in range(size)]
        best = max((i for i in range(size) if i not in passive), key=slope.__getitem__, default=None)
        if best is None or slope[best] <= smallest:
            break
        passive.append(best)
        while passive:
            factor = cholesky([[normal[i][j] for j in passive] for i in passive])
            trial = dict(zip(passive, solve(factor, [wanted[i] for i in passive]), strict=True))
            if min(trial.values()) > 0:
                found = [trial.get(i, 0.0) for i in range(size)]
                break
            share = min(found[i] / (found[i] - trial[i]) for i in passive if trial[i] <= 0)
            found = [found[i] + share * (trial.get(i, 0.0) - found[i]) for i in range(size)]
            passive = [i for i in passive if found[i] > 1e-15]
            found = [found[i] if i in passive else 0.0 for i in range(size)]
    return found
