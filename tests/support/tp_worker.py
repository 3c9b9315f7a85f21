"""What each rank does in the tensor-parallel tests: `tp_worker.py FAMILY PLAN`."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from families import build_model
from forests import SHAPES, calls_of
from oracle import Result, assert_equal_results, edge_weights
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from wide import fp64_throughout

from prefix_rewrite import PrefixForest, UnsupportedModelError, prefix_compile

LAYERS: dict[str, Any] = {
    **{f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    **{f"model.layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
}
PLANS: dict[str, dict[str, Any]] = {
    "local_logits": {"lm_head": ColwiseParallel()},
    "sharded_logits": {"lm_head": ColwiseParallel(use_local_output=False)},
    "full_logits": {"lm_head": ColwiseParallel(output_layouts=Replicate())},
    "all_linears": {**LAYERS, "lm_head": ColwiseParallel()},
}


def main(family: str, plan: str) -> None:
    """A sharded head gives what the whole one gives: outputs, gradients, entropy, logits."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    settings = {"tie_word_embeddings": False, "dtype": torch.float64}
    alone = prefix_compile(build_model(family, **settings), backend=fp64_throughout)
    model = build_model(family, **settings)
    parallelize_module(model, mesh, PLANS[plan])
    compiled = prefix_compile(model, backend=fp64_throughout)
    for shape in SHAPES:
        forest = PrefixForest.from_calls(calls_of(SHAPES[shape]))
        got, expected = run(compiled, forest), run(alone, forest)
        assert_equal_results(got, expected, logprobs=1e-10, gradients=1e-10)
        options = {"temperature": 0.7, "entropy": True, "logits": True}
        with torch.no_grad():
            mine, reference = compiled(forest, **options), alone(forest, **options)
        for field in ("logprobs", "entropy", "logits"):
            a, b = getattr(mine, field), getattr(reference, field)
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    if plan == "local_logits":
        refuse_other_shards(family, mesh)


def run(compiled: nn.Module, forest: PrefixForest) -> Result:
    """Weigh log-probabilities and entropies, so that both are differentiated."""
    compiled.zero_grad()
    out = compiled(forest, entropy=True)
    weights = edge_weights(forest.num_edges)
    (out.logprobs * weights + out.entropy * weights.flip(0)).sum().backward()
    gradients = {name: whole(p.grad) for name, p in compiled.named_parameters()}
    return Result(out.logprobs.detach(), gradients)


def whole(grad: Tensor | None) -> Tensor | None:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def refuse_other_shards(family: str, mesh: Any) -> None:
    model = build_model(family, tie_word_embeddings=False)
    parallelize_module(model, mesh, {"lm_head": RowwiseParallel(input_layouts=Replicate())})
    try:
        prefix_compile(model)
    except UnsupportedModelError as error:
        assert "not one sharded by vocabulary" in str(error), error
    else:
        raise AssertionError("a head sharded by its input must be refused")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    main(*sys.argv[1:])
    dist.destroy_process_group()
