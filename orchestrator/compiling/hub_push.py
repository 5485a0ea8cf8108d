"""Compiled artifacts in a repository of the Hugging Face hub, laid out as in a ``neff_cache``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.process.failure import Failed
from workers.artifacts.sources.hub import silence_loggers
from workers.artifacts.store import locks
from workers.neff_cache.compiled_artifacts import MANIFEST
from workers.neff_cache.compiled_cache import FOLDER

if TYPE_CHECKING:
    from huggingface_hub import HfApi

LIBRARIES = ("httpx", "httpx2", "httpcore", "httpcore2", "requests")  # whose errors tell that the hub is away
LOGIN = "HF_TOKEN, or `hf auth login`, must be of an account that may write there"


def push_to_hub(repository: str, folders: Iterable[Path]) -> list[str]:
    """Upload complete entries of compiled artifacts, each as one commit; gives where they are in the repository, which
    is made, and private, where there is none. An entry that is there already stays.

    Token, endpoint and proxies are huggingface_hub's own. Raises Failed, without texts of its exceptions: they hold
    addresses that are signed.
    """
    api = opened(repository)
    there = set(_asked(repository, lambda: api.list_repo_files(repository)))
    places = []
    for folder in folders:
        place = f"{FOLDER}/{folder.name}"
        if f"{place}/{MANIFEST}" not in there:
            message = f"corewright: {folder.name}"
            with _held(folder):
                _asked(
                    repository,
                    lambda folder=folder, place=place, message=message: api.upload_folder(
                        repo_id=repository, folder_path=str(folder), path_in_repo=place, commit_message=message
                    ),
                )
        places.append(place)
    return places


def opened(repository: str) -> HfApi:
    """The hub, once it has told that the repository is there, or has made it. Raises Failed, as `push_to_hub`."""
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # read at the import: in a log each of their states is a line
    from huggingface_hub import HfApi

    silence_loggers()
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
    _asked(repository, lambda: api.create_repo(repository, exist_ok=True, private=True))
    return api


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Nobody empties the entry meanwhile, as `cache prune` might. Raises Failed where somebody has."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locks.shared(folder.with_name(f"{folder.name}.lock")))
        except OSError as error:
            if error.errno not in locks.READ_ONLY:  # where nobody can empty it
                raise
        if not (folder / MANIFEST).is_file():
            raise Failed("hub-push-failed", f"{folder} has been emptied meanwhile", "compile it again")
        yield


def _asked(repository: str, ask: Any) -> Any:
    """Raises Failed."""
    from huggingface_hub import errors

    try:
        return ask()
    except errors.HFValidationError:
        raise Failed("hub-push-failed", f"{repository} is no id of a repository", "write org/name") from None
    except errors.OfflineModeIsEnabled:
        raise Failed("hub-push-failed", "HF_HUB_OFFLINE is set", "unset it to push to the hub") from None
    except Exception as raised:
        error = _first_of_the_way(raised)
        status = _status(error)
        if status in (401, 403, 404):
            raise Failed("hub-push-failed", f"the hub refuses {repository} with {status}", LOGIN) from None
        if not _is_of_the_way(error) and not isinstance(error, RuntimeError):  # which Xet raises, with an address
            raise
        why = f"answers {status}" if status is not None else f"is not reached ({type(error).__name__})"
        raise Failed("hub-push-failed", f"the hub {why} for {repository}", "is HF_ENDPOINT right? try again") from None


def _first_of_the_way(raised: Exception) -> BaseException:
    """What ``raised`` comes from: of an upload that fails huggingface_hub raises a RuntimeError with the cause behind
    it, which holds the signed address. Itself, where nothing behind it is of the way to the hub."""
    error: BaseException | None = raised
    while error is not None:
        if _is_of_the_way(error):
            return error
        error = error.__cause__ or error.__context__
    return raised


def _is_of_the_way(error: BaseException) -> bool:
    library = type(error).__module__.partition(".")[0]
    return _status(error) is not None or isinstance(error, OSError) or library in LIBRARIES


def _status(error: BaseException) -> int | None:
    """Of the answer that it is about."""
    return getattr(getattr(error, "response", None), "status_code", None)
