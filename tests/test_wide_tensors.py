"""No tensor has a vocabulary of columns and more rows than there are edges, in any direction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from compiled import CORE_FAMILIES, WIDE_VOCAB, shared_pair
from dispatch import Watch
from forests import SHAPES, calls_of
from torch.utils._pytree import tree_leaves

from prefix_rewrite import PrefixForest


@contextmanager
def shapes_made() -> Iterator[set[torch.Size]]:
    """The shape of every tensor that any op makes."""
    made: set[torch.Size] = set()

    def record(func, args, out):
        made.update(leaf.shape for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))

    with Watch(record):
        yield made


def largest_number_of_rows(shapes: set[torch.Size]) -> int:
    """Rows, in whatever dimensions, of the largest tensor with a vocabulary's columns.

    The head's own weight, [V, D], has V rows and D columns.
    """
    wide = [shape for shape in shapes if WIDE_VOCAB in shape]
    assert wide, "not even the head was seen"
    return max(shape.numel() // WIDE_VOCAB for shape in wide)


@pytest.mark.parametrize("options", [{}, {"entropy": True}, {"logits": True}], ids=str)
@pytest.mark.parametrize("family", CORE_FAMILIES)
def test_no_tensor_has_more_rows_of_logits_than_edges(family, options):
    if options and family not in ("llama", "granitemoehybrid"):
        pytest.skip("one family with a plain head and one with a scaled head take the options")
    model, compiled = shared_pair(family)
    calls = calls_of(SHAPES["fork_in_chunk"], sampled=20)
    forest = PrefixForest.from_calls(calls)
    width = 32
    with shapes_made() as made:
        out = compiled(forest, **options)
        loss = out.logprobs.sum() + (out.entropy.sum() if options.get("entropy") else 0)
        loss.backward()
    allowed = max(forest.num_edges, width)
    assert allowed < forest.num_tokens / 3, "the forest must be able to show a fault"
    assert largest_number_of_rows(made) <= allowed


def test_the_plain_model_does_make_such_tensors():
    model, _ = shared_pair("llama")
    with shapes_made() as made:
        model(input_ids=torch.arange(3, 153)[None], use_cache=False).logits.sum().backward()
    assert largest_number_of_rows(made) == 150
