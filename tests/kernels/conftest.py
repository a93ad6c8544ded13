import jax
import pytest

from pallas_kernels.implementation import ignore_triton_deprecation


@pytest.fixture(autouse=True)
def _no_triton_deprecation():
    """Tests turn warnings into errors; this one names no alternative that we can use yet."""
    ignore_triton_deprecation()


def pytest_collection_modifyitems(items):
    if jax.default_backend() == "gpu":
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
