"""Compiled artifacts in a repository of the Hugging Face hub, laid out as in a ``neff_cache``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from orchestrator.failure import Failed
from workers.compiled import MANIFEST
from workers.compiled_cache import FOLDER

LIBRARIES = ("httpx", "httpx2", "httpcore", "httpcore2", "requests")  # whose errors tell that the hub is away
LOGIN = "HF_TOKEN, or `hf auth login`, must be of an account that may write there"


def push_to_hub(repository: str, folders: Iterable[Path]) -> list[str]:
    """Upload complete entries of compiled artifacts, each as one commit; gives where they are in the repository, which
    is made, and private, where there is none. An entry that is there already stays.

    Token, endpoint and proxies are huggingface_hub's own. Raises Failed, without texts of its exceptions: they hold
    addresses that are signed.
    """
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # read at the import: in a log each of their states is a line
    from huggingface_hub import HfApi

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
    _asked(repository, lambda: api.create_repo(repository, exist_ok=True, private=True))
    there = set(_asked(repository, lambda: api.list_repo_files(repository)))
    places = []
    for folder in folders:
        place = f"{FOLDER}/{folder.name}"
        if f"{place}/{MANIFEST}" not in there:
            message = f"corewright: {folder.name}"
            _asked(
                repository,
                lambda folder=folder, place=place, message=message: api.upload_folder(
                    repo_id=repository, folder_path=str(folder), path_in_repo=place, commit_message=message
                ),
            )
        places.append(place)
    return places


def _asked(repository: str, ask: Any) -> Any:
    """Raises Failed."""
    from huggingface_hub import errors

    try:
        return ask()
    except errors.HFValidationError:
        raise Failed("hub-push-failed", f"{repository} is no id of a repository", "write org/name") from None
    except errors.OfflineModeIsEnabled:
        raise Failed("hub-push-failed", "HF_HUB_OFFLINE is set", "unset it to push to the hub") from None
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403, 404):
            raise Failed("hub-push-failed", f"the hub refuses {repository} with {status}", LOGIN) from None
        library = type(error).__module__.partition(".")[0]
        if status is None and not isinstance(error, OSError) and library not in LIBRARIES:
            raise
        why = f"answers {status}" if status is not None else f"is not reached ({type(error).__name__})"
        raise Failed("hub-push-failed", f"the hub {why} for {repository}", "is HF_ENDPOINT right? try again") from None
