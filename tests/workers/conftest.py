"""Checkpoints that the worker tests share, made once for each test run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a random model of a family, without an EOS. Not to be written to: copy it."""
    import torch

    torch.set_num_threads(1)
    folders: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in folders:
            folders[family] = make_checkpoint(tmp_path_factory.mktemp("checkpoint") / family, family, eos=None)
        return folders[family]

    return get
