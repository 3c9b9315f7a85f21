"""Small hybrids that call kernel libraries by name, as a modeling file does.

`Mamba2` and `Mamba1` project, split, convolve, scan and gate in the order of mamba_ssm's modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from families import VOCAB, spread_weights
from stand_ins import (
    causal_conv1d,
    causal_conv1d_fn,
    chunk_delta_rule,
    chunk_gated_delta_rule,
    chunk_kda,
    flash_attn_func,
    flash_attn_varlen_func,
    layer_norm_fn,
    mamba_chunk_scan_combined,
    mamba_inner_fn,
    mamba_split_conv1d_scan_combined,
    rms_norm_fn,
    rmsnorm_fn,
    selective_scan_fn,
)
from torch import Tensor, nn

WIDTH, HEADS, STATE, GROUPS, TAPS = 24, 4, 8, 2, 4
INNER = 2 * WIDTH
HEAD = INNER // HEADS


class Mamba2(nn.Module):
    """As mamba_ssm's: one fused call, or a convolution and a scan."""

    def __init__(self, fused: bool = False, norm: bool = True, mlp: int = 0, **options: Any):
        super().__init__()
        self.fused, self.mlp, self.options = fused, mlp, options
        self.sizes = [mlp, mlp, INNER, INNER + 2 * GROUPS * STATE, HEADS]
        self.in_proj = nn.Linear(WIDTH, sum(self.sizes))
        self.conv1d = nn.Conv1d(self.sizes[3], self.sizes[3], TAPS, groups=self.sizes[3])
        self.dt_bias = nn.Parameter(torch.ones(HEADS))
        self.A_log = nn.Parameter(torch.zeros(HEADS))
        self.D = nn.Parameter(torch.ones(HEADS))
        self.norm = nn.Parameter(torch.ones(INNER)) if norm else None
        self.out_proj = nn.Linear(INNER + mlp, WIDTH)

    def forward(self, u: Tensor) -> Tensor:
        return self.call_fused(u) if self.fused else self.call_apart(u)

    def call_fused(self, u: Tensor) -> Tensor:
        options = {"headdim": HEAD, "ngroups": GROUPS, "norm_before_gate": False}
        return mamba_split_conv1d_scan_combined(
            self.in_proj(u),
            self.conv1d.weight.squeeze(1),
            self.conv1d.bias,
            self.dt_bias,
            -self.A_log.exp(),
            D=self.D,
            chunk_size=8,
            rmsnorm_weight=self.norm,
            rmsnorm_eps=1e-5,
            outproj_weight=self.out_proj.weight,
            outproj_bias=self.out_proj.bias,
            **{**options, **self.options},
        )

    def call_apart(self, u: Tensor) -> Tensor:
        left, right, z, xbc, dt = self.in_proj(u).split(self.sizes, -1)
        weight = self.conv1d.weight.squeeze(1)
        xbc = causal_conv1d_fn(
            xbc.transpose(1, 2), weight, bias=self.conv1d.bias, activation="silu"
        ).transpose(1, 2)
        x, B, C = xbc.split([INNER, GROUPS * STATE, GROUPS * STATE], -1)
        y = mamba_chunk_scan_combined(
            x.unflatten(-1, (HEADS, HEAD)),
            dt,
            -self.A_log.exp(),
            B.unflatten(-1, (GROUPS, STATE)),
            C.unflatten(-1, (GROUPS, STATE)),
            chunk_size=8,
            D=self.D,
            z=z.unflatten(-1, (HEADS, HEAD)) if self.norm is None else None,
            dt_bias=self.dt_bias,
            dt_softplus=True,
            **self.options,
        ).flatten(2)
        if self.norm is not None:
            sizes = {"eps": 1e-5, "group_size": INNER // GROUPS, "norm_before_gate": False}
            y = rmsnorm_fn(y, self.norm, None, z=z, **sizes)
        return self.out_proj(torch.cat([F.silu(left) * right, y], -1))


class Mamba1(nn.Module):
    """As mamba_ssm's: one fused call, or a convolution and a scan."""

    def __init__(self, fused: bool = False, **options: Any):
        super().__init__()
        self.fused, self.options = fused, options
        self.in_proj = nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.conv1d = nn.Conv1d(INNER, INNER, TAPS, groups=INNER)
        self.x_proj = nn.Linear(INNER, 3 + 2 * STATE, bias=False)
        self.dt_proj = nn.Linear(3, INNER)
        self.A_log = nn.Parameter(torch.zeros(INNER, STATE))
        self.D = nn.Parameter(torch.ones(INNER))
        self.out_proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        xz = self.in_proj(u).transpose(1, 2)
        A = -self.A_log.exp()
        if self.fused:
            return mamba_inner_fn(
                xz,
                self.conv1d.weight,
                self.conv1d.bias,
                self.x_proj.weight,
                self.dt_proj.weight,
                self.out_proj.weight,
                self.out_proj.bias,
                A,
                None,
                None,
                self.D,
                delta_bias=self.dt_proj.bias,
                delta_softplus=True,
                **self.options,
            )
        x, z = xz.chunk(2, 1)
        weight = self.conv1d.weight.squeeze(1)
        x = causal_conv1d_fn(x=x, weight=weight, bias=self.conv1d.bias, activation="silu")
        dt, B, C = self.x_proj(x.transpose(1, 2)).split([3, STATE, STATE], -1)
        dt = (dt @ self.dt_proj.weight.T).transpose(1, 2)
        steps = {"z": z, "delta_bias": self.dt_proj.bias, "delta_softplus": True}
        y = selective_scan_fn(
            x, dt, A, B.transpose(1, 2), C.transpose(1, 2), self.D, **steps, **self.options
        )
        return self.out_proj(y.transpose(1, 2))


class Attention(nn.Module):
    """Grouped attention by any function of q [1,T,H,D], k and v [1,T,K,D]."""

    def __init__(self, attend: Callable[..., Tensor]):
        super().__init__()
        self.attend = attend
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * 8)
        self.out = nn.Linear(HEADS * 8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 8))
        return self.out(self.attend(*heads.split([HEADS, GROUPS, GROUPS], 2)).flatten(2))


