"""Uploads compiled artifacts to a repository of the Hugging Face hub, in the layout of a ``neff_cache``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.process.failure import Failed
from workers.artifacts.sources.hub import silence_loggers
from workers.compiled.host_sets import MANIFEST
from workers.compiled.shared_sets import FOLDER
from workers.host import file_lock
from workers.host.neuron_faults import error_chain

if TYPE_CHECKING:
    from huggingface_hub import HfApi

LIBRARIES = ("httpx", "httpx2", "httpcore", "httpcore2", "requests")  # their errors mean that the hub is unreachable
LOGIN = "set HF_TOKEN, or run `hf auth login`, for an account with write access"


def push_to_hub(repository: str, folders: Iterable[Path]) -> list[str]:
    """Uploads complete entries of compiled artifacts, each as one commit, and returns their paths in the repository.

    Creates a private repository if there is none; keeps existing entries. Token, endpoint and proxies are those of
    huggingface_hub. Raises Failed, without the texts of its exceptions, which contain signed addresses.
    """
    api = opened(repository)
    existing = set(_call_hub(repository, lambda: api.list_repo_files(repository)))
    places = []
    for folder in folders:
        place = f"{FOLDER}/{folder.name}"
        if f"{place}/{MANIFEST}" not in existing:
            message = f"corewright: {folder.name}"
            with _locked(folder):
                _call_hub(
                    repository,
                    lambda folder=folder, place=place, message=message: api.upload_folder(
                        repo_id=repository, folder_path=str(folder), path_in_repo=place, commit_message=message
                    ),
                )
        places.append(place)
    return places


def opened(repository: str) -> HfApi:
    """Returns the hub's API after finding or creating the repository. Raises Failed, like `push_to_hub`."""
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # read at import; progress bars fill a log with lines
    from huggingface_hub import HfApi

    silence_loggers()
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
    _call_hub(repository, lambda: api.create_repo(repository, exist_ok=True, private=True))
    return api


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Locks the entry against deletion, for example by `cache prune`. Raises Failed if it is already empty."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(file_lock.shared(folder.with_name(f"{folder.name}.lock")))
        except OSError as error:
            if error.errno not in file_lock.READ_ONLY:  # a read-only entry cannot be deleted
                raise
        if not (folder / MANIFEST).is_file():
            raise Failed("hub-push-failed", f"{folder} was deleted meanwhile", "compile it again")
        yield


def _call_hub(repository: str, call: Any) -> Any:
    """Calls the hub. Raises Failed."""
    from huggingface_hub import errors

    try:
        return call()
    except errors.HFValidationError:
        raise Failed("hub-push-failed", f"{repository} is not a repository id", "use the form org/name") from None
    except errors.OfflineModeIsEnabled:
        raise Failed("hub-push-failed", "HF_HUB_OFFLINE is set", "unset it to push to the hub") from None
    except Exception as raised:
        error = _connection_error(raised)
        status = _status(error)
        if status in (401, 403, 404):
            raise Failed("hub-push-failed", f"the hub refused {repository} with status {status}", LOGIN) from None
        if not _is_connection_error(error) and not isinstance(error, RuntimeError):  # which Xet raises, with an address
            raise
        why = f"returned {status}" if status is not None else f"is unreachable ({type(error).__name__})"
        raise Failed("hub-push-failed", f"the hub {why} for {repository}", "check HF_ENDPOINT, and try again") from None


def _connection_error(raised: Exception) -> BaseException:
    """Returns the connection error that caused ``raised``, or ``raised`` itself. For a failed upload huggingface_hub
    raises a RuntimeError with a cause that contains the signed address."""
    return next(filter(_is_connection_error, error_chain(raised)), raised)


def _is_connection_error(error: BaseException) -> bool:
    library = type(error).__module__.partition(".")[0]
    return _status(error) is not None or isinstance(error, OSError) or library in LIBRARIES


def _status(error: BaseException) -> int | None:
    """Returns the HTTP status of the response in an error."""
    return getattr(getattr(error, "response", None), "status_code", None)
