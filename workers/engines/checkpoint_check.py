"""Checks all of a checkpoint's files for any engine, without torch and without the engine's package."""

from __future__ import annotations

from pathlib import Path

from workers.artifacts.sources.layout import COMPILED, INDEX, NEURON_CONFIG
from workers.engines.checkpoint_files import read_config
from workers.engines.safetensors_headers import check_safetensors
from workers.engines.weight_files import pickled_files, present_files_in, weights_root


def check_checkpoint(path: Path, *, allow_pickle: bool = False) -> None:
    """Check the config.json in ``path`` and the header of each weight file, for all engines.

    1. Checkpoints compiled by Optimum Neuron have the weights in ``checkpoint/``.
    2. Safetensors, as listed by an index or as one file; other files are then ignored.
    3. One file for each core, in ``weights/``, or a compiled model, which may contain them.
    4. Pickles: only that they exist and are allowed. Reading one needs torch.

    Raises EngineLoadError.
    """
    read_config(path)
    root = weights_root(path)  # 1
    single, index = root / "model.safetensors", root / INDEX
    if single.is_file() or index.is_file():  # 2
        files = present_files_in(index) if index.is_file() else [single]
    else:  # 3
        files = sorted((path / "weights").glob("tp*_sharded_checkpoint.safetensors"))
        if not files and not ((path / COMPILED).is_file() and (path / NEURON_CONFIG).is_file()):
            files = [file for file in pickled_files(root, allow_pickle) if file.suffix == ".safetensors"]  # 4
    check_safetensors(files)
