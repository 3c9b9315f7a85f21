"""What is installed is what is in the folders."""

from __future__ import annotations

from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages_in(folder: Path, name: str) -> set[str]:
    """Every folder with a Python file; it must say that it is a package."""
    found = set()
    for file in folder.rglob("*.py"):
        parts = file.parent.relative_to(folder).parts
        assert (file.parent / "__init__.py").is_file(), f"{file.parent} has no __init__.py"
        found.add(".".join([name, *parts]))
    return found


def test_every_folder_is_a_listed_package(project):
    folders = project["tool"]["setuptools"]["package-dir"]
    assert folders == {"prefix_rewrite": "prefix_rewrite", "prefix_rewrite.passes": "passes"}
    found = set().union(*(packages_in(ROOT / path, name) for name, path in folders.items()))
    assert sorted(project["tool"]["setuptools"]["packages"]) == sorted(found)


def test_the_command_and_its_module_exist(project):
    for entry in project["project"]["scripts"].values():
        module, _, function = entry.partition(":")
        path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
        assert path.is_file() and f"def {function}(" in path.read_text()


def test_the_core_needs_little(project):
    names = {spec.split(">")[0] for spec in project["project"]["dependencies"]}
    assert names == {"torch", "networkx", "numpy"}
