import logging

import pytest


@pytest.fixture(autouse=True)
def _keep_logging():
    """Give the library's log back as it was: the commands send it to standard error."""
    logger = logging.getLogger("cgdnn")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], level, logger.propagate = before
    logger.setLevel(level)
