"""A context-parallel group: its ranks agree on each call, share results, add up gradients."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from prefix_rewrite.distributed.collectives import GatherRows, process_group
from prefix_rewrite.errors import LayoutError, PrefixRewriteError
from prefix_rewrite.forest import PrefixForest
from prefix_rewrite.layout import EdgeOrder

Prepared = TypeVar("Prepared")
_FAILED = -1


class ContextGroup:
    """The ranks along a one-dimensional device mesh.

    Attributes:
        name: of the process group, by which torch resolves it.
        rank, size: of this process in it.
    """

    def __init__(self, mesh: Any):
        """Read a mesh.

        Raises:
            PrefixRewriteError: the mesh is no one-dimensional DeviceMesh.
        """
        if getattr(mesh, "ndim", None) != 1:
            raise PrefixRewriteError(
                f"cp_mesh must be a one-dimensional DeviceMesh, got {mesh}; pass one dimension, "
                "e.g. init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'cp'))['cp']"
            )
        self.name = mesh.get_group().group_name
        self.rank, self.size = mesh.get_local_rank(), mesh.size()

    def agree(
        self,
        prepare: Callable[[], Prepared],
        fingerprint: Callable[[Prepared], bytes],
        device: torch.device,
    ) -> Prepared:
        """Prepare a call on every rank; go on only if it worked on all, and for the same call.

        Raises:
            LayoutError: another rank failed, or the ranks were given different calls.
            Exception: whatever `prepare` raised here.
        """
        error, prepared, digest = None, None, _FAILED
        try:
            prepared = prepare()
            digest = _digest(fingerprint(prepared))
        except Exception as raised:  # raised again once the others know
            error = raised
        digests = self._all_gather(digest, device)
        if _FAILED in digests:
            messages: list[str | None] = [None] * self.size
            dist.all_gather_object(messages, error and str(error), group=self._group)
            if error is not None:
                raise error
            rank = digests.index(_FAILED)
            raise LayoutError(
                f"rank {rank} of the context-parallel group failed: {messages[rank]}"
            )
        if len(set(digests)) > 1:
            odd = [rank for rank, value in enumerate(digests) if value != digests[0]]
            raise LayoutError(
                "every rank of a context-parallel group must be given the same forest, options "
                f"and mode, got others on rank(s) {odd} than on rank 0; broadcast the calls first"
            )
        assert prepared is not None, "without an error there is a result"
        return prepared

    def in_callers_order(self, rows: Tensor, edges: EdgeOrder) -> Tensor:
        """Turn this rank's edges' rows into all edges' rows, on every rank."""
        return GatherRows.apply(rows, edges.counts, self.name).index_select(0, edges.place)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up the ranks' gradients, in place; where only some ranks have one, all get it."""
        trained = [p for p in parameters if p.requires_grad]
        if not trained:
            return
        has = torch.tensor([p.grad is not None for p in trained], device=trained[0].device).int()
        dist.all_reduce(has, dist.ReduceOp.MAX, group=self._group)
        pending = []
        for parameter, wanted in zip(trained, has.tolist(), strict=True):
            if wanted:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                grad = parameter.grad
                own = grad.to_local() if isinstance(grad, DTensor) else grad
                pending.append(dist.all_reduce(own, group=self._group, async_op=True))
        for work in pending:
            work.wait()

    @property
    def _group(self) -> dist.ProcessGroup:
        return process_group(self.name)

    def _all_gather(self, value: int, device: torch.device) -> list[int]:
        own = torch.tensor([value], dtype=torch.int64, device=device)
        values = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(values, own, group=self._group)
        return [int(value) for value in values]


def forest_bytes(forest: PrefixForest) -> bytes:
    """What a forest is to a layout: its tokens, its branches, its edges."""
    edges, table = forest.edges, forest.segments
    arrays = (table.parent, table.length, forest.token_ids, edges.source, edges.target)
    return b"".join(len(array).to_bytes(8, "little") + array.tobytes() for array in arrays)


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "little")
