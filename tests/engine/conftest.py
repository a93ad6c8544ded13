import pytest
from engine_doubles import MemoryExperts, tiny_experts


@pytest.fixture(scope="session")
def experts() -> MemoryExperts:
    return tiny_experts()
