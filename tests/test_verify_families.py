"""`verify` passes on every supported family."""

from __future__ import annotations

import pytest
from families import CONFIGS, build_model
from forests import SHAPES, calls_of

from prefix_rewrite import prefix_compile, verify


@pytest.mark.parametrize("family", CONFIGS)
def test_a_family_passes(family: str) -> None:
    report = verify(prefix_compile(build_model(family)), calls_of(SHAPES["nested"]))
    assert report.ok, str(report)
