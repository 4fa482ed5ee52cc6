"""Promise: sdist and wheel install, each extra works alone, and an upgrade keeps all data."""

import pytest


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request):
    if request.param == "sqlite":
        return {}
    return {"database_url": request.getfixturevalue("postgres").new_database()}
