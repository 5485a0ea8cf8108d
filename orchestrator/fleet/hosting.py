"""The controller's answer to a request of SageMaker to load or unload a model."""

from __future__ import annotations

from typing import NamedTuple


class Hosting(NamedTuple):
    """An HTTP status of SageMaker's contract for containers with several models, and its message. 202: ask again."""

    status: int
    message: str
