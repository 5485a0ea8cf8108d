"""What a new spec changes about the processes of its models."""

from __future__ import annotations

import pytest

from orchestrator.changes import Tag, difference, interpreters, version_of
from placements.engines import Engine
from placements.parse import parse
from placements.spec import Spec

MODEL = "models: {a: {source: ./a, engine: ENGINE}}\n"


def read(text: str) -> Spec:
    parsed = parse(text, "f.yaml", "/specs")
    assert parsed.ok
    assert parsed.spec is not None
    return parsed.spec


def changed(before: str, after: str, engine: Engine) -> list[tuple[Tag, list[str]]]:
    specs = [read(text + MODEL.replace("ENGINE", engine)) for text in (before, after)]
    return [(c.tag, [field.field for field in c.fields]) for c in difference(*specs, {"a": engine})]


NXDI = "engines: {nxd-inference: {python: PATH}}\n"


@pytest.mark.parametrize(
    ("engine", "before", "after", "found"),
    [
        ("nxd-inference", "", NXDI, (Tag.RESTART, ["engines.nxd-inference.python"])),
        ("nxd-inference", NXDI, "", (Tag.RESTART, ["engines.nxd-inference.python"])),
        ("auto", "", NXDI, (Tag.RESTART, ["engines.nxd-inference.python"])),
        ("transformers-neuronx", "", NXDI, (Tag.NONE, [])),
        ("cpu", "", NXDI, (Tag.NONE, [])),
        ("nxd-inference", NXDI, NXDI.replace("PATH", "/specs/PATH"), (Tag.NONE, [])),
    ],
)
def test_another_interpreter_restarts_the_models_of_its_engine(
    engine: Engine, before: str, after: str, found: tuple[Tag, list[str]]
) -> None:
    """And no others; the same path written otherwise is the same."""
    assert changed(before, after, engine) == [found]


def test_the_interpreter_is_a_part_of_the_version() -> None:
    """Replicas of two interpreters are not interchangeable; without one the version is as it was."""
    text = MODEL.replace("ENGINE", "auto")
    specs = [read(text), read(NXDI + text), read(NXDI.replace("PATH", "/p") + text)]
    versions = [version_of(one.models[0], "auto", 8, interpreters(one, "auto")) for one in specs]
    assert len(set(versions)) == 3
    assert versions[0] == version_of(specs[0].models[0], "auto", 8)


@pytest.mark.parametrize(
    ("engine", "tag"), [("auto", Tag.RECOMPILE), ("nxd-inference", Tag.RECOMPILE), ("cpu", Tag.RESTART)]
)
def test_another_shape_is_compiled_anew_where_something_is_compiled(engine: Engine, tag: Tag) -> None:
    """`auto` that is not resolved stands for an engine of Neuron devices."""
    specs = [read(f"models: {{a: {{source: ./a, max_batch: {n}}}}}\n") for n in (2, 4)]
    (change,) = difference(*specs, {"a": engine})
    assert change.tag is tag
