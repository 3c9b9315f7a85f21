"""Any module can be the first one imported, and the forest half needs no torch."""

from __future__ import annotations

from fresh import run_fresh

EVERY_MODULE_FIRST = """
    import importlib, os, pkgutil, sys
    import torch, torch._dynamo  # once, so that each child imports in no time
    import prefix_rewrite.passes

    # An editable install maps passes/ into the package from beside it.
    homes = {"prefix_rewrite.": prefix_rewrite, "prefix_rewrite.passes.": prefix_rewrite.passes}
    names = sorted({m.name for prefix, home in homes.items()
                    for m in pkgutil.walk_packages(home.__path__, prefix)})
    for name in [m for m in sys.modules if m.startswith("prefix_rewrite")]:
        del sys.modules[name]
    failed = []
    for name in names:
        child = os.fork()
        if child == 0:
            try:
                importlib.import_module(name)
            except BaseException as error:
                print(name, repr(error), flush=True)
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            failed.append(name)
    assert not failed, failed
    print(len(names), "prefix_rewrite.passes.pipeline" in names)
"""


def test_every_module_can_come_first():
    count, has_passes = run_fresh(EVERY_MODULE_FIRST).split()[-2:]
    assert int(count) > 30 and has_passes == "True"


def test_every_public_name_is_there_and_listed():
    run_fresh("""
        import prefix_rewrite
        for name in prefix_rewrite.__all__:
            assert getattr(prefix_rewrite, name).__name__ == name
        try:
            prefix_rewrite.nothing
        except AttributeError as error:
            assert "no attribute 'nothing'" in str(error)
        else:
            raise AssertionError
    """)


def test_the_forest_half_needs_no_torch():
    run_fresh("""
        import sys
        from prefix_rewrite import CapturedCall, ForestError, PrefixForest
        forest = PrefixForest.from_calls([CapturedCall([1, 2], [3]), CapturedCall([1, 2], [4])])
        assert PrefixForest.from_graph(forest.graph).num_tokens == 4
        assert forest.split(3)[0].stats()
        assert "torch" not in sys.modules and "transformers" not in sys.modules
    """)


def test_compiling_a_plain_module_needs_no_transformers():
    run_fresh("""
        import sys
        from one_layer import OneLayer
        from prefix_rewrite import CapturedCall, PrefixForest, prefix_compile
        compiled = prefix_compile(OneLayer())
        assert len(compiled(PrefixForest.from_calls([CapturedCall([1, 2], [3])])).logprobs) == 1
        assert "transformers" not in sys.modules
    """)
