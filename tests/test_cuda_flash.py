"""The CUDA executor of tree attention, over a stand-in for PyTorch's flash kernel.

No GPU is needed, and none of this says that the kernel itself is right: on a GPU, `is_right` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention import FORESTS, assert_close, qkv, run, run_reference, table
from torch import Tensor

from prefix_rewrite.ops.tree_attention import attention_backend, cuda_flash
from prefix_rewrite.ops.tree_attention import op as op_module
from prefix_rewrite.ops.tree_attention.blocks import Block
from prefix_rewrite.ops.tree_attention.plan import schedule
from prefix_rewrite.ops.tree_attention.scores import Scores

HALF = torch.bfloat16
EPS = torch.finfo(HALF).eps


def probs_and_inputs(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the scores [C, N, L, M] and the inputs, wide, a key head for each query head."""
    for x in (q, k, v):
        assert x.dtype in (torch.float16, torch.bfloat16), "the kernel takes half precision"
        assert x.stride(-1) == 1, "the kernel reads a head's numbers side by side"
        assert x.shape[-1] % 8 == 0 and x.shape[-1] <= 256
        assert not any(step % 8 for step in (*x.stride()[:-1], x.storage_offset())), "wide loads"
    num_groups = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(num_groups, 1) for x in (k, v))
    scores = scale * (q.double() @ k.mT)
    if is_causal:  # as the kernel: the last query sees the last key
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(
            1 + scores.shape[-1] - scores.shape[-2]
        )
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores, q.double(), k, v


def stand_in_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool, *, scale: float
) -> tuple[Any, ...]:
    assert dropout_p == 0
    scores, _, _, wide_v = probs_and_inputs(q, k, v, is_causal, scale)
    out = (scores.softmax(-1) @ wide_v).to(q.dtype)
    return out, scores.logsumexp(-1).float(), None, None, q.shape[2], k.shape[2], None, None, None


def stand_in_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cum_seq_q: None,
    cum_seq_k: None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    assert (cum_seq_q, cum_seq_k, dropout_p) == (None, None, 0)
    assert (max_q, max_k) == (q.shape[2], k.shape[2])
    assert lse.is_contiguous() and lse.dtype == torch.float32
    assert grad_out.dtype == out.dtype == q.dtype
    scores, wide_q, wide_k, wide_v = probs_and_inputs(q, k, v, is_causal, scale)
    probs = (scores - lse.double()[..., None]).exp()
    grad, out = grad_out.double(), out.double()
    slopes = probs * (grad @ wide_v.mT - (grad * out).sum(-1, keepdim=True)) * scale
    grads = [slopes @ wide_k, slopes.mT @ wide_q, probs.mT @ grad]
    num_groups = q.shape[1] // k.shape[1]
    grads[1:] = [x.unflatten(1, (-1, num_groups)).sum(2) for x in grads[1:]]
    return tuple(x.to(q.dtype) for x in grads)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_flash, "flash_forward", stand_in_forward)
    monkeypatch.setattr(cuda_flash, "flash_backward", stand_in_backward)


@pytest.fixture
def executor(kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run tree attention by the CUDA executor."""
    monkeypatch.setattr(op_module, "attention_backend", lambda *_: "cuda_flash")


@pytest.mark.parametrize("dims", [(16, 16), (20, 12), (8, 32)])
@pytest.mark.parametrize("tile", [0, 8])
@pytest.mark.parametrize("name", FORESTS)
def test_equals_plain_loop_up_to_half_precision(
    name: str, tile: int, dims: tuple[int, int], executor: None
) -> None:
    segments = table(name)
    inputs = qkv(segments.num_tokens, dims=dims, dtype=HALF)
    got, expected = run(segments, inputs, tile=tile), run_reference(segments, inputs)
    assert_close(got, expected, 2 * EPS)


def test_masked_blocks_go_by_plain_ops_and_sinks_take_their_share(executor: None) -> None:
    segments = table("star")
    inputs = qkv(segments.num_tokens, dtype=HALF)
    for modifiers in ({"window": 3}, {"sinks": torch.linspace(-1, 2, 4)}):
        got = run(segments, inputs, tile=8, **modifiers)
        assert_close(got, run_reference(segments, inputs, **modifiers), 2 * EPS)


def test_the_real_ops_take_these_arguments() -> None:
    """Shapes only, by PyTorch's own shape functions."""
    segments = table("star")
    blocks = [Block(*row) for row in schedule(segments, 8).tolist()]
    assert {block.kind for block in blocks} == {0, 1, 2}
    ends = torch.empty(segments.num_tokens, dtype=torch.int64, device="meta")
    rule = Scores(ends, ends, 0.3)
    q, k, v = (x[0].to("meta") for x in qkv(segments.num_tokens, dims=(20, 20), dtype=HALF))
    out, lse = cuda_flash.forward(q, k, v, blocks, rule)
    grads = cuda_flash.backward(out.to(HALF), q, k, v, out.to(HALF), lse, blocks, rule)
    assert out.dtype == lse.dtype == torch.float32
    assert [x.shape for x in grads] == [x.transpose(0, 1).shape for x in (q, k, v)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [12, 64, 256])
def test_a_right_kernel_is_trusted(kernel: None, dtype: torch.dtype, dim: int) -> None:
    assert cuda_flash.is_right(torch.device("cpu"), dtype, dim)


def wrong_scale(*args: Any, scale: float) -> tuple[Any, ...]:
    return stand_in_forward(*args, scale=1.1 * scale)


def wrong_base(*args: Any, scale: float) -> tuple[Any, ...]:
    out, lse, *rest = stand_in_forward(*args, scale=scale)
    return out, lse * 1.4427, *rest


def not_causal(q: Tensor, k: Tensor, v: Tensor, p: float, _: bool, *, scale: float):
    return stand_in_forward(q, k, v, p, False, scale=scale)


def absent(*args: Any, scale: float) -> tuple[Any, ...]:
    raise RuntimeError("no kernel image")


@pytest.mark.parametrize("broken", [wrong_scale, wrong_base, not_causal, absent])
def test_a_wrong_forward_is_not_trusted(
    broken: Callable[..., Any], kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_flash, "flash_forward", broken)
    with pytest.warns(UserWarning, match=r"differs from plain|fails: no kernel image"):
        assert not cuda_flash.is_right(torch.device("cpu"), HALF, 64)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_wrong_gradient_is_not_trusted(
    place: int, kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, scale: float) -> tuple[Tensor, ...]:
        grads = list(stand_in_backward(*args, scale=scale))
        grads[place] = grads[place] * 1.1
        return tuple(grads)

    monkeypatch.setattr(cuda_flash, "flash_backward", broken)
    with pytest.warns(UserWarning, match="differs from plain tensor ops"):
        assert not cuda_flash.is_right(torch.device("cpu"), HALF, 64)


def test_what_the_kernel_does_not_take_goes_by_plain_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda_flash, "is_right", lambda *_: True)
    cuda_flash.takes.cache_clear()
    assert attention_backend("cuda", HALF, 64, 64) == "cuda_flash"
    assert attention_backend("cuda", torch.float16, 192, 128) == "cuda_flash"
    assert attention_backend("cuda", torch.float32, 64, 64) == "blockwise"
    assert attention_backend("cuda", HALF, 320, 64) == "blockwise"
    assert attention_backend("cuda", HALF, 64, 64, softcap=30.0) == "blockwise"
    monkeypatch.setattr(cuda_flash, "is_right", lambda *_: False)
    cuda_flash.takes.cache_clear()
    assert attention_backend("cuda", HALF, 64, 64) == "blockwise"
    cuda_flash.takes.cache_clear()
