"""What each rank does in the context-parallel tests: `cp_worker.py SCENARIO [ARGUMENTS]`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from families import VOCAB, build_model
from forests import SHAPES, Tree, calls_of
from oracle import (
    Result,
    assert_equal_results,
    edge_weights,
    run_forest,
    run_rows,
    take_gradients,
)
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from wide import fp64_throughout

from prefix_rewrite import (
    CapturedCall,
    LayoutError,
    PrefixForest,
    UnsupportedModelError,
    prefix_compile,
)
from prefix_rewrite.distributed.rank_layout import take_share
from prefix_rewrite.errors import PrefixRewriteError

SMALL: dict[str, list[Tree]] = {
    "no_call": [],
    "two_tokens": [(2, [])],
    "three_roots": [(2, []), (1, []), (2, [])],
    "seven_tokens": [(2, [(2, []), (1, [(1, []), (1, [])])])],
    "thirteen_tokens": [(4, [(3, [(1, []), (1, [])]), (4, [])])],
}
EXACT = {"logprobs": 1e-10, "gradients": 1e-10}
SINGLE = {"logprobs": 1e-5, "gradients": 1e-5}
# Among two tokens the queries' gradient is zero: in fp32 rounding of 1e-7 of the largest is left.
SINGLE_OF_FEW = SINGLE | {"noise": 1e-2}


def forests() -> dict[str, PrefixForest]:
    return {name: forest_of(trees) for name, trees in (SHAPES | SMALL).items()}


def forest_of(trees: Sequence[Tree], seed: int = 0) -> PrefixForest:
    return PrefixForest.from_calls(calls_of(trees, seed=seed))


def run_ranks_forest(
    compiled: Any, forest: PrefixForest, weights: Tensor | None = None, **options: Any
) -> Result:
    """As `run_forest`, with the gradients added up over the group."""
    weights = edge_weights(forest.num_edges) if weights is None else weights
    compiled.zero_grad()
    out = compiled(forest, **options)
    (out.logprobs * weights.to(out.logprobs)).sum().backward()
    compiled.sync_gradients()
    return Result(out.logprobs.detach(), take_gradients(compiled))


def from_rank_0(make: Callable[[], Any]) -> Any:
    """Make an object on rank 0, the one of a device alone, and give it to all."""
    made = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made, src=0)
    return made[0]


def group_of(size: int) -> DeviceMesh:
    return DeviceMesh("cpu", list(range(size)))


def parity(family: str, dtype: str, *sizes: str) -> None:
    """Groups of each size give what one device alone gives, on every forest.

    In fp64 the model's own casts to fp32 are widened: gradients of a weight that is used in fp32
    would depend on the order of summation.
    """
    model = build_model(family, dtype=getattr(torch, dtype))
    bounds, backend = SINGLE_OF_FEW, "eager"
    if dtype == "float64":
        bounds, backend = EXACT, fp64_throughout

    def run_alone() -> dict[str, Result]:
        compiled = prefix_compile(model, backend=backend)
        return {name: run_forest(compiled, forest) for name, forest in forests().items()}

    alone = from_rank_0(run_alone)
    for size in map(int, sizes):
        mesh = group_of(size)
        if dist.get_rank() < size:
            compiled = prefix_compile(model, cp_mesh=mesh, backend=backend)
            for name, forest in forests().items():
                got = run_ranks_forest(compiled, forest)
                check(f"{name} on {size} ranks", got, alone[name], **bounds)
        dist.barrier()


def check(name: str, got: Result, expected: Result, **bounds: float) -> None:
    try:
        assert_equal_results(got, expected, **bounds)
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from None


def crossings(family: str) -> None:
    """Only the edges of rank 1 are weighted; all options; ranks without edges; no gradients."""
    model = build_model(family, dtype=torch.float64)
    alone = prefix_compile(model)
    size = dist.get_world_size()
    compiled = prefix_compile(model, cp_mesh=init_device_mesh("cpu", (size,)))
    forest = forest_of(SHAPES["fork_in_chunk"])
    owner = take_share(forest, 0, size).partition.owner
    weights = edge_weights(forest.num_edges).clone()
    weights[torch.from_numpy(owner[forest.edges.source] != 1)] = 0
    assert set(owner[: forest.edges.source.min()]) >= {0, 1}, "no prefix on another rank"
    got = run_ranks_forest(compiled, forest, weights)
    check("edges of rank 1 only", got, run_forest(alone, forest, weights), **EXACT)

    one_edge = PrefixForest.from_calls([CapturedCall(list(range(3, 20)), [5])])
    check("one edge", run_ranks_forest(compiled, one_edge), run_forest(alone, one_edge), **EXACT)
    no_edge = PrefixForest.from_calls([CapturedCall(list(range(3, 20)), [])])
    assert compiled(no_edge).logprobs.shape == (0,)
    compiled(no_edge).logprobs.sum().backward()
    compiled.zero_grad()

    with torch.no_grad():
        options = {"temperature": 0.7, "entropy": True, "logits": True}
        got, expected = compiled(forest, **options), alone(forest, **options)
    for field in ("logprobs", "entropy", "logits"):
        torch.testing.assert_close(
            getattr(got, field), getattr(expected, field), rtol=0, atol=1e-10
        )
    for mine, reference in zip(got.per_call(), expected.per_call(), strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=1e-10)

    order = edge_weights(forest.num_edges)
    first, second = compiled(forest).logprobs, compiled(one_edge).logprobs  # two in flight
    ((first * order).sum() + second.sum()).backward()
    compiled.sync_gradients()
    both = take_gradients(compiled)
    loss = (alone(forest).logprobs * order).sum() + alone(one_edge).logprobs.sum()
    loss.backward()
    check(
        "two forests in flight",
        Result(first.detach(), both),
        Result(first.detach(), take_gradients(model)),
        **EXACT,
    )


def disagreements() -> None:
    """Ranks that differ, or of which one fails, all raise; the group works on afterwards."""
    rank = dist.get_rank()
    model = build_model("llama")
    compiled = prefix_compile(model, cp_mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    calls = calls_of(SHAPES["star"])
    forest = PrefixForest.from_calls(calls)
    changed = calls_of(SHAPES["star"])
    ids = changed[0].token_ids.copy()
    ids[-1] = 3 if ids[-1] != 3 else 4
    changed[0] = CapturedCall(ids[: changed[0].num_tokens - 1], ids[-1:])
    other = PrefixForest.from_calls(changed)
    too_large = PrefixForest.from_calls([CapturedCall([3, VOCAB], [4])])

    def expect(kind: type[Exception], text: str, given: Any, **options: Any) -> None:
        try:
            compiled(given, **options)
        except kind as error:
            assert text in str(error), f"rank {rank}: {error}"
        else:
            raise AssertionError(f"rank {rank} went on with {text!r}")

    differs = "must be given the same forest"
    expect(LayoutError, differs, forest if rank == 0 else other)
    expect(LayoutError, differs, forest, temperature=1.0 + rank)
    expect(LayoutError, differs, forest, entropy=rank == 1)
    with torch.set_grad_enabled(rank == 0):
        expect(LayoutError, differs, forest)
    expect(
        LayoutError,
        f"below the model's vocabulary of {VOCAB}",
        forest if rank == 0 else too_large,
    )
    expect(PrefixRewriteError, "temperature must be above 0", forest, temperature=float(1 - rank))
    got = run_ranks_forest(compiled, forest)
    check("after errors", got, run_rows(model, calls), **SINGLE)


def killed() -> None:
    """Rank 1 dies before a forward; nobody must wait for it for ever."""
    compiled = prefix_compile(
        build_model("llama"), cp_mesh=init_device_mesh("cpu", (dist.get_world_size(),))
    )
    forest = forest_of(SHAPES["star"])
    run_ranks_forest(compiled, forest)
    if dist.get_rank() == 1:
        os._exit(17)
    run_ranks_forest(compiled, forest)
    raise AssertionError("rank 0 went on alone")


def load_balancing(family: str) -> None:
    """The experts' loss of the whole forest on every rank, and its gradient."""
    model = build_model(family, output_router_logits=True)
    alone = prefix_compile(model)
    compiled = prefix_compile(model, cp_mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    for shape in ("no_call", "two_tokens", "three_roots", "nested"):
        calls = calls_of((SHAPES | SMALL)[shape])
        forest = PrefixForest.from_calls([*calls, *calls[:1]])  # one call twice
        found = []
        for run in (alone, compiled):
            loss = run(forest).aux_loss
            loss.backward()
            if run is compiled:
                compiled.sync_gradients()
            found.append(Result(loss.detach()[None], take_gradients(run)))
        check(shape, found[1], found[0], **SINGLE)


def ddp(family: str) -> None:
    """DDP over a (dp, cp) mesh: the mean over all ranks of cp times the loss is the dp mean."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model = build_model(family, dtype=torch.float64)
    alone = prefix_compile(model)
    names = ("star", "nested"), ("many_roots", "fork_in_conv")
    mine = names[mesh["dp"].get_local_rank()]
    compiled = DistributedDataParallel(prefix_compile(model, cp_mesh=mesh["cp"]))

    def gradients(step: Callable[[PrefixForest], None], shapes: Sequence[str]) -> Result:
        model.zero_grad()
        for shape in shapes:
            step(forest_of(SHAPES[shape]))
        return Result(torch.empty(0), take_gradients(model))

    def step_alone(forest: PrefixForest) -> None:
        (alone(forest).logprobs * edge_weights(forest.num_edges)).sum().div(2).backward()

    def step(forest: PrefixForest) -> None:
        logprobs = compiled(forest).logprobs
        (mesh["cp"].size() * (logprobs * edge_weights(forest.num_edges)).sum()).backward()

    expected = gradients(step_alone, (names[0][0], names[1][0]))
    check("DDP", gradients(step, mine[:1]), expected, **EXACT)

    def step_unsynced(forest: PrefixForest) -> None:
        with compiled.no_sync():
            step(forest)

    local = gradients(step_unsynced, mine[:1])
    flat = torch.cat([g.flatten() for g in local.gradients.values() if g is not None])
    every = [torch.empty_like(flat) for _ in range(4)]
    dist.all_gather(every, flat)
    assert not torch.equal(every[0], every[1]), "no_sync reduced gradients"

    def accumulate() -> Result:
        model.zero_grad()
        step_unsynced(forest_of(SHAPES[mine[0]]))
        step(forest_of(SHAPES[mine[1]]))
        return Result(torch.empty(0), take_gradients(model))

    expected = gradients(step_alone, (*names[0], *names[1]))
    check("DDP after no_sync", accumulate(), expected, **EXACT)


def shard(model: Any, mesh: DeviceMesh, layers: Any, **options: Any) -> None:
    """FSDP2 as it is usually done: each layer, then the root."""
    for layer in layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def whole_gradients(model: Any) -> dict[str, Tensor | None]:
    gradients = {}
    for name, p in model.named_parameters():
        assert p.grad is None or isinstance(p.grad, DTensor), f"{name} is not sharded"
        gradients[name] = None if p.grad is None else p.grad.full_tensor()
    model.zero_grad()
    return gradients


def fsdp(family: str) -> None:
    """Two data-parallel groups of two context-parallel ranks, parameters sharded over all four."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    everyone = mesh._flatten("everyone")
    model, alone = build_model(family), build_model(family)
    if family == "bamba":
        model.gradient_checkpointing_enable()
    shard(model, everyone, model.model.layers)
    compiled = prefix_compile(model, cp_mesh=mesh["cp"])
    shapes = (SHAPES["nested"], SHAPES["star"])
    for step in range(2):  # the second after an update by an optimiser that sees the shards
        data = [calls_of(shape, seed=step) for shape in shapes]
        rows = [run_rows(alone, calls) for calls in data]
        forest = PrefixForest.from_calls(data[rank // 2])
        out = compiled(forest)
        weights = edge_weights(forest.num_edges).to(out.logprobs)
        (2 * (out.logprobs * weights).sum()).backward()  # cp's size: FSDP takes a mean
        mean = {
            name: None if g is None else (g + rows[1].gradients[name]) / 2
            for name, g in rows[0].gradients.items()
        }
        found = whole_gradients(model)
        assert_equal_results(
            Result(out.logprobs.detach(), found), Result(rows[rank // 2].logprobs, mean), **SINGLE
        )
        update(model, found)
        update(alone, mean)


def update(model: Any, gradients: dict[str, Tensor | None]) -> None:
    """One step of SGD; each parameter takes its part of its gradient."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            grad = gradients[name]
            if grad is not None:
                whole = isinstance(p, DTensor)
                p -= 0.1 * (
                    distribute_tensor(grad, p.device_mesh, p.placements) if whole else grad
                )


def fsdp_alone() -> None:
    """FSDP2 without context parallel: ties, checkpoints, an ordinary call before and after."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for family in ("llama", "nemotron_h"):
        model, alone = build_model(family), build_model(family)
        for each in (model, alone):
            each.gradient_checkpointing_enable()
        calls = calls_of(SHAPES["nested"], seed=dist.get_rank())
        expected = run_rows(alone, calls)
        shard(model, mesh, model.model.layers)
        ids = torch.arange(3, 12)[None]
        before = model(input_ids=ids, use_cache=False).logits
        compiled = prefix_compile(model)
        forest = PrefixForest.from_calls(calls)
        out = compiled(forest)
        (out.logprobs * edge_weights(forest.num_edges).to(out.logprobs)).sum().backward()
        gradients = whole_gradients(model)
        assert_equal_results(
            Result(out.logprobs.detach(), {}), Result(expected.logprobs, {}), **SINGLE
        )
        for name, grad in expected.gradients.items():
            if grad is not None:
                dist.all_reduce(grad)
                expected.gradients[name] = grad / dist.get_world_size()
        assert_equal_results(
            Result(torch.empty(0), gradients), Result(torch.empty(0), expected.gradients), **SINGLE
        )
        assert torch.equal(compiled(input_ids=ids, use_cache=False).logits, before)


def fsdp_memory() -> None:
    """Parameters are whole only while a module uses them, in the forward and in the backward."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    forest = forest_of(SHAPES["nested"])
    for family, checkpoints in (("llama", False), ("zamba2", False), ("llama", True)):
        model: Any = build_model(family)
        if checkpoints:
            model.gradient_checkpointing_enable()
        sizes, layer = ([p.nbytes for p in m.parameters()] for m in (model, model.model.layers[1]))
        shard(model, mesh, model.model.layers)
        compiled = prefix_compile(model)
        with gathered_bytes() as gathered:
            out = compiled(forest)
            assert gathered.alive() == 0, "parameters are kept for the backward"
            out.logprobs.sum().backward()
        assert gathered.alive() == 0
        # What a checkpoint ran again, a layer, is kept whole until its backward ends.
        limit = sum(layer) if checkpoints else 1.5 * max(sizes)
        assert max(sizes) <= gathered.most <= limit < sum(sizes) / 2, (family, gathered.most)


class gathered_bytes:
    """Counts the bytes of whole parameters that are alive whenever another one is gathered."""

    def __enter__(self) -> gathered_bytes:
        self.storages: list[tuple[StorageWeakRef, int]] = []
        self.most = 0
        self.full_tensor = DTensor.full_tensor

        def full_tensor(shard: DTensor, **options: Any) -> Tensor:
            whole = self.full_tensor(shard, **options)
            storage = whole.untyped_storage()
            self.storages.append((StorageWeakRef(storage), storage.nbytes()))
            self.most = max(self.most, self.alive())
            return whole

        DTensor.full_tensor = full_tensor
        return self

    def __exit__(self, *error: Any) -> None:
        DTensor.full_tensor = self.full_tensor

    def alive(self) -> int:
        return sum(size for storage, size in self.storages if not storage.expired())


def fsdp_changed_parameters() -> None:
    """An optimiser's step between forward and backward must not give a wrong gradient."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = build_model("llama")
    shard(model, mesh, model.model.layers)
    compiled = prefix_compile(model)
    forest = forest_of(SHAPES["star"])
    for options in ({"foreach": True}, {"foreach": False}, {"fused": True}):
        optimiser = torch.optim.AdamW(model.parameters(), **options)
        compiled(forest).logprobs.sum().backward()
        out = compiled(forest)
        optimiser.step()
        try:
            out.logprobs.sum().backward()
        except PrefixRewriteError as error:
            assert "between a forest's forward and its backward" in str(error)
        else:
            raise AssertionError(f"the gradient is of parameters after the step: {options}")


def fsdp_refusals() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for options, match in (
        ({"mp_policy": policy}, "mixed-precision policy"),
        ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, "offloads parameters"),
    ):
        model: Any = build_model("llama")
        shard(model, mesh, model.model.layers, **options)
        try:
            prefix_compile(model)
        except UnsupportedModelError as error:
            assert all(match in finding.what for finding in error.findings), error
        else:
            raise AssertionError(f"{match} must be refused")


SCENARIOS = {
    f.__name__: f
    for f in (
        parity,
        crossings,
        disagreements,
        killed,
        load_balancing,
        ddp,
        fsdp,
        fsdp_alone,
        fsdp_memory,
        fsdp_changed_parameters,
        fsdp_refusals,
    )
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    SCENARIOS[sys.argv[1]](*sys.argv[2:])
    dist.destroy_process_group()
