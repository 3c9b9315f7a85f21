"""A user's own mixer: refused while unknown, exact once registered, its names its own."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from forests import SHAPES, calls_of

from prefix_rewrite import (
    CapturedCall,
    PrefixRewriteError,
    UnsupportedModelError,
    prefix_compile,
    register_mixer,
    verify,
)
from prefix_rewrite.mixers.attention import ATTENTION
from prefix_rewrite.targets import TARGETS


@pytest.fixture(scope="module")
def example():
    folder = str(Path(__file__).resolve().parents[1] / "examples")
    sys.path.insert(0, folder)
    try:
        import own_mixer

        yield own_mixer
    finally:
        sys.path.remove(folder)


@pytest.fixture
def registered(example):
    register_mixer(example.MOVING_AVERAGE)
    yield example
    TARGETS.remove(example.MOVING_AVERAGE)


def test_an_unknown_mixer_is_refused(example):
    with pytest.raises(UnsupportedModelError):
        prefix_compile(example.TinyModel())


def test_a_registered_mixer_is_exact(registered):
    torch.manual_seed(0)
    compiled = prefix_compile(registered.TinyModel())
    for shape in ("nested", "one_token", "many_roots"):
        calls = [
            CapturedCall.from_tokens(call.token_ids % registered.VOCAB, call.sampled)
            for call in calls_of(SHAPES[shape])
        ]
        report = verify(compiled, calls)
        assert report.ok, str(report)


def test_names_must_be_new(registered):
    with pytest.raises(PrefixRewriteError, match="moving average"):
        register_mixer(registered.MOVING_AVERAGE)
    renamed = dataclasses.replace(ATTENTION, kind="another attention")
    with pytest.raises(PrefixRewriteError, match="leaf_attention"):
        register_mixer(renamed)


def test_only_targets_are_mixers():
    with pytest.raises(PrefixRewriteError, match="must be a Target"):
        register_mixer("attention")
