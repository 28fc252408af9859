import pytest

from memory_saving_gradients.planning import search
from tests.conftest import FULL_SEARCH


@pytest.fixture(autouse=True, scope="module")
def whole_search():
    """Here it is asked how good plans are."""
    with pytest.MonkeyPatch.context() as patch:
        for name, moves in FULL_SEARCH.items():
            patch.setattr(search, name, moves)
        yield
