"""The plan of a spec as data and text, from the running controller or computed locally by the same code."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.cli.app import CHANGES, FAILED
from orchestrator.cli.client import AdminClient, FleetRefused
from orchestrator.cli.output import stdout, use_color
from orchestrator.control.resolve.spec_file import SpecFile
from orchestrator.process.failure import Failed
from orchestrator.process.home import Home
from orchestrator.process.speed_record import record_of
from orchestrator.process.text_table import columns, three_digits
from placements.explain.core_map import core_map, host_names
from placements.facts.core_range import CoreRange
from placements.facts.plural import counted
from placements.facts.topology import Host
from placements.planner.host_choice import plan_on_cluster
from placements.planner.ledger import ledger
from placements.planner.plan import Placement, Plan
from placements.resources.calibration import MeasuredSpeed, speed_rows
from placements.spec.problems import Problem, has_errors
from placements.spec.schema import Spec

MOST_ROWS = 50  # replicas that have a row of their own
KINDS = ("start", "stop", "move", "restart", "reconfigure")
SIGNS = {"create": "+", "update": "~", "replace": "-/+", "delete": "-"}  # by the action on a model


@dataclass(frozen=True)
class PlanResult:
    """A plan; ``data`` is the JSON that docs/cli.md documents."""

    data: dict[str, Any]
    table: str
    problems: tuple[Problem, ...]
    failed: bool
    changes: bool

    @property
    def exit_code(self) -> int:
        return FAILED if self.failed else CHANGES if self.changes else 0


def make_plan(
    file: SpecFile, fleet: AdminClient | None, *, brief: bool = False, measured: Sequence[MeasuredSpeed] = ()
) -> PlanResult:
    """Returns the plan of the spec, from the fleet or computed here. Raises Failed if the fleet does not answer.

    ``brief`` omits environments, memory, speeds and threads from the table. ``measured`` speeds correct the estimates,
    in place of those that the fleet has measured.
    """
    if fleet is None or not file.text:
        return _without_fleet(file, brief, measured)
    try:
        data = fleet.post_spec("plan", text_of(file))
        if measured and file.spec is not None:
            data["speeds"] = speed_rows(file.spec, file.hosts, file.checkpoints, measured)
    except FleetRefused as refused:
        if not refused.problems:
            raise
        data = _empty(refused.problems)
    return _result(data, file, brief)


def _result(data: dict[str, Any], file: SpecFile, brief: bool) -> PlanResult:
    table = plan_table(data, file, brief=brief)
    return PlanResult(data, table, problems_of(data), plan_fails(data), plan_changes(data))


def _resting(data: dict[str, Any], spec: Spec | None) -> tuple[str, ...]:
    """Returns the models with ``min: 0`` that have no replica in the plan."""
    planned = {item["model"] for item in (*data["placements"], *data["unplaced"])}
    models = () if spec is None else spec.models
    return tuple(model.name for model in models if model.name not in planned and model.replicas.min == 0)


def text_of(file: SpecFile) -> tuple[str, str, str]:
    """Returns the text, the file name and the folder of a spec. Raises Failed if the file could not be read."""
    if not file.text and file.problems:
        raise Failed.of(file.problems[0])
    return file.text, file.name, file.base_dir


def problems_of(data: dict[str, Any]) -> tuple[Problem, ...]:
    return tuple(Problem(**problem) for problem in data["problems"])


def plan_fails(data: dict[str, Any]) -> bool:
    """Returns whether the plan cannot be applied: it has an error, or a replica required by `min` has no place."""
    missing = [problem for unplaced in data["unplaced"] for problem in unplaced["problems"]]
    return any(problem["severity"] == "error" for problem in [*data["problems"], *missing])


def plan_changes(data: dict[str, Any]) -> bool:
    return bool(data["changes"]) or any(_changed(model) for model in data["models"])


def speeds_of_home() -> tuple[MeasuredSpeed, ...]:
    """Returns the speeds that earlier fleets and `corewright verify` have measured in this home."""
    return record_of(Home.from_environment()).measured()


def _without_fleet(file: SpecFile, brief: bool, measured: Sequence[MeasuredSpeed] = ()) -> PlanResult:
    if file.spec is None or has_errors(file.problems):
        return PlanResult(_empty(file.problems), "", file.problems, failed=True, changes=False)
    choice = plan_on_cluster(file.spec, file.hosts, file.checkpoints)
    placed, hosts = choice.plan, choice.all_hosts
    data = {"index": None, "revision": None, **placed.with_problems(file.problems).as_dict()}
    data["changes"] = [{"replica": f"{p.model}/{p.replica}", "change": "start"} for p in placed.placements]
    data |= {"models": [], **ledger(file.spec, hosts, placed, file.checkpoints, file.drafts).as_dict()}
    data["hosts_to_add"] = [added.as_dict() for added in choice.added()]
    data["speeds"] = speed_rows(file.spec, file.hosts, file.checkpoints, measured or speeds_of_home())
    return _result(data, file, brief)


def _empty(problems: Sequence[Problem]) -> dict[str, Any]:
    results = ("placements", "unplaced", "moves", "problems", "changes", "models", "hosts_to_add")
    lists = (*results, "hosts", "memory", "speeds")
    entries = [problem.as_dict() for problem in problems]
    return {"index": None, "revision": None, **{name: entries if name == "problems" else [] for name in lists}}


def plan_table(data: dict[str, Any], file: SpecFile, *, brief: bool = False) -> str:
    """Returns the core map, the replicas, the changes of each model, the resources, and the number of changes.

    Keys that a fleet of another version does not send are left out.
    """
    if has_errors(problems_of(data)):
        return ""
    parts = [picture(data, file.hosts, file.spec), _replicas(data), "\n".join(_added(data))]
    if resting := _resting(data, file.spec):
        parts.append(f"no replicas until the first request (min: 0): {', '.join(resting)}")
    parts += [f"unplaced: {problem['what']}" for problem in _missing(data)]
    parts += ["\n".join(lines) for lines in map(model_lines, data["models"]) if lines]
    parts.append("\n".join(move_lines(data.get("moves") or ())))
    if not brief:
        parts += details(data)
    parts.append(_count(data))
    if data["unplaced"]:
        models = dict.fromkeys(missing["model"] for missing in data["unplaced"])
        parts.append("\n".join(f"what would help: corewright explain {model} {file.name}" for model in models))
    if data["index"] is not None:
        parts.append(f"check index: {data['index']}")
    if data["unplaced"] and plan_fails(data):
        parts.append(_failure(data))
    return "\n\n".join(part.rstrip("\n") for part in parts if part)


def picture(
    data: dict[str, Any], hosts: Sequence[Host], spec: Spec | None, window: tuple[str, CoreRange] | None = None
) -> str:
    """Returns the core map; empty if the plan has other hosts than ``hosts``."""
    placements = tuple(_placement(item) for item in data["placements"])
    if not {placement.host for placement in placements} <= {host.name for host in hosts}:
        return ""
    by_name = {host["name"]: host for host in data.get("hosts") or ()}
    signs = [
        {name: _cores(host[key]) for name, host in by_name.items() if host[key]} for key in ("quarantined", "cordoned")
    ]
    shown = [host for host in hosts if not by_name or host.name in by_name]
    return core_map(Plan(placements), shown, *signs, spec=spec, window=window, color=use_color(stdout()))


def _cores(texts: Sequence[str]) -> frozenset[int]:
    return frozenset(core for text in texts for core in CoreRange.parse(text))


def _replicas(data: dict[str, Any]) -> str:
    """Returns a row for each replica; of more than MOST_ROWS unplaced replicas first, then changed ones."""
    tags = {change["replica"]: change["change"] for change in data["changes"]}
    rows: list[tuple[object, ...]] = []
    for item in data["placements"]:
        id = f"{item['model']}/{item['replica']}"
        rows.append((id, item["host"], item["cores"], item["threads"], tags.pop(id, "none")))
    rows += [(replica, None, None, None, change) for replica, change in tags.items()]
    rows += [(f"{item['model']}/{item['replica']}", None, None, None, "unplaced") for item in data["unplaced"]]
    more = len(rows) - MOST_ROWS
    if more > 0:
        rows.sort(key=lambda row: (row[-1] != "unplaced", row[-1] == "none"))
        rows = rows[:MOST_ROWS]
    if not rows:
        return ""
    table = columns(("REPLICA", "HOST", "CORES", "THREADS", "CHANGE"), rows)
    return table + (f"\n... and {more} more; `-o json` has every replica" if more > 0 else "")


def _missing(data: dict[str, Any]) -> list[dict[str, str]]:
    """Returns why replicas are unplaced: for each model and problem id the first problem, and how many more have it."""
    by_reason: dict[tuple[str, str], list[dict[str, str]]] = {}
    for missing in data["unplaced"]:
        for problem in missing["problems"]:
            by_reason.setdefault((missing["model"], problem["id"]), []).append(problem)
    rows = []
    for problems in by_reason.values():
        further = len(problems) - 1
        more = f" (and {counted(further, 'more replica')} for the same reason)" if further else ""
        rows.append({**problems[0], "what": problems[0]["what"] + more})
    return rows


def _added(data: dict[str, Any]) -> list[str]:
    """Returns a line for each host to add, with its price."""
    lines = []
    for host in data.get("hosts_to_add") or ():
        price = f", {host['price_per_hour']:g} per hour" if host["price_per_hour"] else ""
        lines.append(f"add host {host['host']}{price}: {', '.join(host['replicas'])}")
    return lines


def move_lines(moves: Sequence[dict[str, Any]]) -> list[str]:
    """Returns a line for each running replica that moves."""
    lines = []
    for move in moves:
        before, after = move["from"], move["to"]
        host = "" if after["host"] == before["host"] else f"{after['host']} "
        load_s = move.get("load_s")
        takes = "" if load_s is None else f", loads in {seconds(load_s)}"
        name, origin = f"{move['model']}/{move['replica']}", f"{before['host']} {cores_text(before['cores'])}"
        lines.append(f"move {name} from {origin} to {host}{cores_text(after['cores'])}{takes}")
    return lines


def cores_text(cores: str) -> str:
    """ "core 8", or "cores 8-15"."""
    return f"core {cores}" if cores.isdecimal() else f"cores {cores}"


def _placement(item: dict[str, Any]) -> Placement:
    cores = None if item["cores"] is None else CoreRange.parse(item["cores"])
    return Placement(item["model"], item["replica"], item["host"], cores, item["threads"])


def _count(data: dict[str, Any]) -> str:
    if not plan_changes(data):
        return "nothing to do"
    actions = Counter(_action(model) for model in data["models"] if _changed(model))
    models = ", ".join(f"{actions[action]} to {action}" for action in SIGNS if actions[action])
    kinds = Counter(change["change"] for change in data["changes"])
    replicas = ", ".join(f"{kinds[kind]} to {kind}" for kind in KINDS if kinds[kind])
    return "; ".join([*([f"models: {models}"] if models else []), f"replicas: {replicas or 'no changes'}"])


def _failure(data: dict[str, Any]) -> str:
    placed, missing = len(data["placements"]), len(data["unplaced"])
    have = "replica has" if placed + missing == 1 else "replicas have"
    do = "does" if missing == 1 else "do"
    return f"the plan fails: {placed} of {placed + missing} {have} a place; {missing} {do} not"


def _changed(model: dict[str, Any]) -> bool:
    replicas = model["replicas"]
    return model["tag"] != "none" or bool(model["fields"]) or replicas["before"] != replicas["after"]


def _action(model: dict[str, Any]) -> str:
    return str(model.get("action") or ("replace" if model["strategy"] else "update"))  # older fleets do not send it


def risks(plan: Mapping[str, Any]) -> list[str]:
    """Returns warnings to confirm: for the spec of another fleet, for models that are deleted, and for models with a
    predicted outage."""
    warnings = [problem["what"] for problem in plan["problems"] if problem["id"] == "fleet-name-differs"]
    for model in plan["models"]:
        name, before, outage_s = model["model"], model["replicas"]["before"], model["outage_s"]
        if _action(model) == "delete":
            warnings.append(f"{name} is deleted, with {counted(before, 'replica')}")
        elif model["strategy"] and model["possible"] and outage_s != 0.0:
            duration = "an unknown time" if outage_s is None else f"about {seconds(outage_s)}"
            waits = ", and requests wait" if model["strategy"] == "hold" else ""
            warnings.append(f"{name} has no ready replica for {duration}{waits}")
    return warnings


def model_lines(model: dict[str, Any]) -> list[str]:
    """Returns a model's action, update strategy and cost, and its changed fields; empty if nothing changes."""
    if not _changed(model):
        return []
    action = _action(model)
    how = [f"{action} ({model['tag']})" if action == "replace" else action]
    if model["strategy"]:
        how.append(model["strategy"])
    if model["outage_s"] is not None:
        how.append(f"outage {seconds(model['outage_s'])}")
    if model["predicted_s"] is not None:
        how.append(f"done in {seconds(model['predicted_s'])}")
    lines = [f"{SIGNS[action]} {model['model']}: {', '.join(how)}"]
    if model["why"]:
        lines.append(f"    why: {model['why']}")
    replicas = model["replicas"]
    if replicas["before"] != replicas["after"]:
        lines.append(f"    wanted: {replicas['before']} -> {replicas['after']}")
    for change in model["fields"]:
        lines += [
            f"    {name}: {_value_text(a)} -> {_value_text(b)}"
            for name, a, b in _parts(change["field"], change["before"], change["after"])
        ]
    return lines


