"""A kernel package that is there but fails to import changes nothing on the CPU."""

from __future__ import annotations

import pytest
from fresh import run_fresh

PACKAGES = ("mamba_ssm", "causal_conv1d", "fla", "flash_attn")

CODE = """
    import importlib.util
    from families import build_model
    from forests import SHAPES, calls_of
    from oracle import assert_equal_results, run_forest, run_rows

    from prefix_rewrite import PrefixForest, prefix_compile

    assert importlib.util.find_spec("mamba_ssm").origin.startswith({folder!r})
    calls = calls_of(SHAPES["nested"])
    model = build_model("bamba", num_hidden_layers=2, attn_layer_indices=[1])
    got = run_forest(prefix_compile(model), PrefixForest.from_calls(calls))
    assert_equal_results(got, run_rows(model, calls))
    print("equal")
"""


@pytest.mark.parametrize("error", ["ImportError", "OSError"])
def test_a_broken_kernel_package_changes_nothing(tmp_path, error):
    for name in PACKAGES:
        package = tmp_path / name
        package.mkdir()
        (package / "__init__.py").write_text(f"raise {error}('built for another torch')\n")
        info = tmp_path / f"{name}-2.2.4.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.2.4\n")
    assert run_fresh(CODE.format(folder=str(tmp_path)), tmp_path).endswith("equal\n")
