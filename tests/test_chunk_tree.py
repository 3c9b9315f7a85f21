"""The chunk tree covers every forest once, and carries states as a plain walk over it does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import TABLES, preorder, table, tables

from prefix_rewrite.errors import LayoutError
from prefix_rewrite.ops.chunk_tree import ChunkPlanner, ChunkTree, carry_down, carry_up
from prefix_rewrite.plan import pack_plan
from prefix_rewrite.segments import SegmentTable

PLANNER = ChunkPlanner("test_chunks")
APART = ChunkPlanner("test_chunks_apart", chunk_size=8, granule=4, collapse=False)
PLANNERS = {"default": PLANNER, "small chunks, no tiles": APART}


def read(segments: SegmentTable, planner: ChunkPlanner = PLANNER) -> ChunkTree:
    return planner.read(*pack_plan(planner.plan(segments), "cpu"))


def ancestry(segments: SegmentTable) -> np.ndarray:
    """[T, T] whether the second token is the first or its ancestor, by walking up."""
    parent = segments.parent_token.tolist()
    sees = np.zeros((len(parent), len(parent)), dtype=bool)
    for t in range(len(parent)):
        s = t
        while s >= 0:
            sees[t, s] = True
            s = parent[s]
    return sees


def inner_chunks(tree: ChunkTree) -> tuple[list[int], list[int]]:
    """Last token of each state row, and the row of its parent chunk (-1 for a root)."""
    last = [-1] * tree.num_states
    parent = [-1] * tree.num_states
    for block in tree.blocks(1 << 20):
        if block.states is not None:
            rows = range(block.states.start, block.states.stop)
            for k, row in enumerate(rows):
                last[row] = int(block.tokens[k, block.last[k]])
                parent[row] = -1 if block.parents is None else int(block.parents[k])
    return last, parent


def check_blocks(segments: SegmentTable, planner: ChunkPlanner, max_places: int) -> None:
    tree = read(segments, planner)
    sees = ancestry(segments)
    last, _ = inner_chunks(tree)
    seen: list[int] = []
    for block in tree.blocks(max_places):
        n, size = block.tokens.shape
        assert n == 1 or n * size <= max_places
        assert size <= planner.chunk_size and (block.ragged or bool(block.valid.all()))
        for k in range(n):
            tokens = block.tokens[k][block.valid[k]].numpy()
            assert size - len(tokens) < planner.granule
            assert int(block.last[k]) == len(tokens) - 1
            assert (block.tokens[k][~block.valid[k]] == tokens[-1]).all()
            visible = block.visible[k, : len(tokens), : len(tokens)].numpy()
            assert (visible == sees[np.ix_(tokens, tokens)]).all()
            before = sees[tokens].copy()  # what the chunk's tokens see outside of it
            before[:, tokens] = False
            if block.parents is None:
                assert not before.any()
            else:
                assert (before == sees[last[int(block.parents[k])]]).all()
            seen += tokens.tolist()
    assert sorted(seen) == list(range(segments.num_tokens))


@pytest.mark.parametrize("planner", PLANNERS)
@settings(max_examples=25, deadline=None)
@given(segments=tables(), max_places=st.sampled_from([1, 64, 200, 1 << 20]))
def test_every_token_sees_its_chunk_and_the_parent_chunks_path(planner, segments, max_places):
    """So a chunk's tokens and the state that enters it hold every ancestor exactly once."""
    check_blocks(segments, PLANNERS[planner], max_places)


@pytest.mark.parametrize("name", TABLES)
def test_named_forests_are_covered(name):
    check_blocks(table(name), PLANNER, 256)


@settings(max_examples=25, deadline=None)
@given(segments=tables())
def test_steps_pass_every_inner_chunk_once_after_its_parent(segments):
    tree = read(segments)
    _, parent = inner_chunks(tree)
    done = {row for row in range(tree.num_states) if parent[row] < 0}
    for lo, hi, first_parent in tree.steps:
        rows = range(lo, hi)
        if first_parent >= 0:
            assert [parent[r] for r in rows] == list(range(first_parent, first_parent + len(rows)))
        assert tree.state_parent[lo:hi].tolist() == [parent[r] for r in rows]
        assert done.isdisjoint(rows) and done.issuperset(parent[r] for r in rows)
        done.update(rows)
    assert done == set(range(tree.num_states))


def compose_matrix(out, maps, states):
    out.add_(maps @ states)


MAPS = {
    "scalar": ((1, 1), lambda out, m, e: out.addcmul_(m, e), lambda m: m, lambda m, e: m * e),
    "diagonal": ((3, 2), lambda out, m, e: out.addcmul_(m, e), lambda m: m, lambda m, e: m * e),
    "matrix": ((3, 3), compose_matrix, lambda m: m.mT, lambda m, e: m @ e),
}


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("name", TABLES)
def test_states_and_their_gradients_equal_a_walk_down_the_tree(name, kind):
    tree = read(table(name), APART)
    _, parent = inner_chunks(tree)
    shape, compose, adjoint, apply = MAPS[kind]
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(tree.num_states, *shape, generator=generator, dtype=torch.float64)

    own, maps, grad = draw(3, 2).requires_grad_(), draw(*shape), draw(3, 2)
    walked: dict[int, torch.Tensor] = {}
    pending = list(range(tree.num_states))
    while pending:
        row = pending.pop(0)
        if parent[row] < 0:
            walked[row] = own[row]
        elif parent[row] in walked:
            walked[row] = own[row] + apply(maps[row], walked[parent[row]])
        else:
            pending.append(row)
    states = own.detach().clone()
    carry_down(states, maps, tree, compose)
    carried = grad.clone()
    carry_up(carried, adjoint(maps), tree, compose)
    if not tree.num_states:
        return
    expected = torch.stack([walked[row] for row in range(tree.num_states)])
    (expected_grad,) = torch.autograd.grad(expected, own, grad)
    torch.testing.assert_close(states, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(carried, expected_grad, rtol=1e-12, atol=1e-12)


def test_a_chain_of_segments_is_planned_as_one_segment():
    chain = SegmentTable.from_parents([*range(-1, 2999)], [1] * 3000)
    whole = SegmentTable.from_parents([-1], [3000])
    planned, expected = PLANNER.plan(chain), PLANNER.plan(whole)
    assert planned.keys() == expected.keys()
    for name, values in expected.items():
        assert (planned[name] == values).all(), name


def test_depth_is_not_limited_by_recursion():
    """A chain of 50,000 segments with a side leaf at each: no two of them merge."""
    count = 50_000
    parent = [p for k in range(count) for p in (k - 1, k)]
    segments = preorder(
        [-1 if p < 0 else 2 * p for p in parent], [1 if i % 2 else 40 for i in range(2 * count)]
    )
    tree = read(segments)
    assert tree.num_states == count - 1 and len(tree.steps) == count - 2


def test_small_sibling_subtrees_share_chunks():
    many = SegmentTable.from_parents([-1] * 1000, [1] * 1000)
    assert len(read(many).start) == -(-1000 // 64)
    assert len(read(many, ChunkPlanner("test_no_tiles", collapse=False)).start) == 1000


def test_an_empty_forest_has_no_chunks():
    tree = read(SegmentTable.from_parents([], []))
    assert tree.num_states == 0 and list(tree.blocks(64)) == []


def test_a_plan_without_the_chunks_is_refused():
    with pytest.raises(LayoutError, match="must hold 'test_chunks_"):
        PLANNER.read(*pack_plan({}, "cpu"))