def _parts(name: str, before: Any, after: Any) -> list[tuple[str, Any, Any]]:
    """Returns the changes of a field; of a mapping those of each key."""
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return [(name, before, after)]
    keys = [key for key in dict.fromkeys((*before, *after)) if before.get(key) != after.get(key)]
    return [part for key in keys for part in _parts(f"{name}.{key}", before.get(key), after.get(key))]


def seconds(value: float) -> str:
    """Returns a duration, with one decimal below 10 s."""
    return f"{value:.1f} s" if 0 < value < 10 else f"{value:.0f} s"


def _value_text(value: Any) -> str:
    if value is None:
        return "unset"
    return value if isinstance(value, str) else json.dumps(value)


PROMPT = 512  # tokens of the prompt whose prefill is shown
MOST = 50  # replicas or groups of hosts that are shown
UNKNOWN_NOTE = "unknown: an order of magnitude, until a fleet measures the speed; see docs/sizing.md"
_SHORT = {
    "weights, sharded": "SHARDED",
    "weights, replicated": "REPLICATED",
    "KV cache": "KV",
    "draft weights": "DRAFT",
    "draft KV cache": "DRAFT KV",
}
_TAG = "NEURON_PROCESS_TAG"


def details(data: Mapping[str, Any]) -> list[str]:
    """Returns the sections, each with its title."""
    sections = [
        _memory(data.get("memory") or ()),
        _speeds(data.get("speeds") or ()),
        *_threads(data.get("hosts") or ()),
        _environments(data["placements"]),
    ]
    return [section for section in sections if section]


