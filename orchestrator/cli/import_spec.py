"""The command `import lmi`: the spec of models that LMI (DJL Serving) served."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.app import FAILED, FormatOption, bad_parameter, group
from orchestrator.cli.output import Format, say, show
from orchestrator.process.failure import Failed
from placements.facts.engines import NAMED_ENGINES
from placements.facts.topology import TOPOLOGIES
from placements.lmi.importing import LOADED, LmiModel, as_dict, import_lmi
from placements.lmi.settings import Setting, UnreadableSettings, read_environment, read_properties

PROPERTIES = "serving.properties"
_LOADED = re.compile(r"\[?([^:=\[\]]+)(?::[^=\[\]]*)?\]?=(.+)")  # NAME:VERSION:ENGINE:DEVICES=URL, as LMI reads it

importing = group("import", "Write a spec for models that another server served.")


@importing.command("lmi")
def import_from_lmi(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE|DIR",
            help=f"A {PROPERTIES}; a model's folder with one; or a folder of such folders. - reads standard input.",
            show_default=False,
        ),
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(
            "--env",
            metavar="FILE",
            help="The container's environment: lines KEY=VALUE, or JSON. - reads standard input.",
            show_default=False,
        ),
    ] = None,
    instance: Annotated[
        str, typer.Option(metavar="TYPE", help="The instance type that the spec is for.")
    ] = "inf2.48xlarge",
    lmi_version: Annotated[
        str, typer.Option(metavar="X.Y", help="The version of DJL Serving, for its defaults.")
    ] = "0.28",
    engine: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="An engine for all models.", show_default="the one that LMI used"),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Keep `trust_remote_code` where LMI had it.")
    ] = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Write the spec of an LMI container's models to standard output, and what became of each setting to standard
    error."""
    if file is None and env is None:
        raise typer.BadParameter(f"nothing to import: pass a {PROPERTIES}, a folder or --env FILE")
    if instance not in TOPOLOGIES:
        raise typer.BadParameter(f"{instance} is none of {', '.join(TOPOLOGIES)}", param_hint="--instance")
    if engine is not None and engine not in NAMED_ENGINES:
        raise typer.BadParameter(f"{engine} is none of {', '.join(NAMED_ENGINES)}", param_hint="--engine")
    with bad_parameter("--lmi-version"):
        version = _version(lmi_version)
    try:
        environment = [] if env is None else read_environment(_text(env), _label(env))
        models = _models(file, environment)
    except UnreadableSettings as error:
        hint = "pass a serving.properties, a folder with them, or --env with the container's environment"
        raise Failed("lmi-unreadable", str(error), hint) from None
    imported = import_lmi(
        models,
        instance=instance,
        version=version,
        engine=engine,
        trust_remote_code=trust_remote_code,
    )
    if output is Format.TABLE:
        for outcome in imported.outcomes:
            say(str(outcome))
    show(as_dict(imported), output, imported.spec)
    if imported.refused:
        say("settings were refused: the spec does not have what they asked for")
        raise typer.Exit(FAILED)


def _models(file: str | None, environment: list[Setting]) -> list[LmiModel]:
    if file is not None and file != "-" and Path(file).is_dir():
        folder = Path(file).absolute()
        folders = [folder] if (folder / PROPERTIES).is_file() else sorted(folder.iterdir())
        models = [
            LmiModel(each.name, _properties(each, file), environment, str(each))
            for each in folders
            if (each / PROPERTIES).is_file()
        ]
        if not models:
            raise UnreadableSettings(f"{file}: no {PROPERTIES} in the folder, nor in the folders below")
        return models
    if file is not None:
        folder = Path.cwd() if file == "-" else Path(file).absolute().parent
        return [LmiModel("", read_properties(_text(file), _label(file)), environment, str(folder))]
    listed = next((setting for setting in environment if setting.written == LOADED), None)
    urls = [] if listed is None else re.split(r"[, ]+", listed.value.strip(", "))
    models = []
    for url in urls:
        match = _LOADED.fullmatch(url)
        name, place = (match[1], match[2]) if match else ("", url)
        place = place.removeprefix("file://")
        own = Path(place) / PROPERTIES
        settings = read_properties(_text(str(own)), str(own)) if own.is_file() else []
        models.append(LmiModel(name, settings, environment, place, listed=True))
    return models or [LmiModel("", [], environment)]


def _properties(folder: Path, given: str) -> list[Setting]:
    below = Path(given) / folder.relative_to(Path(given).absolute()) / PROPERTIES
    return read_properties(_text(str(below)), str(below))


def _text(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(errors="replace")
    except OSError as error:
        raise UnreadableSettings(f"{name}: {error.strerror}") from None


def _label(name: str) -> str:
    return "stdin" if name == "-" else name


def _version(text: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"{text} is not a version like 0.28")
    return int(match[1]), int(match[2])
