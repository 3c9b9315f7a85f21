"""Models that call `torch.nn.attention.flex_attention`: causal by the code of their mask alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from forests import SHAPES, calls_of
from library_models import Attention, language
from oracle import assert_equal_results, run_forest, run_rows
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from prefix_rewrite import PrefixForest, UnsupportedModelError, prefix_compile

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*deprecated"),
]


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def causal_too(batch, head, to, at):
    """Whatever its arguments are called."""
    return at <= to


def windowed(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 1000)


def strictly(b, h, q_idx, kv_idx):
    return q_idx > kv_idx


def reversed_in_time(b, h, q_idx, kv_idx):
    return kv_idx >= q_idx


def by_head(b, q_idx, h, kv_idx):
    return q_idx >= kv_idx


def everything(b, h, q_idx, kv_idx):
    return kv_idx == kv_idx


def flex(mask_mod=causal, **options):
    """Attention over q [1,T,H,D] that makes its block mask as it goes."""
    options = {"enable_gqa": True, **options}

    def attend(q, k, v):
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        given = {}
        if mask_mod is not None:
            given["block_mask"] = create_block_mask(
                mask_mod, None, None, q.shape[2], k.shape[2], device=q.device
            )
        out = flex_attention(q, k, v, **given, **options)
        out = out[0] if isinstance(out, tuple) else out
        return out.transpose(1, 2)

    return attend


def made_inside(flex_attention):
    """The mask's function is the forward's own."""

    def attend(q, k, v):
        def mine(b, h, q_idx, kv_idx):
            return q_idx >= kv_idx

        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mask = create_block_mask(mine, None, None, q.shape[2], k.shape[2], device=q.device)
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2)

    return attend


def sdpa(scale=None):
    """The same attention, which has gradients on CPU."""

    def attend(q, k, v):
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        options = {"is_causal": True, "enable_gqa": True, "scale": scale}
        return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

    return attend


def model_of(attend):
    return language(lambda: Attention(attend))


ACCEPTED = {
    "causal": (lambda: flex(), None),
    "other names": (lambda: flex(causal_too), None),
    "a lambda": (lambda: flex(lambda b, h, q, k: q >= k), None),
    "made inside, and compiled": (lambda: made_inside(torch.compile(flex_attention)), None),
    "with a scale": (lambda: flex(scale=0.7), 0.7),
    "kernel options": (lambda: flex(kernel_options={"BLOCK_M": 16}), None),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_a_forest_equals_its_calls_alone(case):
    make, scale = ACCEPTED[case]
    compiled = prefix_compile(model_of(make()))
    for shape in ("nested", "many_roots"):
        calls = calls_of(SHAPES[shape])
        got = run_forest(compiled, PrefixForest.from_calls(calls))
        expected = run_rows(model_of(sdpa(scale)), calls, forward=lambda m, ids: m(ids))
        assert_equal_results(got, expected)


def test_the_library_itself_agrees():
    """Log-probabilities of the untouched model, without gradients, which flex lacks on CPU."""
    model = model_of(flex())
    calls = calls_of([(6, [(3, []), (2, [])])])
    got = prefix_compile(model)(PrefixForest.from_calls(calls)).per_call()
    with torch.no_grad():
        for call, mine in zip(calls, got, strict=True):
            ids = torch.from_numpy(call.token_ids)[None]
            at = torch.from_numpy(call.sampled).nonzero()[:, 0]
            theirs = model(ids)[0].log_softmax(-1)[at - 1, ids[0, at]]
            torch.testing.assert_close(mine.detach(), theirs, rtol=0, atol=1e-5)


def made_before():
    mask = create_block_mask(causal, None, None, 11, 11, device="cpu")
    return flex(None, block_mask=mask)


REFUSED = {
    "no mask": (lambda: flex(None), "attention is not causal"),
    "a window": (lambda: flex(windowed), "whose function is not q_idx >= kv_idx"),
    "not itself": (lambda: flex(strictly), "whose function is not q_idx >= kv_idx"),
    "the future": (lambda: flex(reversed_in_time), "whose function is not q_idx >= kv_idx"),
    "heads": (lambda: flex(by_head), "whose function is not q_idx >= kv_idx"),
    "everything": (lambda: flex(everything), "whose function is not q_idx >= kv_idx"),
    "a mask made before": (made_before, "that the model did not make itself"),
    "score_mod": (lambda: flex(score_mod=lambda score, b, h, q, k: score), "asks for score_mod"),
    "grouped": (lambda: flex(enable_gqa=False), "grouped queries without enable_gqa"),
    "log-sum-exp": (lambda: flex(return_lse=True), "asks for return_lse"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused(case):
    make, reason = REFUSED[case]
    with pytest.raises(UnsupportedModelError, match=reason):
        prefix_compile(model_of(make()))


def test_nobody_else_notices():
    """Eager code makes a real mask, and a user's own compile runs the real function."""
    model = model_of(flex())
    ids = torch.arange(3, 14)[None]
    targets: set[str] = set()

    def keep(graph_module, inputs):
        targets.update(str(node.target) for node in graph_module.graph.nodes)
        return graph_module.forward

    with torch.no_grad():
        plain = model_of(sdpa())(ids)
        prefix_compile(model)
        torch.testing.assert_close(model(ids), plain)
        torch.testing.assert_close(torch.compile(model, backend=keep)(ids), plain)
    assert "flex_attention" in targets
    assert not [target for target in targets if "prefix_rewrite" in target]
    assert isinstance(create_block_mask(causal, None, None, 11, 11, device="cpu"), BlockMask)
