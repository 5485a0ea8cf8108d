"""Reads the settings of LMI containers from files."""

from __future__ import annotations

import codecs
import re
import sys
from pathlib import Path

from placements.lmi.importing import LOADED, LmiModel
from placements.lmi.settings import LmiSetting, UnreadableSettings, read_properties
from placements.spec.notation import unusable_path

PROPERTIES = "serving.properties"
_LOADED = re.compile(r"\[?([^:=\[\]]+)(?::[^=\[\]]*)?\]?=(.+)")  # NAME:VERSION:ENGINE:DEVICES=URL, as LMI reads it


def lmi_models(file: str | None, environment: list[LmiSetting]) -> list[LmiModel]:
    """Returns the models of a `serving.properties`, of a folder with one or with such folders, or else of the
    environment. Raises UnreadableSettings."""
    if file is not None and file != "-" and not unusable_path(file) and Path(file).is_dir():
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
        return [LmiModel("", read_properties(content(file), label(file)), environment, str(folder))]
    listed = next((setting for setting in environment if setting.written == LOADED), None)
    urls = [] if listed is None else re.split(r"[, ]+", listed.value.strip(", "))
    models = []
    for url in urls:
        match = _LOADED.fullmatch(url)
        name, place = (match[1], match[2]) if match else ("", url)
        place = place.removeprefix("file://")
        own = Path(place) / PROPERTIES
        present = not unusable_path(place) and own.is_file()
        settings = read_properties(content(str(own)), str(own)) if present else []
        models.append(LmiModel(name, settings, environment, place, listed=True))
    return models or [LmiModel("", [], environment)]


def _properties(folder: Path, given: str) -> list[LmiSetting]:
    below = Path(given) / folder.relative_to(Path(given).absolute()) / PROPERTIES
    return read_properties(content(str(below)), str(below))


def content(name: str) -> str:
    """Returns the text of a file, or of standard input (`-`). Raises UnreadableSettings."""
    try:
        return sys.stdin.read().removeprefix("\ufeff") if name == "-" else _decoded(Path(name).read_bytes())
    except OSError as error:
        raise UnreadableSettings(f"{name}: {error.strerror}") from None


def _decoded(data: bytes) -> str:
    """Returns a text without its byte order mark. Windows PowerShell redirects to UTF-16."""
    is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return data.decode("utf-16" if is_wide else "utf-8-sig", errors="replace")


def label(name: str) -> str:
    """Returns the name of a file in messages."""
    return "stdin" if name == "-" else name
