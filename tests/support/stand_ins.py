"""Stand-ins for kernel packages that need a GPU: the released signatures, in plain torch.

Signatures are those of mamba_ssm 2.3.2.post1, causal_conv1d 1.7.0, flash_attn 2.8.3.post2 and
fla-core 0.6.0: names, order and defaults. The bodies are the plainest correct implementation on
one sequence, and know nothing of forests.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

INF = float("inf")
_FUNCTIONS: dict[str, list[Any]] = {}


def of(module: str) -> Callable[[Any], Any]:
    """Make a function that of a package's module."""

    def place(function: Any) -> Any:
        function.__module__ = module
        _FUNCTIONS.setdefault(module, []).append(function)
        return function

    return place


@contextmanager
def stand_ins() -> Iterator[None]:
    """Put the packages into `sys.modules` while the context is open."""
    modules = {}
    for name, functions in _FUNCTIONS.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            modules.setdefault(path, types.ModuleType(path))
        for function in functions:
            setattr(modules[name], function.__name__, function)
    taken = [name for name in modules if name in sys.modules]
    assert not taken, f"there already: {taken}"
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


def no(*asked: object) -> None:
    """A stand-in does the plain call alone."""
    assert not any(value is not None and value is not False for value in asked)


@of("causal_conv1d.causal_conv1d_interface")
def causal_conv1d_fn(
    x,
    weight,
    bias=None,
    seq_idx=None,
    initial_states=None,
    return_final_states=False,
    final_states_out=None,
    activation=None,
):
    no(seq_idx, initial_states, return_final_states, final_states_out)
    taps = weight.shape[1]
    out = F.conv1d(F.pad(x, (taps - 1, 0)), weight.unsqueeze(1), bias, groups=weight.shape[0])
    return out if activation is None else F.silu(out)


