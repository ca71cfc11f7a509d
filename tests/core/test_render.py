"""Texts of quantities."""

from __future__ import annotations

import pytest

from attn_select.render import byte_text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1 << 20, "1 MiB"),
        (1 << 30, "1 GiB"),
        (5 << 40, "5120 GiB"),
    ],
)
def test_bytes_are_in_the_largest_unit_that_they_fill(count: int, text: str) -> None:
    assert byte_text(count) == text
