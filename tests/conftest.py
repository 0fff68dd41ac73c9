import pytest


@pytest.fixture(autouse=True)
def _own_tuning_table(tmp_path_factory, monkeypatch):
    """Keep the table that the user's machine has been tuned with out of the tests."""
    path = tmp_path_factory.getbasetemp() / "no_tuning.json"
    monkeypatch.setenv("CGDNN_TUNING", str(path))
