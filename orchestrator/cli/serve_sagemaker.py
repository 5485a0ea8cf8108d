"""The command `serve-sagemaker`, which a container of SageMaker runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from typer.main import get_group

import orchestrator.cli.up as _  # noqa: F401  # the command that it continues with
from orchestrator.advise.advice import advised
from orchestrator.cli.app import app, option, switch
from orchestrator.cli.output import say
from orchestrator.control.resolve.spec_file import this_machine
from orchestrator.process.home import Home
from orchestrator.sagemaker.model_folder import HOLDS, SPEC, Fields, examined, problems_of, read_folder, text_of
from placements.facts.topology import Machine

MODEL = Path("/opt/ml/model")
EMPTY_HINT = f"{HOLDS}, or start without models: --multi-model"
MAX_BODY_BYTES = 25 * 2**20  # the payload of InvokeEndpoint, by AWS's page of its quotas
SETTINGS = {  # those of `up`, unless the container's environment sets others
    "COREWRIGHT_SAGEMAKER": "1",
    "COREWRIGHT_INSECURE": "1",  # only SageMaker reaches the container
    "COREWRIGHT_HOST": "0.0.0.0",
    "COREWRIGHT_DASHBOARD": "0",
    "COREWRIGHT_MAX_BODY_BYTES": str(MAX_BODY_BYTES),
    "COREWRIGHT_HOME": "/tmp/corewright",  # also with a read-only root file system
}


@app.command("serve-sagemaker")
def serve_sagemaker(
    folder: Annotated[Path, option("DIR", "The folder that SageMaker puts the model in.", "--model")] = MODEL,
    multi_model: Annotated[
        bool,
        switch(
            "--multi-model/--no-multi-model",
            "Start without models; SageMaker loads and unloads them.",
            envvar="SAGEMAKER_MULTI_MODEL",
        ),
    ] = False,
    port: Annotated[
        int, typer.Option(min=1, max=65535, envvar="SAGEMAKER_BIND_TO_PORT", help="The port of SageMaker's requests.")
    ] = 8080,
) -> None:
    """Serve as a container of SageMaker: the models of /opt/ml/model on port 8080, with /ping and /invocations.

    Settings of `up` are read from the environment, like COREWRIGHT_GATEWAYS."""
    for name, value in {**SETTINGS, "COREWRIGHT_PORT": str(port)}.items():
        os.environ.setdefault(name, value)
    if region := os.environ.get("SAGEMAKER_REGION"):
        os.environ.setdefault("AWS_REGION", region)
    spec = spec_file(folder, multi_model)
    up = get_group(app).commands["up"]
    raise typer.Exit(up.main([str(spec)], prog_name="corewright up", standalone_mode=False) or 0)


def spec_file(folder: Path, multi_model: bool) -> Path:
    """Returns the spec of the container: that of its folder, or one that is written into the home; reports what could
    not be kept of LMI's settings. Raises Failed."""
    own = folder / SPEC
    if own.is_file():
        return own
    spec: Fields = {"version": 1, "name": "endpoint", "models": {}}
    if not multi_model:
        read = read_folder(folder, os.environ, this_machine(), alone=advised_fields, empty_hint=EMPTY_HINT)
        for note in read.notes:
            say(note)
        spec = read.spec
    written = Home.from_environment().path / "sagemaker.yaml"
    written.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    written.write_text(text_of(spec))
    return written


def advised_fields(fields: Fields, machine: Machine) -> Fields | None:
    """Returns the fields of a model that has the machine for itself, with what `corewright advise` prefers, and reports
    them; None if there are no devices, or if that could not be served."""
    file = examined({"models": {"model": fields}}, machine)
    if machine.instance is None or file.spec is None or "model" not in file.checkpoints:
        return None
    (model,) = file.spec.models
    chosen = advised(str(fields["source"]), machine.instance, model.length(file.checkpoints["model"]))
    if chosen is None or problems_of(examined({"models": {"model": {**fields, **chosen}}}, machine)):
        return None
    shown = ", ".join(f"{name}: {value}" for name, value in chosen.items())
    say(f"chosen as by `corewright advise` for {machine.instance}: {shown}; a {SPEC} in the folder chooses otherwise")
    return {**fields, **chosen}
