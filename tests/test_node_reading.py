"""Names that findings give to modules."""

from __future__ import annotations

import pytest
from torch.fx import Graph

from prefix_rewrite.passes.nodes import module_path

ROOT = "L['forward']"


@pytest.mark.parametrize(
    ("recorded", "name"),
    [
        (ROOT, ""),
        (f"{ROOT}.model.layers.0.mlp", "model.layers.0.mlp"),
        (f"{ROOT}._modules['model']._modules['layers']._modules['0']", "model.layers.0"),
        (
            f"{ROOT}.__dict__['_modules']['base_model'].__dict__['_modules']['model'].lm_head",
            "base_model.model.lm_head",
        ),
    ],
)
def test_a_module_is_named_as_the_model_names_it(recorded, name):
    node = Graph().placeholder("x")
    node.meta["nn_module_stack"] = {"": (ROOT, object), "inner": (recorded, object)}
    assert module_path(node) == name
