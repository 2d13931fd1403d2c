import pytest


@pytest.fixture
def in_tmp(tmp_path, monkeypatch):
    """Runs the test in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