@of("mamba_ssm.ops.triton.ssd_combined")
def mamba_chunk_scan_combined(
    x,
    dt,
    A,
    B,
    C,
    chunk_size,
    D=None,
    z=None,
    dt_bias=None,
    initial_states=None,
    seq_idx=None,
    cu_seqlens=None,
    dt_softplus=False,
    dt_limit=(0.0, INF),
    return_final_states=False,
    return_varlen_states=False,
):
    no(initial_states, seq_idx, cu_seqlens, return_final_states, return_varlen_states)
    dt = dt if dt_bias is None else dt + dt_bias
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    B, C = (part.repeat_interleave(x.shape[2] // part.shape[2], 2) for part in (B, C))
    past = (dt * A).cumsum(1)
    decay = (past[:, :, None] - past[:, None]).exp()  # [1, to, from, H]
    seen = torch.ones(x.shape[1], x.shape[1]).tril()[None, :, :, None]
    mixing = torch.einsum("bthn,bshn->btsh", C, B) * torch.where(seen > 0, decay, 0.0)
    y = torch.einsum("btsh,bsh,bshp->bthp", mixing, dt, x)
    if D is not None:
        y = y + (D[:, None] if D.dim() == 1 else D) * x
    return y if z is None else y * F.silu(z)


@of("mamba_ssm.ops.triton.layernorm_gated")
def rmsnorm_fn(x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True):
    no(bias)
    if z is not None and not norm_before_gate:
        x = x * F.silu(z)
    groups = x.split(group_size or x.shape[-1], dim=-1)
    x = torch.cat([g / (g.pow(2).mean(-1, keepdim=True) + eps).sqrt() for g in groups], -1)
    return x * weight * (F.silu(z) if z is not None and norm_before_gate else 1.0)


@of("mamba_ssm.ops.triton.layer_norm")
def layer_norm_fn(
    x,
    weight,
    bias,
    residual=None,
    x1=None,
    weight1=None,
    bias1=None,
    eps=1e-6,
    dropout_p=0.0,
    rowscale=None,
    prenorm=False,
    residual_in_fp32=False,
    is_rms_norm=False,
    return_dropout_mask=False,
):
    no(x1, weight1, bias1, dropout_p or None, rowscale, return_dropout_mask)
    x = x if residual is None else x + residual
    norm = F.rms_norm if is_rms_norm else F.layer_norm
    rest = (weight,) if is_rms_norm else (weight, bias)
    out = norm(x, x.shape[-1:], *rest, eps)
    return (out, x) if prenorm else out


@of("mamba_ssm.ops.triton.layer_norm")
def rms_norm_fn(
    x,
    weight,
    bias,
    residual=None,
    x1=None,
    weight1=None,
    bias1=None,
    eps=1e-6,
    dropout_p=0.0,
    rowscale=None,
    prenorm=False,
    residual_in_fp32=False,
    return_dropout_mask=False,
):
    no(x1, weight1, bias1, dropout_p or None, rowscale, prenorm, return_dropout_mask)
    return layer_norm_fn(x, weight, bias, residual, eps=eps, is_rms_norm=True)


@of("mamba_ssm.ops.triton.ssd_combined")
def mamba_split_conv1d_scan_combined(
    zxbcdt,
    conv1d_weight,
    conv1d_bias,
    dt_bias,
    A,
    D,
    chunk_size,
    initial_states=None,
    seq_idx=None,
    dt_limit=(0.0, INF),
    return_final_states=False,
    activation="silu",
    rmsnorm_weight=None,
    rmsnorm_eps=1e-6,
    outproj_weight=None,
    outproj_bias=None,
    headdim=None,
    ngroups=1,
    norm_before_gate=True,
):
    no(initial_states, seq_idx, return_final_states)
    heads = dt_bias.shape[0]
    width = heads * (headdim or D.shape[1])
    both = conv1d_weight.shape[0] - width  # of B and C
    mlp = (zxbcdt.shape[-1] - width - conv1d_weight.shape[0] - heads) // 2
    left, right, z, xbc, dt = zxbcdt.split([mlp, mlp, width, width + both, heads], -1)
    xbc = causal_conv1d_fn(xbc.mT, conv1d_weight, conv1d_bias, activation=activation).mT
    x, B, C = xbc.split([width, both // 2, both // 2], -1)
    gate = None if rmsnorm_weight is not None else z.unflatten(-1, (heads, -1))
    y = mamba_chunk_scan_combined(
        x.unflatten(-1, (heads, -1)),
        dt,
        A,
        B.unflatten(-1, (ngroups, -1)),
        C.unflatten(-1, (ngroups, -1)),
        chunk_size,
        D=D,
        z=gate,
        dt_bias=dt_bias,
        dt_softplus=True,
        dt_limit=dt_limit,
    ).flatten(2)
    if rmsnorm_weight is not None:
        sizes = {"eps": rmsnorm_eps, "group_size": width // ngroups}
        y = rmsnorm_fn(y, rmsnorm_weight, None, z, norm_before_gate=norm_before_gate, **sizes)
    y = torch.cat([F.silu(left) * right, y], -1)
    return y if outproj_weight is None else F.linear(y, outproj_weight, outproj_bias)


@of("mamba_ssm.ops.selective_scan_interface")
def selective_scan_fn(
    u,
    delta,
    A,
    B,
    C,
    D=None,
    z=None,
    delta_bias=None,
    delta_softplus=False,
    return_last_state=False,
):
    no(return_last_state)
    delta = delta if delta_bias is None else delta + delta_bias[:, None]
    delta = F.softplus(delta) if delta_softplus else delta
    B, C = (part if part.dim() == 3 else part[:, 0] for part in (B, C))
    state, rows = u.new_zeros(u.shape[0], *A.shape), []
    for t in range(u.shape[2]):
        step = delta[:, :, t, None]
        state = (step * A).exp() * state + step * B[:, None, :, t] * u[:, :, t, None]
        rows.append((state * C[:, None, :, t]).sum(-1))
    y = torch.stack(rows, -1)
    y = y if D is None else y + D[:, None] * u
    return y if z is None else y * F.silu(z)


@of("mamba_ssm.ops.selective_scan_interface")
def mamba_inner_fn(
    xz,
    conv1d_weight,
    conv1d_bias,
    x_proj_weight,
    delta_proj_weight,
    out_proj_weight,
    out_proj_bias,
    A,
    B=None,
    C=None,
    D=None,
    delta_bias=None,
    B_proj_bias=None,
    C_proj_bias=None,
    delta_softplus=True,
    checkpoint_lvl=1,
    b_rms_weight=None,
    c_rms_weight=None,
    dt_rms_weight=None,
    b_c_dt_rms_eps=1e-6,
):
    no(B, C, B_proj_bias, C_proj_bias, b_rms_weight, c_rms_weight, dt_rms_weight)
    x, z = xz.chunk(2, 1)
    x = causal_conv1d_fn(x, conv1d_weight[:, 0], conv1d_bias, activation="silu")
    rows = x_proj_weight @ x
    rank = delta_proj_weight.shape[1]
    delta, B, C = rows.split([rank, A.shape[1], A.shape[1]], 1)
    delta = delta_proj_weight @ delta
    y = selective_scan_fn(x, delta, A, B, C, D, z, delta_bias, delta_softplus)
    return F.linear(y.mT, out_proj_weight, out_proj_bias)


def softmax_attention(q, k, v, scale, window=INF, cap=0.0):
    """[1,T,H,D], [1,T,K,D]: causal, grouped."""
    k, v = (part.repeat_interleave(q.shape[2] // part.shape[2], 2) for part in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * scale
    scores = cap * torch.tanh(scores / cap) if cap else scores
    at = torch.arange(q.shape[1])
    distance = at[:, None] - at
    scores = scores.masked_fill((distance < 0) | (distance >= window), -INF)
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v)


@of("flash_attn.flash_attn_interface")
def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    no(alibi_slopes, return_attn_probs)
    left, right = window_size
    assert dropout_p == 0 and (causal or right == 0)
    window = left + 1 if left >= 0 else INF
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    return softmax_attention(q, k, v, scale, window, softcap)


@of("flash_attn.flash_attn_interface")
def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    no(block_table)
    assert len(cu_seqlens_q) == len(cu_seqlens_k) == 2
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return flash_attn_func(q[None], k[None], v[None], *rest, deterministic, return_attn_probs)[0]


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """[1,T,H,K], v [1,T,H,V], decay [1,T,H,K], beta [1,T,H]; queries are scaled."""
    state, rows = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3]), []
    for t in range(v.shape[1]):
        state = state * decay[:, t, :, :, None]
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        write = beta[:, t, :, None] * error
        state = state + k[:, t, :, :, None] * write[:, :, None]
        rows.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(rows, 1)


def _delta_rule(q, k, v, g, beta, scale, normalise):
    if normalise:
        q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    decay = g.exp().unsqueeze(-1).expand(*g.shape, k.shape[3]) if g.dim() == 3 else g.exp()
    return delta_rule(q * scale, k, v, decay, beta), None


@of("fla.ops.gated_delta_rule.chunk")
@torch.compiler.disable
def chunk_gated_delta_rule(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    state_v_first=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    chunk_indices=None,
    cp_context=None,
    **kwargs,
):
    no(initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu, chunk_indices, cp_context)
    if kwargs.get("use_gate_in_kernel", False):
        g = -kwargs["A_log"].exp() * F.softplus(g + kwargs["dt_bias"])
    if use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    return _delta_rule(q, k, v, g, beta, scale, use_qk_l2norm_in_kernel)


@of("fla.ops.kda.chunk")
@torch.compiler.disable
def chunk_kda(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    safe_gate=False,
    lower_bound=None,
    disable_recompute=False,
    return_intermediate_states=False,
    state_v_first=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    cp_context=None,
    use_graph=False,
    max_num_seqs=None,
    **kwargs,
):
    no(initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu, cp_context, lower_bound)
    no(safe_gate, return_intermediate_states, use_graph, max_num_seqs)
    if use_gate_in_kernel:
        bias = kwargs["dt_bias"].view(g.shape[2:])
        g = -kwargs["A_log"].exp()[:, None] * F.softplus(g + bias)
    if use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    return _delta_rule(q, k, v, g, beta, scale, use_qk_l2norm_in_kernel)


@of("fla.ops.delta_rule.chunk")
@torch.compiler.disable
def chunk_delta_rule(
    q,
    k,
    v,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    **kwargs,
):
    no(initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu)
    return _delta_rule(q, k, v, torch.zeros_like(beta), beta, scale, use_qk_l2norm_in_kernel)


@of("fla.modules.causal_conv1d.ops")
def causal_conv1d(
    x,
    weight=None,
    bias=None,
    residual=None,
    initial_state=None,
    output_final_state=False,
    activation=None,
    backend="triton",
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    chunk_indices=None,
    cp_context=None,
    **kwargs,
):
    no(initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu, chunk_indices, cp_context)
    out = causal_conv1d_fn(x.mT, weight, bias, activation=activation).mT
    return (out if residual is None else out + residual), None
