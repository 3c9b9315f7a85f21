"""FSDP2: a forest runs on gathered parameters, and their gradients return to the shards.

`fully_shard`'s hooks gather each wrapped module's parameters before its forward, and would cut
the captured graph at each of them; the proof and the rewrite need the whole. So while a forest
runs the hooks stand aside: every sharded parameter is gathered once, by an op whose backward
reduces the gradient and scatters it, and is a whole tensor while the graph is captured or called.
The numbers are FSDP2's own, with parameters kept from forward to backward (as with
`reshard_after_forward=False`); the autograd graph frees them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial

from prefix_rewrite.errors import Finding

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


@contextmanager
def parameters_gathered(model: nn.Module) -> Iterator[None]:
    """Let the model's sharded parameters be whole tensors, and its FSDP hooks stand aside."""
    with ExitStack() as stack:
        for module in model.modules():
            if module.__dict__.pop(_MANAGED, False):  # else Dynamo makes its sizes symbolic
                stack.callback(setattr, module, _MANAGED, True)
            if isinstance(module, FSDPModule):
                module.reshard()
                stack.callback(_take_hooks(module))
                for group in _groups(module):
                    _gather_group(group, stack.callback)
        yield


def _gather_group(group: Any, later: Callable[..., Any]) -> None:
    for param in group.fsdp_params:
        shard = param.sharded_param
        whole = _Gather.apply(shard, group.gradient_divide_factor or shard.device_mesh.size())
        torch._dynamo.mark_static(whole)  # sizes of a parameter never change
        info = param._module_info
        modules = (info.module, *info.shared_modules)
        names = (info.param_name, *info.shared_param_names)
        for owner, name in zip(modules, names, strict=True):
            later(owner._parameters.__setitem__, name, owner._parameters[name])
            owner._parameters[name] = whole


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
