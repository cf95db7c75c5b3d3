import pytest

from tests.data.conftest import write_jsonl as write_rows  # noqa: F401 - a fixture
from tests.nemo_gym import servers


@pytest.fixture
def gym(monkeypatch):
    monkeypatch.setattr("ebft.nemo_gym.client.BACKOFF", 0.01)
    with servers.gym() as made:
        yield made


@pytest.fixture
def client(gym):
    from ebft.nemo_gym.client import GymClient

    made = GymClient(gym.head.port, timeout=5.0)
    yield made
    made.close()
