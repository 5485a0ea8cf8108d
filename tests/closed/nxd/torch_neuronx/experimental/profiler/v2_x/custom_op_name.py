"""Names of operations in a trace, which has none here."""

import contextlib
from typing import Any


def hlo_debug(**_: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()
