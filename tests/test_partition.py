"""Partitions and shares: who owns what, what is fetched, and the plans made of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from forests import SHAPES, calls_of

from prefix_rewrite import PrefixForest
from prefix_rewrite.distributed.partition import Partition, deal_tiles, partition_tokens
from prefix_rewrite.distributed.rank_attention import plan_attention_share
from prefix_rewrite.distributed.rank_conv import plan_conv_share
from prefix_rewrite.distributed.share import REACH, Share, induced_forest
from prefix_rewrite.ops.tree_attention import tree_attention
from prefix_rewrite.ops.tree_attention.reference import tree_attention_reference
from prefix_rewrite.ops.tree_conv import tree_conv
from prefix_rewrite.ops.tree_conv.reference import tree_conv_reference
from prefix_rewrite.order import heavy_first_order
from prefix_rewrite.plan import pack_plan
from prefix_rewrite.segments import SegmentTable

RANKS = (1, 2, 3, 7)


def table(shape: str) -> SegmentTable:
    return PrefixForest.from_calls(calls_of(SHAPES[shape])).segments


def ancestors(segments: SegmentTable, token: int) -> list[int]:
    """The token and those above it, by walking up."""
    path = []
    while token >= 0:
        path.append(token)
        token = int(segments.parent_token[token])
    return path


def scattered(segments: SegmentTable, num_ranks: int, seed: int = 0) -> Partition:
    """Owners at random, so that every fork and every tap crosses ranks."""
    owner = np.random.default_rng(seed).integers(0, num_ranks, segments.num_tokens)
    return Partition(owner, num_ranks, partition_tokens(segments, num_ranks).balance)


def heavy_first(parent: list[int], length: list[int]) -> SegmentTable:
    order = heavy_first_order(parent, length, range(len(parent)))
    rank = {segment: i for i, segment in enumerate(order)} | {-1: -1}
    return SegmentTable.from_parents([rank[parent[i]] for i in order], [length[i] for i in order])


GRPO = heavy_first([-1] + [0] * 8, [2048] + [256] * 8)
AGENT = heavy_first(
    [3 * ((i - 3) // 3) if i % 3 == 0 and i else (i - i % 3 if i else -1) for i in range(96)],
    [128 if i % 3 == 0 else 64 for i in range(96)],
)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_token_has_one_owner_and_no_rank_has_a_tile_more(shape, num_ranks):
    segments = table(shape)
    partition = partition_tokens(segments, num_ranks)
    assert partition.owner.shape == (segments.num_tokens,)
    counts = np.bincount(partition.owner, minlength=num_ranks)
    assert len(counts) == num_ranks
    assert counts.max() - counts.min() <= partition.balance.tile


@pytest.mark.parametrize("num_ranks", (2, 3, 4, 8))
@pytest.mark.parametrize("segments", (GRPO, AGENT), ids=("grpo", "agent"))
def test_large_forests_balance_tokens_pairs_and_edges_within_5_percent(segments, num_ranks):
    is_leaf = np.ones(segments.num_segments, dtype=bool)
    is_leaf[segments.parent[segments.parent >= 0]] = False
    sources = np.flatnonzero(np.repeat(is_leaf, segments.length))
    partition = partition_tokens(segments, num_ranks, sources)
    pairs = np.ones(segments.num_tokens)
    for token, above in enumerate(segments.parent_token.tolist()):
        pairs[token] += pairs[above] if above >= 0 else 0
    for work in (np.ones(len(pairs)), pairs, np.isin(np.arange(len(pairs)), sources)):
        loads = np.bincount(partition.owner, work, minlength=num_ranks)
        assert loads.max() <= 1.05 * loads.mean()
    assert partition.balance.worst <= 1.05


def test_zigzag_would_be_worse_on_an_agent_chain():
    token = np.arange(AGENT.num_tokens)
    zigzag = token * 4 // AGENT.num_tokens
    loads = np.bincount(np.minimum(zigzag, 3 - zigzag), AGENT.position_ids + 1)
    assert loads.max() > 1.3 * loads.mean()
    assert partition_tokens(AGENT, 2).balance.attended_pairs < 1.05


def test_fewer_tokens_than_ranks_leaves_ranks_empty():
    segments = SegmentTable.from_parents([-1], [2])
    shares = [Share(segments, partition_tokens(segments, 4), rank) for rank in range(4)]
    assert sorted(len(share.tokens) for share in shares) == [0, 0, 1, 1]
    assert all(share.num_rows == 2 for share in shares)


def test_dealing_gives_equal_numbers_of_tiles():
    owner = deal_tiles(np.random.default_rng(0).random((2, 100)), 3, 7)
    counts = np.bincount(owner[::7])
    assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_induced_forest_keeps_visibility(shape, num_ranks):
    segments = table(shape)
    for rank in range(num_ranks):
        tokens = np.flatnonzero(scattered(segments, num_ranks).owner == rank)
        induced = induced_forest(segments, tokens)
        assert induced.num_tokens == len(tokens)
        for i, token in enumerate(tokens.tolist()):
            expected = set(ancestors(segments, token)) & set(tokens.tolist())
            assert {int(tokens[j]) for j in ancestors(induced, i)} == expected


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_fetches_bring_what_is_needed_and_agree_between_ranks(shape, num_ranks):
    segments = table(shape)
    shares = [Share(segments, scattered(segments, num_ranks), r) for r in range(num_ranks)]
    for kind in ("ancestors", "near"):
        sent = {
            (a, b): part
            for a in range(num_ranks)
            for b, part in enumerate(_parts(shares[a], getattr(shares[a], kind)))
        }
        for share in shares:
            fetch = getattr(share, kind)
            needed = set()
            for token in share.tokens.tolist():
                above = ancestors(segments, token)
                needed |= set(above if kind == "ancestors" else above[: REACH + 1])
            assert fetch.tokens.tolist() == sorted(needed - set(share.tokens.tolist()))
            buffer = np.concatenate([sent[a, share.rank] for a in range(num_ranks)])
            assert (buffer[fetch.place[: len(fetch.tokens)]] == fetch.tokens).all()
            assert (fetch.place[len(fetch.tokens) :] == len(buffer)).all()
            assert fetch.receive_counts.tolist() == [
                len(sent[a, share.rank]) for a in range(num_ranks)
            ]


def _parts(share, fetch):
    """Tokens that a share sends to each rank."""
    return np.split(share.tokens[fetch.send_rows], np.cumsum(fetch.send_counts)[:-1])


def _rows(share, fetch, values_T):
    """A rank's rows of all tokens' values: its own, filler, then those fetched."""
    own = values_T[torch.from_numpy(share.tokens)]
    filler = values_T.new_zeros(share.num_rows - len(own), *values_T.shape[1:])
    fetched = values_T[torch.from_numpy(fetch.tokens)]
    missing = values_T.new_zeros(fetch.num_rows - len(fetched), *values_T.shape[1:])
    return torch.cat([own, filler, fetched, missing])


@pytest.mark.parametrize("backend", ("cpu_flash", "blockwise"))
@pytest.mark.parametrize("num_ranks", (1, 3))
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_attention_adds_up_to_the_whole(shape, num_ranks, backend, monkeypatch):
    monkeypatch.setattr(
        "prefix_rewrite.ops.tree_attention.op.attention_backend", lambda *args: backend
    )
    segments = table(shape)
    num_tokens = segments.num_tokens
    torch.manual_seed(0)
    q, k, v, grad = (
        torch.randn(num_tokens, heads, 8, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2, 4)
    )
    expected = tree_attention_reference(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), segments.parent_token.tolist(), 0.3
    )[0]
    expected_grads = torch.autograd.grad(expected, (q, k, v), grad)
    got = torch.zeros_like(expected)
    for rank in range(num_ranks):
        share = Share(segments, scattered(segments, num_ranks), rank)
        plan = pack_plan(plan_attention_share(share), "cpu")
        keys, values = (_rows(share, share.ancestors, x).transpose(0, 1)[None] for x in (k, v))
        queries = _rows(share, share.ancestors, q)[: share.num_rows].transpose(0, 1)[None]
        out = tree_attention(queries, keys, values, *plan, 0.3)[0, : len(share.tokens)]
        got = got.index_add(0, torch.from_numpy(share.tokens), out)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    for mine, reference in zip(
        torch.autograd.grad(got, (q, k, v), grad), expected_grads, strict=True
    ):
        torch.testing.assert_close(mine, reference, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_ranks", (1, 3))
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_conv_adds_up_to_the_whole(shape, num_ranks):
    segments = table(shape)
    torch.manual_seed(0)
    x, grad = (
        torch.randn(segments.num_tokens, 6, dtype=torch.float64, requires_grad=True)
        for _ in range(2)
    )
    weight = torch.randn(6, REACH + 1, dtype=torch.float64, requires_grad=True)
    expected = tree_conv_reference(x.t()[None], weight, None, segments, True)[0].t()
    expected_grads = torch.autograd.grad(expected, (x, weight), grad)
    got = torch.zeros_like(expected)
    for rank in range(num_ranks):
        share = Share(segments, scattered(segments, num_ranks), rank)
        plan = pack_plan(plan_conv_share(share), "cpu")
        out = tree_conv(_rows(share, share.near, x).t()[None], weight, None, *plan, True)[0].t()
        got = got.index_add(0, torch.from_numpy(share.tokens), out[: len(share.tokens)])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    for mine, reference in zip(
        torch.autograd.grad(got, (x, weight), grad), expected_grads, strict=True
    ):
        torch.testing.assert_close(mine, reference, rtol=0, atol=1e-12)
