"""Prompts that are too long."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt_core.data.overflow import OverflowReport, fit_prompt, grant_new_tokens
from molt_core.errors import ConfigError

LENGTHS = [5, 8, 9, 30]


def fit_all(mode: str, report: OverflowReport):
    return [fit_prompt(range(n), 8, mode, row=i, report=report) for i, n in enumerate(LENGTHS)]


def test_drop_keeps_what_fits_and_reports_the_rest_once(caplog):
    report = OverflowReport()
    with caplog.at_level(logging.WARNING, logger="molt"):
        assert fit_all("drop", report) == [[0, 1, 2, 3, 4], list(range(8)), None, None]
    assert report.metrics() == {"prompts_dropped": 2.0, "prompts_truncated": 0.0}
    assert [r.getMessage() for r in caplog.records] == [
        "dropped the prompt of row 2: 9 > 8 tokens; more are only counted"
    ]


def test_truncate_left_keeps_the_end():
    report = OverflowReport()
    assert fit_all("truncate_left", report) == [[0, 1, 2, 3, 4], list(range(8)), list(range(1, 9)), list(range(22, 30))]
    assert report.metrics() == {"prompts_dropped": 0.0, "prompts_truncated": 2.0}


def test_error_names_the_row_and_the_lengths():
    with pytest.raises(ConfigError, match="row 2 has 9 > 8 tokens"):
        fit_all("error", OverflowReport())


def test_granted_tokens_never_exceed_the_context():
    assert [grant_new_tokens(12, used, 8) for used in (4, 8, 12, 15)] == [8, 4, 0, 0]
    assert grant_new_tokens(12, 2) == 10


@given(st.integers(0, 50), st.integers(0, 50), st.none() | st.integers(0, 50))
def test_granted_tokens_fit(context, used, cap):
    granted = grant_new_tokens(context, used, cap)
    assert granted == 0 or used + granted <= context
    assert granted >= 0
    assert cap is None or granted <= cap