def flash(**options: Any) -> Callable[..., Tensor]:
    options = {"causal": True, **options}
    return lambda q, k, v: flash_attn_func(q, k, v, **options)


def flash_packed(ends: Callable[[int], list[int]] = lambda T: [0, T], **options: Any) -> Any:
    """Attention on the tokens of all sequences in one row, ended where `ends` says."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        T = q.shape[1]
        at = torch.tensor(ends(T), dtype=torch.int32)
        q, k, v = (part.squeeze(0) for part in (q, k, v))
        return flash_attn_varlen_func(q, k, v, at, at, T, T, causal=True, **options).unsqueeze(0)

    return attend


class DeltaRule(nn.Module):
    """A short convolution and a delta rule of fla's."""

    def __init__(self, rule: str = "gated", residual: bool = False, **options: Any):
        super().__init__()
        self.rule, self.residual, self.options = rule, residual, options
        keys, values = GROUPS * STATE, HEADS * STATE
        self.sizes = [keys, keys, values]
        self.qkv = nn.Linear(WIDTH, sum(self.sizes))
        self.conv = nn.Parameter(torch.zeros(sum(self.sizes), TAPS))
        per_channel = rule == "kda"
        self.g = nn.Linear(WIDTH, HEADS * (STATE if per_channel else 1))
        self.beta = nn.Linear(WIDTH, HEADS)
        self.A_log = nn.Parameter(torch.zeros(HEADS))
        self.dt_bias = nn.Parameter(torch.zeros(self.g.out_features))
        self.out = nn.Linear(values, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        added = qkv if self.residual else None
        qkv, _ = causal_conv1d(qkv, self.conv, residual=added, activation="silu")
        q, k, v = (part.unflatten(-1, (-1, STATE)) for part in qkv.split(self.sizes, -1))
        if self.rule == "plain":
            q, k = (part.repeat_interleave(HEADS // GROUPS, 2) for part in (q, k))
            mixed, _ = chunk_delta_rule(q, k, v, self.beta(x).sigmoid(), **self.options)
            return self.out(mixed.flatten(2))
        chunk = chunk_kda if self.rule == "kda" else chunk_gated_delta_rule
        g, beta = self.g(x), self.beta(x)
        g = g.unflatten(-1, (HEADS, STATE)) if self.rule == "kda" else g
        if self.options.get("use_gate_in_kernel"):
            gate = {"A_log": self.A_log, "dt_bias": self.dt_bias}
        else:
            g, gate = -F.softplus(g - 2.0), {}
        if not self.options.get("use_beta_sigmoid_in_kernel"):
            beta = beta.sigmoid()
        mixed, _ = chunk(q, k, v, g, beta, **gate, **self.options)
        return self.out(mixed.flatten(2))


class Language(nn.Module):
    """Token ids [1,T] in, logits [1,T,V] out: mixers with residuals, a head."""

    def __init__(self, *mixers: nn.Module):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mixers = nn.ModuleList(mixers)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in mixers)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        return self.head(x)


class Prenorm(Language):
    """A stream of residuals through mamba_ssm's fused norms, as its language model has it."""

    def forward(self, input_ids: Tensor, **asked: Any) -> Tensor:
        x, residual = self.embed(input_ids), None
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            options = {"prenorm": True, "residual_in_fp32": True, "eps": norm.eps, **asked}
            x, residual = layer_norm_fn(x, norm.weight, norm.bias, residual=residual, **options)
            x = mixer(x)
        return self.head(rms_norm_fn(x, self.norms[0].weight, None, residual=residual))


def language(*mixers: Callable[[], nn.Module], kind: type[Language] = Language) -> nn.Module:
    """Build a model with weights under which a lost state is visible."""
    torch.manual_seed(0)
    model = kind(*(make() for make in mixers))
    spread_weights(model, seed=0, decay=(-4.0, -3.0))
    return model
