import pytest


@pytest.fixture(autouse=True)
def _no_tuning_table(monkeypatch):
    """Keep the table that the user's machine has been tuned with out of the tests."""
    monkeypatch.setenv("CGDNN_TUNING", "/nonexistent/tuning.json")
