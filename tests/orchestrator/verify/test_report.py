"""The report of `corewright verify`: JSON, Markdown, and the bundle that a user can send."""

from __future__ import annotations

import getpass
import json
import os
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest

from orchestrator.verify.claims import CLAIMS, PARTS, not_run, proved
from orchestrator.verify.report import bundle, markdown
from tests.docs.pages import ROOT

SECRETS = (
    "/home/ann/models/secret-llm",
    "hf_abcdefghijklmnop",
    "10.1.2.3",
    "ann",
    "fraud-model",
    "ip-10-1-2-3",
    "bucket-7",
    "c0ffee",
)


def report(**fields: Any) -> dict[str, Any]:
    verdicts = [
        proved("doctor", False, "source-missing: /home/ann/models/secret-llm is not there | token=hf_abcdefghijklmnop"),
        proved("speeds", True, "a step takes 4.10 ms", "fraud-model", step_ms=4.1),
        not_run("devices", "s3://bucket-7/llm is not there; AWS_SESSION_KEY=c0ffee; https://h/a?Signature=c0ffee"),
        proved(
            "open-files", False, "runtime 2.35.30.0 and driver 2.31.7.0 on vllm-neuron 0.29.0.1.2.0, 16 tokens: 3.0 ms"
        ),
        not_run("devices", "the host ip-10-1-2-3 at 10.1.2.3 of ann is emulated"),
    ]
    return {
        "corewright": "0.1.0",
        "machine": {"instance": None, "host": "inf2.48xlarge", "emulated": True, "free": 24},
        "engine": "cpu",
        "versions": {"driver": "2.31.7.0", "runtime": "2.35.30.0-9b5179492", "neuronx-cc": "2.28.7631.0+abcd"},
        "seconds": 90.0,
        "proved": 1,
        "refuted": 1,
        "not_run": 1,
        "verdicts": [verdict.as_dict() for verdict in verdicts],
        **fields,
    }


def test_markdown_has_a_table_for_each_part_and_marks_what_is_refuted() -> None:
    text = markdown(report())
    assert "1 proved, 1 refuted, 1 not run, in 1.5 minutes." in text
    assert "| `corewright doctor` reports no errors |  | **refuted** | source-missing: " in text
    assert "is not there / token=" in text  # no further cell
    assert [line for line in text.splitlines() if line.startswith("## ")] == ["## facts", "## speeds"]


def test_a_bundle_has_no_names_paths_addresses_or_secrets(tmp_path: Path) -> None:
    """Versions stay, even if they look like addresses, and so do ids and numbers."""
    path = tmp_path / "verify.tar.gz"
    bundle(report(), path, {"ann", "fraud-model", "ip-10-1-2-3"})
    with tarfile.open(path) as archive:
        files = {member.name: archive.extractfile(member) for member in archive.getmembers()}
        texts = {name: file.read().decode() for name, file in files.items() if file is not None}
    assert sorted(texts) == ["corewright-verify/report.json", "corewright-verify/report.md"]
    for text in texts.values():
        assert [secret for secret in SECRETS if secret in text] == []
        for kept in ("source-missing", "2.28.7631.0", "driver 2.31.7.0", "runtime 2.35.30.0", "0.29.0.1.2.0", "3.0 ms"):
            assert kept in text
    data = json.loads(texts["corewright-verify/report.json"])
    assert data["versions"] == report()["versions"]
    assert data["verdicts"][1]["values"] == {"step_ms": 4.1}
    assert data["verdicts"][1]["subject"] == "<name>"


def test_a_user_without_a_name_gets_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An example is the numeric user of a container."""

    def unnamed() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr(getpass, "getuser", unnamed)
    bundle(report(), tmp_path / "verify.tar.gz", ())
    assert (tmp_path / "verify.tar.gz").is_file()


def test_the_claims_of_the_page_are_those_that_are_checked() -> None:
    """Generated: UPDATE_GOLDEN=1 writes them anew."""
    page = ROOT / "docs/engines.md"
    lines = ["| part | claim | id |", "|---|---|---|"]
    lines += [f"| {claim.part} | {claim.text} | `{claim.id}` |" for claim in CLAIMS.values()]
    block = re.compile(r"(?<=<!-- generated from the claims -->\n).*?(?=<!-- end -->)", re.DOTALL)
    wanted = "\n".join(lines) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        page.write_text(block.sub(lambda _: wanted, page.read_text(), count=1))
    assert block.findall(page.read_text()) == [wanted]
    assert [claim.part for claim in CLAIMS.values()] == sorted(
        (claim.part for claim in CLAIMS.values()), key=PARTS.index
    )
