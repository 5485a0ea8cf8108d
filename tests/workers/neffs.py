"""Caches of NEFFs as tests make them."""

from __future__ import annotations

from pathlib import Path

COMPILER = "2.16.372.0+4a9b2326"
GRAPH, FLAGS = "cd73c69136bf675613f6", "2c2d707e"


def graph(cache: Path, key: str = GRAPH, flags: str = FLAGS, compiler: str = COMPILER, **files: str) -> Path:
    """The folder of a graph with these files; a name is given as ``**{"model.neff": "..."}``."""
    folder = cache / f"neuronxcc-{compiler}" / f"MODULE_{key}+{flags}"
    folder.mkdir(parents=True)
    for file, text in files.items():
        (folder / file).write_text(text)
    return folder


def finished(cache: Path, key: str = GRAPH, neff: str = "NEFF", **where: str) -> Path:
    """One that a compiler has finished."""
    made = {"model.hlo_module.pb": "graph", "compile_flags.json": "[]", "model.neff": neff, "model.done": ""}
    return graph(cache, key, **where, **made)


def content(folder: Path) -> dict[str, str]:
    """Every file below it."""
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}
