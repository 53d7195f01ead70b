"""The fixture `place` of AdamW's offloading tests: a GPU, or a CPU in its place."""

import pytest

from adamw.offload import PLACES, make_place


@pytest.fixture(params=PLACES)
def place(request, monkeypatch):
    return make_place(request.param, monkeypatch)
