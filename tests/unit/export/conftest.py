"""One thread for every run of these tests."""

from tests.unit.train.conftest import one_thread_a_module

__all__ = ["one_thread_a_module"]
