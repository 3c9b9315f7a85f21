"""The rewritten graph is an ordinary one: every backend of torch.compile runs it, exactly."""

from __future__ import annotations

import pytest
import torch
from families import build_model
from forests import SHAPES, calls_of
from oracle import assert_equal_results, run_forest, run_rows

from prefix_rewrite import PrefixForest, prefix_compile

SETTINGS = {
    "llama": {"num_hidden_layers": 1},
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1]},
}


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("family", SETTINGS)
def test_every_backend_is_exact_on_every_forest(family, backend):
    model = build_model(family, **SETTINGS[family])
    compiled = prefix_compile(model, backend=backend)
    for shape in ("nested", "many_roots", "one_token", "fork_in_chunk"):
        calls = calls_of(SHAPES[shape])
        got = run_forest(compiled, PrefixForest.from_calls(calls))
        assert_equal_results(got, run_rows(model, calls))


def test_a_backend_may_be_a_function():
    graphs = []

    def keep(graph_module, inputs):
        graphs.append(graph_module)
        return graph_module.forward

    model = build_model("handwritten", layers=1)
    calls = calls_of(SHAPES["star"])
    got = run_forest(prefix_compile(model, backend=keep), PrefixForest.from_calls(calls))
    assert_equal_results(got, run_rows(model, calls))
    (graph,) = graphs
    assert isinstance(graph, torch.fx.GraphModule)


def test_an_unknown_backend_is_named():
    with pytest.raises(Exception, match="no_such_backend"):
        prefix_compile(build_model("handwritten", layers=1), backend="no_such_backend")
