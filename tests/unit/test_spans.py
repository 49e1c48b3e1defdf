"""Tokens that belong to spans of characters."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt_core.chat.spans import overlap_mask


@pytest.mark.parametrize(
    ("spans", "offsets", "expected"),
    [
        pytest.param([(0, 1)], [(0, 1), (1, 9), (9, 11)], [1, 0, 0], id="span at the start"),
        pytest.param([(0, 4)], [(0, 2), (4, 12), (12, 14)], [1, 0, 0], id="uncovered whitespace at the end"),
        pytest.param([(17, 28)], [(0, 8), (8, 10), (10, 17), (17, 21), (21, 24)], [0, 0, 0, 1, 1], id="cut inside"),
        pytest.param([], [(0, 8), (8, 10)], [0, 0], id="no span"),
        pytest.param([(1, 2)], [(0, 1), (2, 3)], [0, 0], id="span without tokens"),
        pytest.param([(2, 4)], [(0, 3), (3, 3), (3, 6)], [1, 0, 1], id="straddling tokens, empty token"),
        pytest.param([(0, 2)], [], [], id="no tokens"),
    ],
)
def test_a_token_belongs_to_a_span_iff_they_overlap(spans, offsets, expected):
    assert overlap_mask(offsets, spans).tolist() == [bool(x) for x in expected]


bounds = st.lists(st.integers(0, 30), unique=True, max_size=12).map(sorted)
disjoint = bounds.map(lambda b: list(zip(b[::2], b[1::2], strict=False)))


@given(disjoint, st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4)), max_size=10))
def test_agrees_with_shared_characters(spans, starts_and_lengths):
    offsets = [(a, a + n) for a, n in starts_and_lengths]
    inside = {c for a, b in spans for c in range(a, b)}
    assert overlap_mask(offsets, spans).tolist() == [bool(inside & set(range(a, b))) for a, b in offsets]
