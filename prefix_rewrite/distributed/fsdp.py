"""FSDP2: a forest runs on gathered parameters, and their gradients return to the shards.

`fully_shard`'s hooks gather each wrapped module's parameters before its forward, and would cut
the captured graph at each of them; the proof and the rewrite need the whole. So while a forest
runs the hooks stand aside, and the graph itself gathers. Its inputs are *stand-ins*, tensors of
the whole parameters' shapes without memory. Where a module uses one, `gather_parameter` gathers
it; it is freed after that module and gathered again in the backward, as FSDP2 does.

Compilers other than the eager one plan memory themselves: for them every parameter is gathered
before the graph, and freed with it (as with `reshard_after_forward=False`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial

from prefix_rewrite.distributed.changes import changes_of, watch_optimisers
from prefix_rewrite.errors import Finding, PrefixRewriteError

_MANAGED = "_is_fsdp_managed_module"  # how FSDP marks a module for Dynamo


def fsdp_findings(model: nn.Module) -> Iterator[Finding]:
    """Refuse what gathering here would not do as FSDP2 does."""
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in _groups(module):
            policy = group.mp_policy
            if any((policy.param_dtype, policy.reduce_dtype, policy.output_dtype)):
                what, remedy = "a mixed-precision policy", "use autocast, or a model in bf16"
                yield Finding(f"fully_shard is given {what}", remedy, name)
            if any(param.offload_to_cpu for param in group.fsdp_params):
                yield Finding("fully_shard offloads parameters", "leave offload_policy out", name)
            if any(param.is_dtensor for param in group.fsdp_params):
                what = "fully_shard shards what tensor parallel has sharded"
                yield Finding(what, "use one of them", name)
        if len(module._get_fsdp_state()._modules) > 1:
            yield Finding("fully_shard wraps several modules as one", "wrap each", name)


def is_sharded(model: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in model.modules())


@contextmanager
def parameters_whole(model: nn.Module, *, late: bool) -> Iterator[None]:
    """Let the model's sharded parameters be whole tensors, and its FSDP hooks stand aside.

    Args:
        model: the model, sharded or not.
        late: let them be stand-ins, which the graph gathers; else gather them here.
    """
    with ExitStack() as stack:
        for module in model.modules():
            if module.__dict__.pop(_MANAGED, False):  # else Dynamo makes its sizes symbolic
                stack.callback(setattr, module, _MANAGED, True)
            if isinstance(module, FSDPModule):
                module.reshard()
                stack.callback(_take_hooks(module))
                for group in _groups(module):
                    _replace_parameters(group, late, stack.callback)
        yield


def _replace_parameters(group: Any, late: bool, later: Callable[..., Any]) -> None:
    for param in group.fsdp_params:
        shard = param.sharded_param
        factor = group.gradient_divide_factor or shard.device_mesh.size()
        sharded = Sharded(shard, factor)
        whole = sharded.stand_in() if late else sharded.gather()
        torch._dynamo.mark_static(whole)  # sizes of a parameter never change
        info = param._module_info
        modules = (info.module, *info.shared_modules)
        names = (info.param_name, *info.shared_param_names)
        for owner, name in zip(modules, names, strict=True):
            later(owner._parameters.__setitem__, name, owner._parameters[name])
            owner._parameters[name] = whole


class Sharded(NamedTuple):
    """A sharded parameter, and what its ranks' summed gradients are divided by."""

    shard: DTensor
    factor: float

    def stand_in(self) -> Tensor:
        """Return a tensor like the whole parameter, without memory."""
        local = self.shard.to_local()
        empty = torch.empty_strided(
            self.shard.shape, self.shard.stride(), dtype=local.dtype, device=local.device
        )
        empty.untyped_storage().resize_(0)
        _mark(empty, self)
        return empty.requires_grad_(self.shard.requires_grad)

    def gather(self) -> Tensor:
        """Return the whole parameter; its gradient goes to the shards."""
        whole = _Gather.apply(self.shard, self.factor)
        _mark(whole, self)
        return whole


class _Gather(torch.autograd.Function):
    """A sharded parameter as a whole tensor; its gradient is the mean over the mesh, sharded."""

    @staticmethod
    def forward(ctx: Any, shard: DTensor, factor: float) -> Tensor:
        ctx.mesh, ctx.placements, ctx.factor = shard.device_mesh, shard.placements, factor
        return shard.full_tensor()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[DTensor, None]:
        whole = DTensor.from_local(grad / ctx.factor, ctx.mesh, [Partial()] * ctx.mesh.ndim)
        return whole.redistribute(placements=ctx.placements), None


def _mark(tensor: Tensor, sharded: Sharded) -> None:
    """Mark the storage, which views of the tensor share."""
    tensor.untyped_storage()._prefix_rewrite_sharded = sharded  # type: ignore[attr-defined]


def _sharded_of(tensor: Tensor) -> Sharded | None:
    return getattr(tensor.untyped_storage(), "_prefix_rewrite_sharded", None)


def gather_parameter(value: Tensor) -> Tensor:
    """Gather what a stand-in stands for; any other tensor is returned as it is."""
    sharded = _sharded_of(value)
    return value if sharded is None else sharded.gather()


def gathering_again(run: Callable[..., Any]) -> Callable[..., Any]:
    """Let what `run` saves for its backward be gathered again there, not kept whole."""

    watch_optimisers()

    def run_and_save_shards(*arguments: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(_save, lambda saved: saved.restore()):
            return run(*arguments)

    return run_and_save_shards


class _SavedValue(NamedTuple):
    tensor: Tensor
    version: int

    def restore(self) -> Tensor:
        _require(self.tensor._version == self.version)
        return self.tensor


class _SavedParameter(NamedTuple):
    """A view of a gathered parameter, by its shard."""

    sharded: Sharded
    changes: tuple[int, ...]
    view: tuple[Any, ...]

    def restore(self) -> Tensor:
        _require(changes_of(self.sharded.shard) == self.changes)
        with torch.no_grad():
            return self.sharded.shard.full_tensor().as_strided(*self.view)


def _save(tensor: Tensor) -> _SavedValue | _SavedParameter:
    sharded = None if isinstance(tensor, DTensor) else _sharded_of(tensor)
    if sharded is None:
        return _SavedValue(tensor, tensor._version)
    view = (tensor.size(), tensor.stride(), tensor.storage_offset())
    return _SavedParameter(sharded, changes_of(sharded.shard), view)


def _require(unchanged: bool) -> None:
    """Autograd does not compare versions of what passes through hooks."""
    if not unchanged:
        raise PrefixRewriteError(
            "a parameter or a value was changed in place between a forest's forward and its "
            "backward; call backward() before the optimiser's step"
        )


def _take_hooks(module: Any) -> Callable[[], None]:
    """Take FSDP's hooks off a module; return what puts every hook back in its place."""
    state = module._get_fsdp_state()
    before, after = state._pre_forward_hook_handle.id, state._post_forward_hook_handle.id
    taken = (
        (module._forward_pre_hooks, before),
        (module._forward_pre_hooks_with_kwargs, before),
        (module._forward_hooks, after),
    )
    kept = [(table, dict(table)) for table, _ in taken]
    for table, hook in taken:
        table.pop(hook, None)

    def restore() -> None:
        for table, hooks in kept:
            table.clear()
            table.update(hooks)

    return restore


def _groups(module: Any) -> list[Any]:
    state: Any = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if several is None else several
    return [group for group in groups if group is not None]
