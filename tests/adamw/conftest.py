"""The fixture of AdamW's offloading tests."""

import pytest

from adamw.offload import PLACES, make_place


@pytest.fixture(params=PLACES)
def place(request, monkeypatch):
    return make_place(request.param, monkeypatch)