def _memory(needs: Sequence[Mapping[str, Any]]) -> str:
    """Returns a row for each model and host type: the memory classes of the fullest core, and its usable memory."""
    if not needs:
        return ""
    names = list(dict.fromkeys(memory["class"] for need in needs for memory in need["classes"]))
    several = len({_type(need) for need in needs}) > 1
    rows = []
    for need in needs:
        sizes = {memory["class"]: memory["gib"] for memory in need["classes"]}
        rows.append(
            (
                need["model"],
                *([_type(need)] if several else []),
                *(f"{sizes[name]:.2f}" if name in sizes else None for name in names),
                f"{need['total_gib']:.2f}",
                f"{need['usable_gib']:.2f}",
                f"{need['host']['load_gib']:.1f}",
            )
        )
    header = ["MODEL", *(["INSTANCE"] if several else []), *(_SHORT.get(name, name.upper()) for name in names)]
    title = "Memory, GiB on the fullest core of a replica (HOST: of the host, to load it)"
    return f"{title}\n" + columns([*header, "TOTAL", "USABLE", "HOST"], rows) + _measured(needs)


def _measured(needs: Sequence[Mapping[str, Any]]) -> str:
    """Returns a line for each type whose replicas were measured to need more than estimated."""
    each: dict[str, tuple[float, float]] = {}
    for need in needs:
        hbm, host = each.get(_type(need), (0.0, 0.0))
        each[_type(need)] = max(hbm, need["measured"]["hbm_gib"]), max(host, need["measured"]["host_gib"])
    return "".join(
        f"\nmeasured on {name}: {hbm:.2f} GiB on each core beyond the estimate (not in USABLE), {host:.2f} of the host"
        for name, (hbm, host) in each.items()
        if hbm or host
    )


