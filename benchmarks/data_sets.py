"""Captured calls of real agents, from a folder beside the project or `PREFIX_REWRITE_DATA`."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from prefix_rewrite import CapturedCall, PrefixForest
from prefix_rewrite.errors import PrefixRewriteError

BESIDE = Path(__file__).resolve().parents[2] / "shared" / "data"
SETS = {
    "small": "small.jsonl.gz",
    "swe_elide": "swe_elide.jsonl.gz",
    "game24": "groups_game24.jsonl.gz",
    "tot_text": "tree_tot_text.jsonl.gz",
    "webshop": "tree_lats_webshop.npz",
    "tau": "medium_tau.npz",
    "code": "medium_code.npz",
}


def load_set(name: str, *, max_tokens: int, vocab_size: int) -> list[CapturedCall]:
    """Return the first calls whose forest fits the budget, at least one.

    Ids are numbered densely in order of first use, which keeps every prefix equality.

    Raises:
        PrefixRewriteError: the folder is absent, or the calls use more ids than the vocabulary.
    """
    folder = Path(os.environ.get("PREFIX_REWRITE_DATA", BESIDE))
    if not (folder / SETS[name]).is_file():
        raise PrefixRewriteError(f"{folder / SETS[name]} is absent; set PREFIX_REWRITE_DATA")
    reader = _reader(folder)
    records, num_ids = reader.remap(list(reader.iter_calls(folder / SETS[name])))
    if num_ids > vocab_size:
        raise PrefixRewriteError(f"{name} uses {num_ids} ids, the vocabulary has {vocab_size}")
    return _fitting(records, max_tokens)


def _fitting(records: list[dict[str, Any]], max_tokens: int) -> list[CapturedCall]:
    calls: list[CapturedCall] = []
    for record in records:
        more = [*calls, CapturedCall(record["prompt_ids"], record["output_ids"])]
        if calls and PrefixForest.from_calls(more).num_tokens > max_tokens:
            break
        calls = more
    return calls


def _reader(folder: Path) -> ModuleType:
    """The data folder brings its own reader."""
    spec = importlib.util.spec_from_file_location("captured_calls_reader", folder / "load.py")
    assert spec is not None and spec.loader is not None, f"no load.py in {folder}"
    reader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reader)
    return reader
