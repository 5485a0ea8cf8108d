"""The command `import lmi`: the spec of models that LMI (DJL Serving) served."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from orchestrator.cli.app import FAILED, FormatOption, argument, bad_parameter, group, one_of, option, switch
from orchestrator.cli.output import Format, say, show
from orchestrator.process.failure import Failed
from orchestrator.sagemaker.model_folder import PROPERTIES, content, label, lmi_models
from placements.engines.registry import NAMES
from placements.facts.topology import TOPOLOGIES
from placements.lmi.importing import VERSION, as_dict, import_lmi
from placements.lmi.settings import UnreadableSettings, read_environment

importing = group("import", "Convert the settings of another server to a spec.")


@importing.command("lmi")
def import_from_lmi(
    file: Annotated[
        str | None,
        argument(
            "FILE|DIR",
            f"A {PROPERTIES}; a model's folder with one; or a folder of such folders. - reads standard input.",
            default=False,
        ),
    ] = None,
    env: Annotated[
        str | None,
        option(
            "FILE",
            "The container's environment: lines KEY=VALUE, or JSON, such as the output of `aws sagemaker "
            "describe-model`. - reads standard input.",
            "--env",
            default=False,
        ),
    ] = None,
    instance: Annotated[str, option("TYPE", "The instance type that the spec is for.")] = "inf2.48xlarge",
    lmi_version: Annotated[
        str | None,
        option(
            "X.Y",
            "The version of DJL Serving, for its defaults.",
            default=f"that of the image in --env, or {'.'.join(map(str, VERSION))}",
        ),
    ] = None,
    engine: Annotated[str | None, option("NAME", "An engine for all models.", default="the one that LMI used")] = None,
    trust_remote_code: Annotated[
        bool, switch("--trust-remote-code", "Keep `trust_remote_code` where LMI had it.")
    ] = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Write the spec of an LMI container's models to standard output, and what became of each setting to standard
    error."""
    if file is None and env is None:
        raise typer.BadParameter(f"nothing to import: pass a {PROPERTIES}, a folder or --env FILE")
    one_of("--instance", instance, TOPOLOGIES)
    chosen = None if engine is None else one_of("--engine", engine, NAMES)
    with bad_parameter("--lmi-version"):
        version = None if lmi_version is None else _version(lmi_version)
    try:
        environment = [] if env is None else read_environment(content(env), label(env))
        models = lmi_models(file, environment)
    except UnreadableSettings as error:
        hint = "pass a serving.properties, a folder with them, or --env with the container's environment"
        raise Failed("lmi-unreadable", str(error), hint) from None
    imported = import_lmi(
        models,
        instance=instance,
        version=version,
        engine=chosen,
        trust_remote_code=trust_remote_code,
    )
    if output is Format.TABLE:
        for outcome in imported.outcomes:
            say(str(outcome))
    show(as_dict(imported), output, imported.spec)
    if imported.refused:
        say("settings were refused: the spec does not have what they asked for")
        raise typer.Exit(FAILED)


def _version(text: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"{text} is not a version like 0.28")
    return int(match[1]), int(match[2])