def _speeds(speeds: Sequence[Mapping[str, Any]]) -> str:
    """Returns a row for each model that generates: its step, its tokens, the prefill of a prompt, and their source."""
    rows = []
    for speed in speeds:
        error = speed["decode_error"]
        prompt = speed["prefill_base_ms"] + PROMPT * speed["prefill_token_ms"]
        prompt += PROMPT**2 * speed["prefill_square_ns"] / 1e6
        sure = "" if not error else "unknown" if error >= 1 else f"+-{error:.0%}"
        step, rate = f"{three_digits(speed['step_ms'])} ms", three_digits(speed["tokens_per_s"])
        rows.append((speed["model"], step, sure, rate, f"{three_digits(prompt)} ms", speed["source"]))
    header = ("MODEL", "STEP", "ERROR", "TOKENS/S", f"PROMPT OF {PROMPT}", "SOURCE")
    if not rows:
        return ""
    note = f"\n{UNKNOWN_NOTE}" if any(row[2] == "unknown" for row in rows) else ""
    return "Speed of a replica\n" + columns(header, rows) + note


def _type(need: Mapping[str, Any]) -> str:
    """ "trn2.48xlarge lnc 2"."""
    lnc = need.get("lnc")
    return f"{need['instance']} lnc {lnc}" if lnc else str(need["instance"])


