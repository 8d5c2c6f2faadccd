import pytest

from miles.train.random_model import ensure_model
from tests.train.rollouts import Store


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(ensure_model("random:tiny", 0, tmp_path_factory.mktemp("models")))


@pytest.fixture
def store() -> Store:
    return Store()
