"""Tensor parallel on gloo: a head sharded by vocabulary, never gathered, gives what a whole one
gives."""

from __future__ import annotations

import pytest
from launch import run_ranks


@pytest.mark.parametrize("plan", ("local_logits", "sharded_logits", "full_logits", "all_linears"))
def test_two_ranks_equal_an_unsharded_model(plan):
    run_ranks("tp_worker.py", "llama", plan, num_ranks=2)


def test_steps_after_a_sharded_head_in_uneven_shards():
    run_ranks("tp_worker.py", "granitemoehybrid", "local_logits", num_ranks=3)
