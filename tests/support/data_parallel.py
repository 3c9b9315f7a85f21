"""One rank of two under DDP; run as `data_parallel.py RANK STORE`. Prints nothing if all holds."""

from __future__ import annotations

import sys
import warnings

import torch
import torch.distributed as dist
from families import build_model
from forests import SHAPES, calls_of
from oracle import edge_weights, run_rows, worst_gradient
from torch.nn.parallel import DistributedDataParallel

from prefix_rewrite import PrefixForest, PrefixRewriteError, prefix_compile

SETS = [calls_of(SHAPES["nested"]), calls_of(SHAPES["many_roots"], seed=1)]


def main(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = build_model("bamba", num_hidden_layers=2, attn_layer_indices=[1])
    alone = [run_rows(model, calls).gradients for calls in SETS]
    mean = {name: (alone[0][name] + alone[1][name]) / 2 for name in alone[0]}
    parallel = DistributedDataParallel(prefix_compile(model), bucket_cap_mb=0.001)

    step(parallel, rank)
    check(model, mean)

    with parallel.no_sync():
        step(parallel, rank)
    check(model, alone[rank])

    # A recapture inside DDP's forward must still see one whole graph.
    parallel.eval()
    step(parallel, rank)
    check(model, mean)

    try:
        prefix_compile(DistributedDataParallel(model))
    except PrefixRewriteError as error:
        assert "wrap the compiled model" in str(error), error
    else:
        raise AssertionError("compiling a DDP model must be refused")
    dist.destroy_process_group()


def step(parallel: DistributedDataParallel, rank: int) -> None:
    parallel.zero_grad()
    forest = PrefixForest.from_calls(SETS[rank])
    (parallel(forest).logprobs * edge_weights(forest.num_edges).float()).sum().backward()


def check(model: torch.nn.Module, expected: dict[str, torch.Tensor]) -> None:
    got = {name: parameter.grad for name, parameter in model.named_parameters()}
    error, name = worst_gradient(got, expected)
    assert error < 1e-4, (error, name)


if __name__ == "__main__":
    warnings.simplefilter("error", UserWarning)
    main(int(sys.argv[1]), sys.argv[2])
