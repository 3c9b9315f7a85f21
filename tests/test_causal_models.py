"""docs/families.md says of every causal language model of transformers what it does here."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import transformers
from causal_models import EXACT, NOT_TRIED, REFUSED, model_types, read_page, try_model
from causal_models import PAGE as PAGE_FILE

PAGE = read_page()
TRIED = [name for name, outcome in PAGE.items() if outcome.status != NOT_TRIED]
pytestmark = pytest.mark.skipif(
    not transformers.__version__.startswith("5.24."), reason="the page is of transformers 5.24"
)


@pytest.fixture(autouse=True)
def each_model_compiles_afresh():
    yield
    torch._dynamo.reset()


def test_the_page_is_of_all_types_and_the_readme_tells_its_counts() -> None:
    assert list(PAGE) == model_types()
    counts = Counter(outcome.status for outcome in PAGE.values())
    readme = (PAGE_FILE.parents[1] / "README.md").read_text()
    assert f"{counts[EXACT]} run exactly, {counts[REFUSED]} are refused" in readme


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", TRIED)
def test_a_model_does_what_the_page_says(model_type: str) -> None:
    assert try_model(model_type) == PAGE[model_type]
