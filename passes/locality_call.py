"""Reading one op of a captured graph: its name whatever its spelling, its arguments by name."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from prefix_rewrite.passes.locality_layout import (
    SAME,
    PerToken,
    Refusal,
    State,
    Tokens,
)
from prefix_rewrite.passes.nodes import shape_of, value_of

_OPERATORS = {
    "and_": "bitwise_and",
    "floordiv": "floor_divide",
    "inv": "bitwise_not",
    "invert": "bitwise_not",
    "lshift": "bitwise_left_shift",
    "mod": "remainder",
    "or_": "bitwise_or",
    "pos": "positive",
    "rshift": "bitwise_right_shift",
    "truediv": "div",
    "xor": "bitwise_xor",
}
_IN_PLACE_OPERATORS = {
    "iadd": "add",
    "iand": "bitwise_and",
    "ifloordiv": "floor_divide",
    "imatmul": "matmul",
    "imod": "remainder",
    "imul": "mul",
    "ior": "bitwise_or",
    "ipow": "pow",
    "isub": "sub",
    "itruediv": "div",
    "ixor": "bitwise_xor",
    "setitem": "setitem",
}
_KEYWORDS = {"self": "input", "axis": "dim", "axes": "dims", "keepdims": "keepdim", "ord": "p"}
_KEYWORDS |= {"split_size_or_sections": "sizes", "split_size": "sizes", "chunks": "sizes"}
# Keywords that change neither which elements are read nor where the result is put.
_HARMLESS = frozenset(
    {"_stacklevel", "alpha", "copy", "correction", "device", "dtype", "eps", "include_self"}
    | {"inplace", "layout", "memory_format", "non_blocking", "pin_memory", "reduce"}
    | {"requires_grad", "unbiased", "value"}
)
_TORCH_MODULES = ("torch.functional", "torch.nn.functional", "torch._C", "torch.special")


def read_op(node: Node) -> tuple[str, bool]:
    """Return an op's name and whether it changes its first argument in place.

    A function of somebody else's is named with its module, so that no rule for torch's own
    function of that name is taken for it.
    """
    if node.op == "call_method":
        name = str(node.target)
        in_place = name.endswith("_") and not name.endswith("__")
        return (name[:-1] if in_place else name), in_place or _asks_in_place(node)
    target: Any = node.target
    name = getattr(target, "__name__", "") or str(target)
    module = getattr(target, "__module__", None) or ""
    if target is getattr:
        return str(node.args[1]), False
    if module == "_operator":
        if name in _IN_PLACE_OPERATORS:
            return _IN_PLACE_OPERATORS[name], True
        return _OPERATORS.get(name, name), False
    if isinstance(target, torch._ops.OpOverloadPacket):
        schemas = [getattr(target, overload)._schema for overload in target.overloads()]
        return str(target), any(schema.is_mutable for schema in schemas)
    if isinstance(target, torch._ops.OpOverload):
        return str(target), target._schema.is_mutable
    if (
        isinstance(target, types.MethodDescriptorType)
        and target.__objclass__ in torch.Tensor.mro()
    ):
        module = "torch"  # a method of Tensor
    if module == "torch.nn.functional" and name in ("fold", "unfold"):  # not Tensor.unfold
        return f"{module}.{name}", False
    if module == "torch" or module.startswith(_TORCH_MODULES):
        in_place = name.endswith("_") and not name.endswith("__")
        return (name[:-1] if in_place else name), in_place or _asks_in_place(node)
    return f"{module}.{name}", False


def is_torchs(node: Node) -> bool:
    """Say whether an op is torch's own, or registered with a schema that tells what it changes."""
    target: Any = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return False
    if isinstance(target, (str, torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return True
    if isinstance(target, types.MethodDescriptorType):
        return target.__objclass__ in torch.Tensor.mro()
    module = getattr(target, "__module__", None) or ""
    return module.partition(".")[0] in ("_operator", "builtins", "math", "torch")


def _asks_in_place(node: Node) -> bool:
    """`relu(x, True)` and `relu(x, inplace=True)`: no other activation's flag is a bool."""
    name = getattr(node.target, "__name__", "")
    flags = {"relu": 1, "relu6": 1, "silu": 1, "mish": 1, "selu": 1, "hardswish": 1}
    flags |= {"hardsigmoid": 1, "elu": 2, "celu": 2, "leaky_relu": 2, "hardtanh": 3}
    flags |= {"dropout": 3, "threshold": 3, "rrelu": 4}
    flag = flags.get(name, len(node.args))
    return bool(node.kwargs.get("inplace")) or node.args[flag : flag + 1] == (True,)


@dataclass
class Call:
    """One op, its arguments and their states.

    Attributes:
        op: its name.
        in_place: whether it changes its first argument.
        tokens: the model's number of tokens.
        states: states of the nodes before it.
        names: names of its arguments, by position; one that starts with '*' takes the rest.
    """

    node: Node
    op: str
    in_place: bool
    tokens: Tokens
    states: Mapping[Node, State]
    names: tuple[str, ...] = field(default=())

    def state(self, value: Any) -> State:
        return self.states[value] if isinstance(value, Node) else SAME

    @cached_property
    def inputs(self) -> list[Node]:
        """Tensors it takes, and tuples of tensors."""
        return [n for n in self.node.all_input_nodes if not _is_number(value_of(n))]

    @property
    def output(self) -> Any:
        return value_of(self.node)

    @property
    def shape(self) -> tuple[Any, ...]:
        return shape_of(self.node)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Arguments by name; numbers that the graph computes are written as numbers.

        Raises:
            Refusal: one is given that the rule for the op doesn't know.
        """
        named = [name for name in self.names if not name.startswith("*")]
        rest = [name[1:] for name in self.names if name.startswith("*")]
        given = dict(zip(named, self.node.args, strict=False))
        more = self.node.args[len(named) :]
        if more and not rest:
            raise Refusal(f"is given {len(self.node.args)} arguments, which its rule doesn't know")
        if rest:
            spread = more[0] if len(more) == 1 and isinstance(more[0], (tuple, list)) else more
            given[rest[0]] = tuple(spread) if more else None
        for keyword, value in self.node.kwargs.items():
            name = _KEYWORDS.get(keyword, keyword)
            if name not in (*named, *rest) and name not in _HARMLESS and value is not None:
                raise Refusal(f"is given {keyword}={value}, which its rule doesn't know")
            given[name] = value
        return {name: map_aggregate(value, self._written) for name, value in given.items()}

    def _written(self, argument: Any) -> Any:
        """Write a number out, unless it is a size that depends on the tokens."""
        value = value_of(argument)
        if not isinstance(value, torch.SymInt):
            return value if isinstance(value, int) else argument
        if value.node.expr.is_Integer:
            return int(value.node.expr)
        if not self.tokens.in_number(value):
            raise Refusal("is given a number that the graph doesn't fix", "use a constant")
        return argument

    def get(self, name: str, default: Any = None) -> Any:
        value = self.arguments.get(name)
        return default if value is None else value

    def only(self, name: str) -> PerToken:
        """Return the state of the one argument that may have tokens.

        Raises:
            Refusal: another one has them, or this one has none.
        """
        node = self.get(name)
        state = self.state(node)
        others = [n for n in self.inputs if n is not node and self.state(n) != SAME]
        if others or not isinstance(state, PerToken):
            raise Refusal(f"takes tokens elsewhere than in its {name}")
        return state

    def dims(self, name: str, ndim: int) -> set[int] | None:
        """Read dimensions, counted from the first; None where it takes them all."""
        value = self.get(name)
        if value is None or isinstance(value, bool) or value in ((), []):
            return None
        given = value if isinstance(value, (tuple, list)) else (value,)
        return {int(dim) % ndim for dim in given}


def _is_number(value: Any) -> bool:
    """Numbers, sizes and None: what they tell is read from the recorded value itself."""
    if isinstance(value, (tuple, list)):
        return not any(not _is_number(item) for item in value)
    return not isinstance(value, torch.Tensor)


# Ops whose result may be another name of their input's storage.
_VIEWS = frozenset(
    {"alias", "as_strided", "broadcast_to", "chunk", "contiguous", "detach", "diagonal", "expand"}
    | {"expand_as", "flatten", "float", "getitem", "imag", "movedim", "narrow", "permute", "real"}
    | {"ravel", "reshape", "reshape_as", "select", "split", "split_with_sizes", "squeeze", "t"}
    | {"tensor_split", "to", "transpose", "type", "type_as", "unbind", "unflatten", "unfold"}
    | {"unsqueeze", "view", "view_as", "view_as_complex", "view_as_real", "swapdims"}
    | {"bfloat16", "bool", "byte", "double", "half", "int", "long", "requires_grad", "dropout"}
    | {"H", "T", "_get_data_attr", "data", "mH", "mT", "moveaxis", "swapaxes"}
)


# Ops that return several tensors, each with a storage of its own.
_PAIRS = {"kthvalue", "max", "median", "min", "mode", "sort", "topk"}


def storage_of(node: Node) -> Node:
    """Walk back from a tensor to the one that may own its storage."""
    while node.op.startswith("call") and node.all_input_nodes:
        op, in_place = read_op(node)
        if op not in _VIEWS and not in_place:
            break
        source = node.all_input_nodes[0]
        if op == "getitem" and source.op.startswith("call") and read_op(source)[0] in _PAIRS:
            break
        node = source
    return node


def is_changed(node: Node) -> bool:
    """Say whether a tensor is changed in place somewhere, by any name of its storage."""
    pending = [storage_of(node)]
    while pending:
        name = pending.pop()
        for user in name.users:
            if not user.op.startswith("call") or user.all_input_nodes[0] is not name:
                continue
            op, in_place = read_op(user)
            if in_place:
                return True
            if op in _VIEWS:
                pending.append(user)
    return False
