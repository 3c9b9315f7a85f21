"""The drawing shows each physical token once, at its depth, and each sampled one in colour."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from prefix_rewrite.calls import CapturedCall
from prefix_rewrite.forest import PrefixForest
from prefix_rewrite.plot import CONTEXT, SAMPLED, draw_forest


def drawn(forest: PrefixForest) -> tuple[np.ndarray, np.ndarray, Figure]:
    """Return the context bars and the sampled bars [n, 2, 2] of a drawing."""
    figure = Figure()
    ax = figure.add_subplot()
    draw_forest(forest, ax)
    bars: dict[tuple, list[np.ndarray]] = {to_rgba(CONTEXT): [], to_rgba(SAMPLED): []}
    for lines in ax.collections:
        assert isinstance(lines, LineCollection)
        for line in lines.get_segments():
            if line[0, 1] == line[1, 1]:
                bars[tuple(lines.get_colors()[0])].append(line)
    shape = (-1, 2, 2)
    return (
        np.array(bars[to_rgba(CONTEXT)]).reshape(shape),
        np.array(bars[to_rgba(SAMPLED)]).reshape(shape),
        figure,
    )


def test_bars_cover_every_token_once_and_every_sampled_one():
    calls = [
        CapturedCall([1, 2, 3], [4, 5]),
        CapturedCall([1, 2, 3], [6]),
        CapturedCall([1, 2, 3, 4, 5, 7, 8], [9]),
        CapturedCall([2], [3, 4]),
    ]
    forest = PrefixForest.from_calls(calls)
    context, sampled, _ = drawn(forest)
    assert (context[:, 1, 0] - context[:, 0, 0]).sum() == forest.num_tokens
    assert (sampled[:, 1, 0] - sampled[:, 0, 0]).sum() == len(np.unique(forest.edges.token))
    ends = context[:, 1, 0].max()
    assert ends == forest.stats().longest_path
    rows = {row for row in context[:, 0, 1] if row == int(row)}
    assert rows >= set(range(forest.stats().num_leaves))


def test_leaves_have_rows_of_their_own_and_parents_lie_between():
    graph = nx.DiGraph()
    for node in "abcde":
        graph.add_node(node, token_ids=[1, 2])
    graph.add_edges_from(["ab", "ac", "bd", "be"])
    context, _, _ = drawn(PrefixForest.from_graph(graph))
    rows = {(x, y) for x, y in context[:, 0]}
    assert rows == {(0, 1.25), (2, 0.5), (4, 0.0), (4, 1.0), (2, 2.0)}


@pytest.mark.parametrize("count", [0, 1, 6_000])
def test_any_size_is_drawn(count):
    calls = [CapturedCall([1, 2, i + 3], [5]) for i in range(count)]
    _, _, figure = drawn(PrefixForest.from_calls(calls))
    figure.savefig("/dev/null", format="svg")
