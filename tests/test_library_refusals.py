"""What a library call asks for beyond the plain mixer is refused in words, never ignored."""

from __future__ import annotations

import inspect

import pytest
import stand_ins as package
import torch
from library_models import (
    GROUPS,
    HEADS,
    INNER,
    STATE,
    WIDTH,
    Attention,
    DeltaRule,
    Mamba1,
    Mamba2,
    Prenorm,
    flash,
    flash_packed,
    language,
)
from torch import nn

from prefix_rewrite import UnsupportedModelError, prefix_compile
from prefix_rewrite.targets import LIBRARY_SEAMS


@pytest.fixture(scope="module", autouse=True)
def packages():
    with package.stand_ins():
        yield


class Conv(nn.Module):
    """causal_conv1d alone, on x [1, C, T]."""

    def __init__(self, **options):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, 3))
        self.options = options

    def forward(self, x):
        out = package.causal_conv1d_fn(x.transpose(1, 2), self.weight, **self.options)
        out = out[0] if self.options.get("return_final_states") else out
        return out.transpose(1, 2)


class ShortConv(nn.Module):
    """fla's convolution alone, on x [1, T, C]."""

    def __init__(self, weighted=False, **options):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, 3)) if weighted else None
        self.options = options

    def forward(self, x):
        return package.causal_conv1d(x, self.weight, **self.options)[0]


class WithStates(Mamba2):
    def forward(self, u):
        return super().forward(u)[0]


class FirstOf(nn.Module):
    """A mixer whose call returns more than its output."""

    def __init__(self, function, *sizes, **options):
        super().__init__()
        self.function, self.sizes, self.options = function, sizes, options
        self.project = nn.Linear(WIDTH, sum(sizes))
        self.out = nn.Linear(sizes[0], WIDTH)

    def forward(self, x):
        parts = self.project(x).split(list(self.sizes), -1)
        result = self.function(*parts, **self.options)
        return self.out(result[0] if isinstance(result, tuple) else result)


def scan(x, dt, bc, **options):
    B, C = bc.unflatten(-1, (2, GROUPS, STATE)).unbind(2)
    x = x.unflatten(-1, (HEADS, -1))
    result = package.mamba_chunk_scan_combined(x, dt, -torch.ones(HEADS), B, C, 8, **options)
    return result[0].flatten(2) if isinstance(result, tuple) else result.flatten(2)


def selective(u, delta, bc, A=None, groups=None, constant=False, **options):
    u, delta, bc = (part.transpose(1, 2) for part in (u, delta, bc))
    A = -torch.ones(INNER, STATE) if A is None else A
    B, C = bc.chunk(2, 1)
    B = B.unflatten(1, (groups, -1)) if groups else B
    B = torch.ones(INNER, STATE) if constant else B
    result = package.selective_scan_fn(u, delta, A, B, C, **options)
    return (result[0] if isinstance(result, tuple) else result).transpose(1, 2)


def with_probabilities(q, k, v):
    return package.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[0]


