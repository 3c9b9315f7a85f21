"""The rules of the token-locality pass, and how one op is judged by them.

A rule states, for a family of ops, where the tokens are in the result (in each of several), or
raises `Refusal`. It is declared with the names of its ops and of their arguments, and is asked
only when the op takes at least one value that has tokens. An op without a rule is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias

import torch
from torch.fx.node import map_aggregate

from prefix_rewrite.passes.locality_call import Call, is_torchs, storage_of
from prefix_rewrite.passes.locality_layout import (
    SAME,
    UNPROVEN,
    PerToken,
    Refusal,
    Special,
    State,
    states_in,
)
from prefix_rewrite.passes.nodes import value_of

Infer: TypeAlias = Callable[[Call], State]


@dataclass(frozen=True)
class Rule:
    """A rule and how the calls it judges are read.

    Attributes:
        names: names of the op's arguments, in order.
        sizes: whether numbers among them are sizes, which may depend on the number of tokens.
        in_place: whether the op may change its first argument in place.
    """

    infer: Infer
    names: tuple[str, ...]
    sizes: bool
    in_place: bool


RULES: dict[str, Rule] = {}
POINTWISE = "pointwise"  # the rule for every op that torch itself tags so
# Judged before RULES: they return None for a call that is not theirs, and may take `Special`.
EXPERT_RULES: dict[str, tuple[tuple[str, ...], Callable[[Call], State | None]]] = {}

_NO_RULE = "has no token-locality rule"
_RULE_WANTED = "use ops that have one, or declare one beside those in passes/locality_*.py"
_READS_SIZE = {"dim", "is_floating_point", "ndimension", "numel", "shape", "size", "stride"}
_DROPOUTS = {"alpha_dropout", "dropout", "dropout1d", "dropout2d", "dropout3d"}
_DROPOUTS |= {"feature_alpha_dropout", "feature_dropout"}
_LOSSES = {"binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy"}
_LOSSES |= {"ctc_loss", "huber_loss", "kl_div", "mse_loss", "nll_loss", "smooth_l1_loss"}
_LOSSES |= {"cross_entropy_loss", "l1_loss", "nll_loss_nd"}
_ALSO_RANDOM = {"binomial", "random"}  # not tagged as such
_RECURRENT = {"gru", "lstm", "rnn_relu", "rnn_tanh"}  # tagged as random for their dropout


def rule(
    *ops: str, args: str, sizes: bool = False, in_place: bool = False
) -> Callable[[Infer], Infer]:
    """Declare a rule for some ops; `args` are their arguments' names, '*name' takes the rest."""

    def declare(infer: Infer) -> Infer:
        for op in ops:
            assert op not in RULES, f"two rules for {op}"
            RULES[op] = Rule(infer, tuple(args.split()), sizes, in_place)
        return infer

    return declare


def expert_rule(*ops: str, args: str) -> Callable[[Any], Any]:
    """Declare a rule that comes first, and leaves a call to the others by returning None."""

    def declare(infer: Callable[[Call], State | None]) -> Callable[[Call], State | None]:
        for op in ops:
            assert op not in EXPERT_RULES, f"two rules for {op}"
            EXPERT_RULES[op] = tuple(args.split()), infer
        return infer

    return declare


def find_rule(op: str) -> Rule | None:
    if op not in RULES and has_tag(op, torch.Tag.pointwise):
        return RULES[POINTWISE]
    return RULES.get(op)


def judge(call: Call) -> State:
    """Return where the tokens are in an op's result.

    Raises:
        Refusal: the op may mix tokens, or depend on how many there are or where they are stored.
    """
    _check_known(call)
    _check_random(call)
    several = call.state(call.node.args[0]) if call.op == "getitem" else SAME
    if isinstance(several, tuple):
        return several[call.node.args[1]]
    states = [found for node in call.inputs for found in states_in(call.state(node))]
    if UNPROVEN in states:
        return _after_refusal(call, states)
    if call.in_place:
        _check_target(call)
    state = _ask(call, states)
    if isinstance(call.output, (tuple, list)) and not isinstance(state, tuple):
        state = (state,) * len(call.output)
    _check_result(call, state)
    return state


def _after_refusal(call: Call, states: list[State]) -> State:
    """Believe the shape as soon as values of proven tokens come in again."""
    guess = call.tokens.by_shape(call.output)
    return guess if guess == SAME or set(states) - {SAME, UNPROVEN} else UNPROVEN


