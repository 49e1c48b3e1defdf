import logging

import pytest

from molt_core.logs import setup_logging


@pytest.fixture(autouse=True)
def _restore():
    logger = logging.getLogger("molt")
    before, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:], logger.level = before, level


def test_lines_are_plain_off_a_terminal_and_written_once(capsys):
    setup_logging()
    setup_logging()
    logging.getLogger("molt").info("step %d", 3)
    err = capsys.readouterr().err
    assert err.count("step 3") == 1
    assert err.endswith("INFO step 3\n")
    assert "\x1b" not in err


def test_other_loggers_are_left_alone():
    before = list(logging.getLogger().handlers)
    setup_logging()
    assert logging.getLogger().handlers == before
