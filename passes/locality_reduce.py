"""Token-locality of ops that combine elements along some dimensions: those of one token only."""

from __future__ import annotations

from prefix_rewrite.passes.locality_call import Call
from prefix_rewrite.passes.locality_layout import PerToken, Refusal, State, aligned
from prefix_rewrite.passes.locality_pointwise import pointwise
from prefix_rewrite.passes.locality_rules import rule
from prefix_rewrite.passes.nodes import shape_of, value_of


@rule(
    *("all", "amax", "amin", "any", "argmax", "argmin", "count_nonzero", "logsumexp", "mean"),
    *("nanmean", "nansum", "prod", "sum"),
    *("aminmax", "median", "nanmedian", "mode"),
    args="input dim keepdim",
)
def reduce(call: Call) -> State:
    return _reduced(call, call.dims("dim", _ndim(call)))


@rule("linalg_vector_norm", "linalg_norm", "norm", args="input p dim keepdim")
def norm(call: Call) -> State:
    return _reduced(call, call.dims("dim", _ndim(call)))


@rule("std", "std_mean", "var", "var_mean", args="input dim unbiased keepdim")
def spread(call: Call) -> State:
    return _reduced(call, call.dims("dim", _ndim(call)))


@rule("max", "min", args="input dim keepdim")
def extreme(call: Call) -> State:
    """Of one tensor along a dimension, or of two tensors, element by element."""
    if call.arguments.get("other") is not None or len(call.inputs) > 1:
        return pointwise(call)
    return _reduced(call, call.dims("dim", _ndim(call)))


def _ndim(call: Call) -> int:
    return len(shape_of(call.get("input")))


def _reduced(call: Call, dims: set[int] | None) -> State:
    state = call.only("input")
    if dims is None or state.dim in dims:
        raise Refusal("reduces over the tokens")
    keep = call.get("keepdim", False)
    return state.at(state.dim - (0 if keep else sum(dim < state.dim for dim in dims)))


@rule(
    *("cummax", "cummin", "cumprod", "cumsum", "log_softmax", "logcumsumexp", "softmax"),
    "softmin",
    args="input dim how more",
)
def along(call: Call) -> State:
    """Compute each element from a whole line of elements along one dimension."""
    return _along(call, call.get("dim"))


@rule("argsort", "sort", args="input dim descending stable")
def sort(call: Call) -> State:
    return _along(call, call.get("dim", -1))


@rule("topk", args="input k dim largest sorted")
def topk(call: Call) -> State:
    return _along(call, call.get("dim", -1))


@rule("normalize", args="input p dim")
def normalize(call: Call) -> State:
    return _along(call, call.get("dim", 1))


@rule("flip", args="input *dims")
def flip(call: Call) -> State:
    return _along(call, call.get("dims"))


@rule("roll", args="input shifts dims")
def roll(call: Call) -> State:
    return _along(call, call.get("dims"))


@rule(
    *("fft_fft", "fft_hfft", "fft_ifft", "fft_ihfft", "fft_irfft", "fft_rfft"),
    args="input n dim norm",
)
def fft(call: Call) -> State:
    return _along(call, call.get("dim", -1))


@rule("cosine_similarity", args="x1 x2 dim")
def cosine_similarity(call: Call) -> State:
    ndim = max(len(shape_of(node)) for node in call.inputs)
    state = aligned([(call.state(node), len(shape_of(node))) for node in call.inputs], ndim)
    dim = call.get("dim", 1) % ndim
    if not isinstance(state, PerToken) or state.dim == dim:
        raise Refusal("reduces over the tokens")
    return state.at(state.dim - (state.dim > dim))


def _along(call: Call, dim: int | tuple[int, ...] | None) -> State:
    state = call.only("input")
    ndim = _ndim(call)
    dims = dim if isinstance(dim, (tuple, list)) else (dim,) if dim is not None else ()
    if not dims or state.dim in {int(d) % ndim for d in dims}:
        raise Refusal("works along the tokens")
    return state


@rule("layer_norm", "rms_norm", args="input normalized_shape weight bias how more")
def layer_norm(call: Call) -> State:
    """Normalise over the last dimensions, as many as `normalized_shape` has."""
    state = call.only("input")
    if state.dim >= _ndim(call) - len(value_of(call.get("normalized_shape"))):
        raise Refusal("normalises over the tokens")
    return state


@rule("group_norm", args="input num_groups weight bias how")
def group_norm(call: Call) -> State:
    """Normalise over everything but the first dimension, in groups of the second."""
    state = call.only("input")
    if state.dim != 0:
        raise Refusal("normalises over the tokens", "make the tokens its first dimension")
    return state


@rule("instance_norm", args="input mean var weight bias use_input_stats momentum how more")
def instance_norm(call: Call) -> State:
    """Normalise over everything but the first two dimensions."""
    state = call.only("input")
    if state.dim != 0:
        raise Refusal("normalises over the tokens", "make the tokens its first dimension")
    if call.get("mean") is not None:
        raise Refusal("updates running statistics", "set track_running_stats=False")
    return state


@rule("batch_norm", args="input mean var weight bias training momentum how")
def batch_norm(call: Call) -> State:
    """With running statistics, a scale and a shift for each place in dimension 1."""
    state = call.only("input")
    if call.get("training", False) or call.get("mean") is None:
        raise Refusal(
            "takes its statistics from all tokens in training", "call eval() on the module"
        )
    if state.dim == 1:
        raise Refusal("has a scale for each token")
    return state


@rule("interpolate", args="input size scale_factor mode align_corners *how")
def interpolate(call: Call) -> State:
    """Resample all dimensions but the first two."""
    state = call.only("input")
    if state.dim > 1:
        raise Refusal("blends neighbouring tokens")
    return state


@rule(
    *(f"{kind}_pool{n}d" for n in (1, 2, 3) for kind in ("avg", "max", "lp")),
    *(f"adaptive_{kind}_pool{n}d" for n in (1, 2, 3) for kind in ("avg", "max")),
    args="input *how",
)
def pool(call: Call) -> State:
    """Combine places in the last dimensions, as many as the op's name says."""
    state = call.only("input")
    if state.dim >= _ndim(call) - int(call.op[-2]):
        raise Refusal("pools neighbouring tokens")
    return state
