"""The report of `corewright verify`: JSON, Markdown, and the bundle that a user can send."""

from __future__ import annotations

import contextlib
import getpass
import json
import re
import socket
import tarfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from orchestrator.process.version import corewright_version
from orchestrator.verify.claims import CLAIMS, PARTS, Verdict
from orchestrator.verify.verification import VerifiedMachine


def report_of(machine: VerifiedMachine, verdicts: Sequence[Verdict], seconds: float) -> dict[str, Any]:
    """Returns the JSON of `verify -o json`."""
    counts = Counter(verdict.result for verdict in verdicts)
    return {
        "corewright": corewright_version(),
        "machine": {
            "instance": machine.facts.instance_type,
            "host": machine.host.topology.instance if machine.host.topology else None,
            "emulated": machine.host.emulated,
            "free": len(machine.free),
        },
        "engine": machine.engine,
        "versions": dict(machine.versions),
        "seconds": round(seconds, 1),
        "proved": counts["proved"],
        "refuted": counts["refuted"],
        "not_run": counts["not run"],
        "verdicts": [verdict.as_dict() for verdict in verdicts],
    }


def markdown(report: Mapping[str, Any]) -> str:
    """Returns the report as Markdown: one table for each part."""
    machine = report["machine"]
    what = f"emulated {machine['host']}" if machine["emulated"] else machine["instance"] or "this machine"
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [
        "# corewright verify",
        "",
        f"{what}, engine {report['engine']}, corewright {report['corewright']}{', ' if versions else ''}{versions}.",
        f"{report['proved']} proved, {report['refuted']} refuted, {report['not_run']} not run, "
        f"in {report['seconds'] / 60:.1f} minutes.",
    ]
    for part in PARTS:
        rows = [each for each in report["verdicts"] if each["part"] == part]
        if rows:
            lines += ["", f"## {part}", "", "| claim | on | result | finding |", "|---|---|---|---|"]
            lines += [_row(each) for each in rows]
    return "\n".join(lines)


def _row(verdict: Mapping[str, Any]) -> str:
    result = f"**{verdict['result']}**" if verdict["result"] == "refuted" else verdict["result"]
    cells = (CLAIMS[verdict["claim"]].text, verdict["subject"], result, verdict["finding"])
    return f"| {' | '.join(' '.join(cell.split()).replace('|', '/') for cell in cells)} |"


_URL = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]*://[^\s|]+")
_PATH = re.compile(r"(?<![\w:/])~?(?:/[\w.+@%:-]+)+/?")
_SECRET = re.compile(r"(?i)\b(?:hf_\w{8,}|AKIA\w{12,}|eyJ[\w.-]{20,}|\w*(?:token|secret|password|key)[=:]\s*\S+)")
_ADDRESS = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}\b(?!\.\d)")


def without_names(text: str, names: Collection[str], versions: Collection[str] = ()) -> str:
    """Returns a text without paths, addresses, secrets and ``names``, such as the user's and the host's. ``versions``
    stay, although some look like addresses."""
    text = _SECRET.sub("<secret>", _URL.sub("<address>", text))
    text = _ADDRESS.sub(lambda match: match[0] if any(match[0] in each for each in versions) else "<address>", text)
    text = _PATH.sub("<path>", text)
    for name in sorted(filter(None, names), key=len, reverse=True):
        text = re.sub(rf"\b{re.escape(name)}\b", "<name>", text)
    return text


def bundle(report: Mapping[str, Any], path: Path, names: Collection[str]) -> None:
    """Writes report.json and report.md into a .tar.gz that a user can send: `without_names`, also those of the models,
    the user and the host. Raises OSError."""
    own = {*names, socket.gethostname()}
    with contextlib.suppress(KeyError, OSError):  # a container's user may have no name
        own.add(getpass.getuser())
    clean = _clean(report, own, report["versions"].values())
    files = {"report.json": json.dumps(clean, indent=2), "report.md": markdown(clean)}
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            content = text.encode()
            info = tarfile.TarInfo(f"corewright-verify/{name}")
            info.size = len(content)
            archive.addfile(info, BytesIO(content))


def _clean(value: Any, names: Collection[str], versions: Collection[str]) -> Any:
    if isinstance(value, str):
        return without_names(value, names, versions)
    if isinstance(value, Mapping):
        return {key: _clean(each, names, versions) for key, each in value.items()}
    return [_clean(each, names, versions) for each in value] if isinstance(value, list | tuple) else value