def many(T):
    return [0, T // 2, T]


ZEROS = torch.zeros(HEADS, INNER // HEADS, STATE)
INDEX = torch.zeros(1, 1, dtype=torch.int32)
SSD = (INNER, HEADS, 2 * GROUPS * STATE)
SELECTIVE = (INNER, INNER, 2 * STATE)
GATE = {"use_gate_in_kernel": True}

CASES = {
    "conv: seq_idx": (lambda: Conv(seq_idx=INDEX), "asks for seq_idx"),
    "conv: initial_states": (
        lambda: Conv(initial_states=torch.zeros(1, WIDTH, 2)),
        "asks for initial_states",
    ),
    "conv: final states": (
        lambda: Conv(return_final_states=True),
        "asks for return_final_states",
    ),
    "conv: final states' place": (
        lambda: Conv(final_states_out=torch.zeros(1, WIDTH, 2)),
        "asks for final_states_out",
    ),
    "conv: activation": (lambda: Conv(activation="gelu"), "activation is 'gelu'"),
    "ssd: initial_states": (
        lambda: FirstOf(scan, *SSD, initial_states=ZEROS[None]),
        "asks for initial_states",
    ),
    "ssd: seq_idx": (lambda: FirstOf(scan, *SSD, seq_idx=INDEX), "asks for seq_idx"),
    "ssd: cu_seqlens": (lambda: FirstOf(scan, *SSD, cu_seqlens=INDEX[0]), "asks for cu_seqlens"),
    "ssd: final states": (
        lambda: FirstOf(scan, *SSD, return_final_states=True),
        "asks for return_final_states",
    ),
    "ssd: states of sequences": (
        lambda: FirstOf(scan, *SSD, cu_seqlens=INDEX[0], return_varlen_states=True),
        "asks for cu_seqlens,return_varlen_states",
    ),
    "fused: initial_states": (
        lambda: Mamba2(fused=True, initial_states=ZEROS[None]),
        "asks for initial_states",
    ),
    "fused: seq_idx": (lambda: Mamba2(fused=True, seq_idx=INDEX), "asks for seq_idx"),
    "fused: final states": (
        lambda: WithStates(fused=True, return_final_states=True),
        "asks for return_final_states",
    ),
    "fused: activation": (lambda: Mamba2(fused=True, activation="gelu"), "activation is 'gelu'"),
    "selective: last state": (
        lambda: FirstOf(selective, *SELECTIVE, return_last_state=True),
        "asks for return_last_state",
    ),
    "selective: complex A": (
        lambda: FirstOf(selective, *SELECTIVE, A=torch.ones(INNER, STATE) * 1j),
        "asks for complex A",
    ),
    "selective: B in groups": (
        lambda: FirstOf(selective, *SELECTIVE, groups=2),
        "B or C that is constant, or in groups",
    ),
    "selective: constant B": (
        lambda: FirstOf(selective, *SELECTIVE, constant=True),
        "B or C that is constant, or in groups",
    ),
    "inner: norms of B": (
        lambda: Mamba1(fused=True, b_rms_weight=torch.ones(STATE)),
        "asks for b_rms_weight",
    ),
    "short conv: no weight": (ShortConv, "asks for no weight"),
    "short conv: sequences": (
        lambda: ShortConv(weighted=True, cu_seqlens=torch.tensor([0, 3, 7])),
        "asks for cu_seqlens",
    ),
    "short conv: initial state": (
        lambda: ShortConv(weighted=True, initial_state=torch.zeros(1, WIDTH, 3)),
        "asks for initial_state",
    ),
    "flash: dropout": (lambda: Attention(flash(dropout_p=0.1)), "attention dropout is 0.1"),
    "flash: not causal": (lambda: Attention(flash(causal=False)), "attention is not causal"),
    "flash: a window not causal": (
        lambda: Attention(flash(causal=False, window_size=(2, 2))),
        "attention is not causal.*|asks for a window of 2 tokens to the right",
    ),
    "flash: looks to the right": (
        lambda: Attention(flash(window_size=(2, 2))),
        "a window of 2 tokens to the right",
    ),
    "flash: alibi": (
        lambda: Attention(flash(alibi_slopes=torch.ones(HEADS))),
        "asks for alibi_slopes",
    ),
    "flash: probabilities": (lambda: Attention(with_probabilities), "asks for return_attn_probs"),
    "packed flash: sequences": (
        lambda: Attention(flash_packed(many)),
        "cu_seqlens of several sequences",
    ),
    "packed flash: pages": (
        lambda: Attention(flash_packed(block_table=INDEX)),
        "asks for block_table",
    ),
    "packed flash: dropout": (
        lambda: Attention(flash_packed(dropout_p=0.1)),
        "attention dropout is 0.1",
    ),
    "delta rule: initial state": (
        lambda: DeltaRule(initial_state=torch.zeros(1, HEADS, STATE, STATE)),
        "asks for initial_state",
    ),
    "delta rule: final state": (
        lambda: DeltaRule(output_final_state=True),
        "asks for output_final_state",
    ),
    "delta rule: sequences": (
        lambda: DeltaRule(cu_seqlens=torch.tensor([0, 3, 7])),
        "asks for cu_seqlens",
    ),
    "delta rule: heads first": (lambda: DeltaRule(head_first=True), "asks for head_first"),
    "delta rule: context parallel": (lambda: DeltaRule(cp_context="ring"), "asks for cp_context"),
    "delta rule: eigenvalues": (
        lambda: DeltaRule(allow_neg_eigval=True),
        "asks for allow_neg_eigval",
    ),
    "kda: lower bound": (
        lambda: DeltaRule("kda", **GATE, lower_bound=-5.0),
        "asks for lower_bound",
    ),
    "kda: safe gate": (lambda: DeltaRule("kda", safe_gate=True), "asks for safe_gate"),
    "plain delta rule: initial state": (
        lambda: DeltaRule("plain", initial_state=torch.zeros(1, HEADS, STATE, STATE)),
        "asks for initial_state",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused(case):
    make, reason = CASES[case]
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        prefix_compile(language(make))
    known = [f for f in caught.value.findings if "could not be captured" not in f.what]
    assert known and any(f.module == "mixers.0" for f in known), str(caught.value)
    assert all(f.source and "prefix_rewrite/mixers" not in f.source for f in known)


NORMS = {"rowscale": (torch.ones(1, 1), "asks for rowscale"), "dropout_p": (0.2, "dropout of 0.2")}


@pytest.mark.parametrize("argument", NORMS)
def test_a_norm_that_does_more_is_refused(argument):
    value, reason = NORMS[argument]

    class Asking(Prenorm):
        def forward(self, input_ids):
            return super().forward(input_ids, **{argument: value})

    with pytest.raises(UnsupportedModelError, match=reason):
        prefix_compile(language(Mamba2, kind=Asking))


@pytest.mark.parametrize("name", [n for n in LIBRARY_SEAMS if not n.startswith("torch.")])
def test_a_seam_reads_every_argument_in_its_place(name):
    """By position as well as by name, with the library's own defaults."""
    module, _, function = name.partition(":")
    released = getattr(package, function, None)
    if released is None or released.__module__ != module:
        pytest.skip("another release's place for the same function")
    real = inspect.signature(inspect.unwrap(released)).parameters
    ours = inspect.signature(LIBRARY_SEAMS[name]).parameters
    takes_more = any(p.kind is p.VAR_KEYWORD for p in ours.values())
    named = [n for n, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert named == list(real)[: len(named)]
    assert takes_more or list(ours) == list(real)
    for argument in named:
        if real[argument].default is not inspect.Parameter.empty:
            assert ours[argument].default == real[argument].default, argument
