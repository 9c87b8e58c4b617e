"""One thread for every test of a learner."""

import pytest


@pytest.fixture(autouse=True)
def always_one_thread(one_thread):
    """Of every test here."""