def _threads(hosts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the thread arithmetic of each host; hosts with equal arithmetic share a table."""
    alike: dict[str, list[Mapping[str, Any]]] = {}
    for host in hosts:
        if host["thread_ledger"]:
            key = repr((host["cpus"], host["reserve_vcpus"], host["thread_ledger"]))
            alike.setdefault(key, []).append(host)
    groups = list(alike.values())
    sections = []
    for group in groups[:MOST]:
        host, budget = group[0], group[0]["cpus"] - group[0]["reserve_vcpus"]
        rows = [
            (line["model"], line["replicas"], line["arithmetic"], line["together"]) for line in host["thread_ledger"]
        ]
        names = host_names([member["name"] for member in group])
        title = f"Threads on {names}: {host['cpus']} CPUs - {host['reserve_vcpus']} reserved = {budget}"
        title += f", {host['threads']} in use"
        sections.append(f"{title}\n" + columns(("MODEL", "REPLICAS", "THREADS OF EACH", "TOGETHER"), rows))
    more = sum(map(len, groups[MOST:]))
    return [*sections, f"... and {more} more hosts"] if more else sections


def _environments(placements: Sequence[Mapping[str, Any]]) -> str:
    """Returns the variables that all replicas share, then those of each replica."""
    placed = [placement for placement in placements if placement["env"]]
    if not placed:
        return ""
    common = set(placed[0]["env"].items())
    for placement in placed[1:]:
        common &= set(placement["env"].items())
    rows = []
    for placement in placed[:MOST]:
        own = [
            f"{key}={value}" for key, value in placement["env"].items() if (key, value) not in common and key != _TAG
        ]
        rows.append((f"{placement['model']}/{placement['replica']}", " ".join(own)))
    lines = [f"Environment of each replica: {_TAG}=MODEL/REPLICA"]
    lines += [f"  {key}={value}" for key, value in sorted(common) if key != _TAG]
    own_rows = [row for row in rows if row[1]]
    if own_rows:
        width = max(len(row[0]) for row in own_rows)
        lines += [f"{name.ljust(width)}  {text}" for name, text in own_rows]
    if len(placed) > MOST:
        lines.append(f"... and {len(placed) - MOST} more; `-o json` has every replica")
    return "\n".join(lines)