def _ask(call: Call, states: list[State]) -> State:
    if call.op in _READS_SIZE:
        return SAME
    names, infer = EXPERT_RULES.get(call.op, ((), None))
    if infer is not None:
        found = infer(replace(call, names=names))
        if found is not None:
            return found
    for state in states:
        if isinstance(state, Special):
            raise state.misused()
    if all(state == SAME for state in states):
        return _without_tokens(call)
    known = find_rule(call.op)
    if known is None:
        raise Refusal(_NO_RULE, _RULE_WANTED)
    if call.in_place and not known.in_place:
        raise Refusal("changes a tensor's shape or order in place", "use the op that copies")
    if not known.sizes:
        _check_numbers(call)
    return known.infer(replace(call, names=known.names))


def _without_tokens(call: Call) -> State:
    """No input has tokens, so whatever the op does, its result has none, if its shape has none."""
    guess = call.tokens.by_shape(call.output)
    if all(state == SAME for state in states_in(guess)):
        if isinstance(call.output, torch.Tensor):
            _check_numbers(call)
        return guess
    known = RULES.get(call.op)
    if known is None or not known.sizes:
        raise Refusal("makes a tensor as long as the tokens from something that has none")
    return known.infer(replace(call, names=known.names))


def _check_known(call: Call) -> None:
    """Whatever its inputs, some ops do more than a rule could tell."""
    if call.node.kwargs.get("out") is not None:
        raise Refusal("writes into out=", "use what it returns")
    if call.op in _LOSSES:
        raise Refusal(
            "computes a loss in forward, which a forest can't return",
            "call it without labels, and compute the loss from out.logprobs",
        )
    if not is_torchs(call.node):
        raise Refusal(_NO_RULE, _RULE_WANTED)


def _check_random(call: Call) -> None:
    what, remedy = "draws other random numbers for a forest than for its calls", "remove it"
    if call.op in _DROPOUTS:
        given = dict(zip(("input", "p", "training"), call.node.args, strict=False))
        given |= call.node.kwargs
        if not given.get("training", given.get("train", True)) or not given.get("p", 0.5):
            return
        what, remedy = f"of {given.get('p', 0.5)} in training", "set it to 0 or call eval()"
    elif call.op not in _ALSO_RANDOM and (
        call.op in _RECURRENT or not has_tag(call.op, torch.Tag.nondeterministic_seeded)
    ):
        return
    raise Refusal(what, remedy)


def _check_numbers(call: Call) -> None:
    """A number of tokens that is more than a size is another one on a forest than on a call."""
    numbers: list[Any] = []
    map_aggregate((call.node.args, call.node.kwargs), lambda leaf: numbers.append(value_of(leaf)))
    if call.tokens.in_number(numbers):
        raise Refusal(
            "computes with the number of tokens, which differs between a forest and its calls",
            "use position_ids, or a constant",
        )


def _check_target(call: Call) -> None:
    target = storage_of(call.inputs[0])
    given = str(target.target) == "prefix_rewrite.leaf_bind"
    if given or target.op in ("placeholder", "get_attr"):
        raise Refusal(
            "changes a parameter, a buffer or an input in place: a forest runs once where its "
            "calls run many times",
            "keep no state in the model: set use_cache=False, or call eval()",
        )


def _check_result(call: Call, state: State) -> None:
    """A rule that disagrees with the recorded shapes proves nothing."""
    value = value_of(call.inputs[0]) if call.in_place else call.output
    values = value if isinstance(state, tuple) else (value,)
    for found, item in zip(states_in(state), values, strict=True):
        shape = tuple(item.shape) if isinstance(item, torch.Tensor) else ()
        dims = [found.dim] if isinstance(found, PerToken) else []
        if isinstance(found, Special):
            continue
        if call.tokens.in_shape(shape) != dims or not _has_rows_of(call, found, shape):
            raise Refusal(
                f"returns {list(shape)} where its token-locality rule expects {found}",
                "this is a rule's fault, not your model's: please report it",
            )
    if call.in_place and not isinstance(state, Special) and state != call.state(call.inputs[0]):
        raise Refusal("changes in place a tensor whose rows are not its tokens'")


def _has_rows_of(call: Call, state: State, shape: tuple[Any, ...]) -> bool:
    if not isinstance(state, PerToken):
        return True
    return call.tokens.factor(shape[state.dim]) == state.outer * state.inner


@cache
def has_tag(op: str, tag: Any) -> bool:
    """Say whether torch itself tags an op, in place or not, with a property."""
    packets = (getattr(torch.ops.aten, name, None) for name in (op, f"{op}_"))
    return any(
        tag in getattr(packet, overload).tags
        for packet in packets
        if isinstance(packet, torch._ops.OpOverloadPacket)
        for overload in packet.overloads()
    )
