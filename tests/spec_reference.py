"""Writes the tables of docs/spec.md: the JSON Schema, instance types and options as markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from placements.engines.capabilities import Capabilities
from placements.engines.nxd_inference.capabilities import NXD_FAMILIES, NXD_VERSIONS
from placements.engines.optimum_neuron.capabilities import OPTIMUM_FAMILIES
from placements.engines.options import FIELDS, PACKAGED, UNSERVED, Option
from placements.engines.options import TABLES as OPTION_TABLES
from placements.engines.registry import ENGINES, serves
from placements.facts.checkpoints import FAMILIES
from placements.facts.topology import DEGREES, LNC_CHOICES, TOPOLOGIES, Topology
from placements.spec.json_schema import json_schema
from placements.spec.notation import TYPE_IN_WORDS

_BLOCK = re.compile(
    r"(?P<begin><!-- generated from the (?:schema|topology|contracts|engines): (?P<name>[a-z]+) -->\n)"
    r".*?(?P<end><!-- end of generated -->)",
    re.DOTALL,
)
_SECTION = re.compile(r"\bSee ([A-Z][a-z]+)\.")
OPTIMUM_NAMES = {"tnx": "0.0.28", "nxd": "0.4"}  # by what Optimum Neuron is built on
_Schema = Mapping[str, Any]


def renewed(page: str, tables: Mapping[str, Callable[[], str]] | None = None) -> str:
    """The page with each generated block made anew. KeyError for a block of a name that is no table's.

    A block stands between ``<!-- generated from the schema: NAME -->`` (or ``topology``, ``contracts``) and
    ``<!-- end of generated -->``.
    """
    return _BLOCK.sub(
        lambda match: match["begin"] + "\n" + (tables or TABLES)[match["name"]]() + "\n" + match["end"], page
    )


def _file() -> str:
    schema = json_schema()
    return _fields(
        row for name, field in schema["properties"].items() for row in [_row(name, field, name in schema["required"])]
    )


def _hosts() -> str:
    schema = json_schema()
    return _fields(_rows("hosts.", schema["$defs"]["Hosts"], schema))


def _model() -> str:
    schema = json_schema()
    # the schema itself cannot require a source: the echo engine has none
    return _fields(_rows("", {**schema["$defs"]["Model"], "required": ["source"]}, schema))


def _instances() -> str:
    lines = [
        "| type | devices | cores | HBM of a core | vCPUs | memory | devices are joined as |",
        "|---|---|---|---|---|---|---|",
    ]
    for topology in TOPOLOGIES.values():
        mark = " (*)" if topology.note else ""
        cores, hbm = (
            _by_lnc(topology, describe) for describe in (lambda t: str(t.cores), lambda t: f"{t.hbm_per_core_gib} GiB")
        )
        link = {"none": "-", "torus": "4 x 4 torus"}.get(topology.link, topology.link)
        lines.append(
            f"| {topology.instance}{mark} | {topology.devices} | {cores} | {hbm} | {topology.vcpus} "
            f"| {topology.memory_gib} GiB | {link} |"
        )
    notes = "".join(f"\n(*) {noted.instance}: {noted.note}.\n" for noted in TOPOLOGIES.values() if noted.note)
    return "\n".join(lines) + "\n" + notes


def _by_lnc(topology: Topology, describe: Callable[[Topology], str]) -> str:
    if topology.lnc is None:
        return describe(topology)
    others = [lnc for lnc in LNC_CHOICES if lnc != topology.lnc]
    return describe(topology) + "".join(f"; {describe(topology.at_lnc(lnc))} with `lnc: {lnc}`" for lnc in others)


def _degrees() -> str:
    lines = ["| family | tp_degree | legal | preferred |", "|---|---|---|---|"]
    lines.extend(
        f"| {family} | {row.tp} | {row.legal} | {row.preferred} |"
        for family, table in DEGREES.items()
        for row in table.values()
    )
    return "\n".join(lines) + "\n"


def _engines() -> str:
    schema = json_schema()
    return _fields(_rows("engines.ENGINE.", schema["$defs"]["EngineSettings"], schema))


def _served() -> str:
    lines = ["| family | transformers-neuronx | nxd-inference | optimum-neuron |", "|---|---|---|---|"]
    for family in FAMILIES:
        series = NXD_FAMILIES.get(family)
        on_tnx = "yes" if serves("transformers-neuronx", family) else "-"
        on_nxd = "-" if series is None else "yes" if series == NXD_VERSIONS[0] else f"from {series} on"
        on_optimum = " and ".join(OPTIMUM_NAMES[era] for era, held in OPTIMUM_FAMILIES.items() if family in held) or "-"
        lines.append(f"| {family} | {on_tnx} | {on_nxd} | {on_optimum} |")
    return "\n".join(lines) + "\n"


def _options() -> str:
    """By class and kind, those that a spec may give."""
    lines = ["| of | must be | options |", "|---|---|---|"]
    inner = {
        f"{table.partition('.')[0]}.{option.table}"
        for table, held in OPTION_TABLES.items()
        for name, option in held.items()
        if option.table and not _is_owned(table, name)
    }
    for table, held in OPTION_TABLES.items():
        if not (table.endswith("NeuronConfig") or ":" in table or table in inner):
            continue  # no option that may be given holds it
        kinds: dict[str, list[str]] = {}
        for name, option in held.items():
            if not _is_owned(table, name):
                since = f" ({_series(option)})" if option.first and table.startswith("neuronx") else ""
                kinds.setdefault(option.table or option.wanted, []).append(f"`{name}`{since}")
        package, family = table.partition(":")[::2]
        of = f"{package.partition('.')[0]}, the class of {family}" if family else table
        lines.extend(f"| {of} | {kind} | {', '.join(names)} |" for kind, names in sorted(kinds.items()))
    return "\n".join(lines) + "\n"


def _is_owned(table: str, name: str) -> bool:
    package = table.partition(":")[0] if ":" in table else table
    return any(name in owned.get(package, {}) for owned in (FIELDS, UNSERVED))


def _series(option: Option) -> str:
    if option.last == NXD_VERSIONS[-1]:
        return f"{option.first}+"
    return option.first if option.first == option.last else f"{option.first} to {option.last}"


def _owned() -> str:
    lines = ["| engine | option | field |", "|---|---|---|"]
    for package, engine in PACKAGED.items():
        by_field: dict[str, list[str]] = {}
        for table in (f"{package}.NeuronConfig", package):
            for name, field in FIELDS.get(table, {}).items():
                by_field.setdefault(field, []).append(f"`{name}`")
        lines.extend(f"| {engine.engine} | {', '.join(names)} | {field} |" for field, names in by_field.items())
    return "\n".join(lines) + "\n"


def _abilities() -> str:
    """By engine, what a model on it may set."""
    lines = [
        "| engine | default `dtype` | `quantize` | `quantize_kv` | `draft` | adapters | `engine_options` of its own |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for name, engine in ENGINES.items():
        quantize = ", ".join(engine.quantize) or "-"
        if engine.quantize and engine.unquantized:
            quantize += f"; not {' and '.join(sorted(engine.unquantized))}"
        cells = (
            f"`{name}`",
            engine.dtype,
            quantize,
            ", ".join(engine.quantize_kv) or "-",
            ", ".join(f"`{method}`" for method in engine.drafts) or "-",
            "yes" if engine.serves_adapters else "-",
            ", ".join(f"`{option}`" for option in engine.options) or "-",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _versions() -> str:
    """By engine, its versions, machines and families."""
    lines = ["| engine | versions | machines | families | not served |", "|---|---|---|---|---|"]
    for name, engine in ENGINES.items():
        if engine.families:
            machines = [machines for machines in DEGREES if engine.runs_in(machines)]
            shown = [f"{each} up to {engine.newest(each)}" if engine.newest(each) else each for each in machines]
            versions = f"{engine.versions[0]} to {engine.versions[-1]}" if engine.versions else "-"
            reasons: dict[str, list[str]] = {}
            for family, why in engine.refused.items():
                reasons.setdefault(why, []).append(family)
            refused = "; ".join(f"{', '.join(families)}: {why}" for why, families in reasons.items()) or "-"
            families = ", ".join(_since(family, engine) for family in engine.families)
            cells = (f"`{name}`", versions, ", ".join(shown), families, refused)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _since(family: str, engine: Capabilities) -> str:
    first = next((version for version in engine.versions if engine.serves(family, version=version)), "")
    return f"{family} ({first} and later)" if first and first != engine.versions[0] else family


def _checkpoints() -> str:
    """The quantized weights and types of rotary positions of each engine that reads checkpoints."""
    lines = ["| engine | quantized weights | `rope_type` besides `default` |", "|---|---|---|"]
    for name, engine in ENGINES.items():
        if engine.reads_checkpoint and not engine.forwards:
            weights = "; ".join(f"{family}: {', '.join(methods)}" for family, methods in engine.weights.items()) or "-"
            families: dict[str, list[str]] = {}
            for family, types in engine.ropes.items():
                shown = ", ".join(f"({kind})" if differs else kind for kind, differs in types.items())
                families.setdefault(shown, []).append(family)
            ropes = "; ".join(f"{', '.join(sorted(names))}: {shown}" for shown, names in families.items()) or "-"
            lines.append(f"| `{name}` | {weights} | {ropes} |")
    return "\n".join(lines) + "\n"


ENGINE_TABLES: Mapping[str, Callable[[], str]] = {
    "abilities": _abilities,
    "versions": _versions,
    "checkpoints": _checkpoints,
}
"""What can be generated of docs/engines.md, in the order of the page."""

TABLES: Mapping[str, Callable[[], str]] = {
    "file": _file,
    "hosts": _hosts,
    "instances": _instances,
    "engines": _engines,
    "served": _served,
    "model": _model,
    "degrees": _degrees,
    "owned": _owned,
    "options": _options,
}
"""What can be generated, by name, in the order of the page."""


def _fields(rows: Iterator[tuple[str, str, str, str]]) -> str:
    lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    lines.extend(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)
    return "\n".join(lines) + "\n"


def _rows(prefix: str, kind: _Schema, schema: _Schema) -> Iterator[tuple[str, str, str, str]]:
    """A row for each field, and after it those of the mapping that it holds."""
    for name, field in kind["properties"].items():
        yield _row(prefix + name, field, name in kind.get("required", ()))
        for path, inner in _mappings(f"{prefix}{name}.", field, schema):
            yield from _rows(path, inner, schema)


def _mappings(path: str, field: _Schema, schema: _Schema) -> Iterator[tuple[str, _Schema]]:
    if "$ref" in field:
        yield from _mappings(path, schema["$defs"][field["$ref"].rpartition("/")[2]], schema)
    elif "properties" in field:
        yield path, field
    elif "items" in field:
        yield from _mappings(path, field["items"], schema)
    for choice in (*field.get("anyOf", ()), *field.get("oneOf", ())):
        yield from _mappings(path, choice, schema)


def _row(name: str, field: _Schema, required: bool) -> tuple[str, str, str, str]:
    meaning = _SECTION.sub(lambda match: f"See [{match[1]}](#{match[1].lower()}).", field["description"])
    return f"`{name}`", _type(field), "required" if required else _default(field), meaning


def _type(field: _Schema) -> str:
    """The type in words, with its bounds."""
    if TYPE_IN_WORDS in field:
        return str(field[TYPE_IN_WORDS])
    if "anyOf" in field:
        return ", or ".join(_type(choice) for choice in field["anyOf"] if choice.get("type") != "null")
    if "const" in field or "enum" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    kind = field.get("type", "object")
    if kind == "array":
        return "list of " + _type(field["items"]).replace("number", "numbers", 1)
    words = {"integer": "whole number", "number": "number", "boolean": "true or false", "string": "text"}
    return words.get(kind, "a mapping") + _bounds(field)


def _bounds(field: _Schema) -> str:
    if "exclusiveMinimum" in field:
        return f" above {_number(field['exclusiveMinimum'])}, at most {_number(field['maximum'])}"
    return f", {_number(field['minimum'])} to {_number(field['maximum'])}" if "minimum" in field else ""


def _default(field: _Schema) -> str:
    value = field.get("default")
    if value is None:
        return "unset"
    if isinstance(value, dict):
        return "`{}`"  # each field has its own default
    return f"`{value if isinstance(value, str) and value else _number(value)}`"


def _number(value: object) -> str:
    """A whole one without a point."""
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)
