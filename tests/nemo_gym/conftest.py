import json

import pytest

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


@pytest.fixture
def write_rows(tmp_path):
    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write
