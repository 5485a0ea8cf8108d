"""Compiled graphs of the cpu engine: one for each bucket, compiled by torch's inductor.

Shapes are fixed, as on Neuron: a prompt runs alone, padded to its bucket; a step takes all slots and reads as much of
the KV cache as its bucket is long. Slots that are not in a step write to a position after the last, which is never
read. Tensors that vary by call are created outside the graphs; the KV cache is written in place.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from workers.batching.buckets import smallest_bucket
from workers.host import file_lock

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

# Tests trace with "eager", which compiles nothing.
BACKEND = "inductor"
# Inductor's. The first rounds where uncompiled code rounds, so that bf16 answers agree. The second keeps code usable
# with any number of threads: compiled for one number, it would be slow, or use too many, with another.
SETTINGS = {"emulate_precision_casts": True, "cpp.dynamic_threads": True}


COPY, HELD = "corewright-code-", ".held"  # the prefix of a copy of a code folder, and its lock
YOUNG_S = 60.0
HEADER_FOLDERS, PRECOMPILE = ("_HEADER_DIR", "_HEADER_LOCK_DIR"), "_precompile_header"  # of torch._inductor.codecache


@dataclass(frozen=True, kw_only=True)
class TracedParts:
    """The parts of an engine that its graphs are built from."""

    base: Any  # transformers' model without its output layer
    layers: Sequence[Any]  # of the KV cache: ``stored_keys`` and ``stored_values`` ``[slots, heads, room, head_dim]``
    slots: int
    takes_positions: bool
    mask: Callable[[torch.Tensor, int], Any]  # from positions ``[rows, queries]`` and the KV length
    before: Callable[[int], None]  # called with the number of rows of the next call


@dataclass
class _CurrentCall:
    """The cells that the current call writes: number of heads -> flat indices into keys and values."""

    cells: dict[int, torch.Tensor] = field(default_factory=dict)


class Graphs:
    """The compiled passes of one model. Each is compiled, or found in torch's cache, at its first call."""

    def __init__(self, traced: TracedParts, prefill_buckets: Sequence[int], decode_buckets: Sequence[int]) -> None:
        import torch

        self._traced = traced
        self._prefill_buckets, self._decode_buckets = prefill_buckets, decode_buckets
        self._call = _CurrentCall()
        self._room = traced.layers[0].stored_keys.shape[2]
        self._arange = torch.arange(self._room)
        heads = sorted(
            {stored.shape[1] for layer in traced.layers for stored in (layer.stored_keys, layer.stored_values)}
        )
        rows = torch.arange(traced.slots)[:, None]
        self._row_starts = {count: (rows * count + torch.arange(count)) * self._room for count in heads}
        self._prompts = {bucket: self._compiled(f"prompt_{bucket}", bucket, False) for bucket in prefill_buckets}
        self._steps = {bucket: self._compiled(f"step_{bucket}", bucket, True) for bucket in decode_buckets}

    def prompt(self, slot: int, ids: Sequence[int]) -> torch.Tensor:
        """Returns the hidden states ``[len(ids), hidden]`` of a whole prompt. Raises ValueError."""
        import torch

        bucket = smallest_bucket(self._prefill_buckets, len(ids))
        positions = self._arange[:bucket]
        self._call.cells = {
            count: (starts[slot][:, None] + positions).flatten() for count, starts in self._row_starts.items()
        }
        self._traced.before(1)
        padded = torch.tensor([[*ids, *[0] * (bucket - len(ids))]])
        hidden: torch.Tensor = self._prompts[bucket](padded, positions[None])
        return hidden[0, : len(ids)]

    def step(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Returns the hidden states ``[len(slots), hidden]`` of one token of each slot. Raises ValueError."""
        import torch

        bucket = smallest_bucket(self._decode_buckets, max(positions) + 1)
        ids, at, writes = [0] * self._traced.slots, [0] * self._traced.slots, [self._room - 1] * self._traced.slots
        for slot, token, position in zip(slots, tokens, positions, strict=True):
            ids[slot], at[slot], writes[slot] = token, position, position
        self._traced.before(self._traced.slots)
        column = torch.tensor(writes)[:, None]
        self._call.cells = {count: (starts + column).flatten() for count, starts in self._row_starts.items()}
        hidden: torch.Tensor = self._steps[bucket](torch.tensor(ids)[:, None], torch.tensor(at)[:, None])
        return hidden[list(slots), 0]

    def _compiled(self, name: str, bucket: int, reads: bool) -> Callable[..., Any]:
        """Returns one graph. ``reads``: its tokens attend to the first ``bucket`` positions of the cache, not only to
        each other."""
        import torch

        traced, cache = self._traced, _graph_cache(self._traced.layers, self._call, bucket if reads else None)

        def run(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            arguments: dict[str, Any] = {"position_ids": positions} if traced.takes_positions else {}
            output = traced.base.forward(
                input_ids=ids,
                attention_mask=traced.mask(positions, bucket),
                past_key_values=cache,
                use_cache=True,
                return_dict=True,
                **arguments,
            )
            hidden: torch.Tensor = output.last_hidden_state
            return hidden

        # Dynamo caches by code object, and gives up on one with too many entries: each graph gets its own.
        own: Callable[..., Any] = FunctionType(
            run.__code__.replace(co_name=name), run.__globals__, name, None, run.__closure__
        )
        options: dict[str, Any] | None = dict(SETTINGS) if BACKEND == "inductor" else None
        compiled: Callable[..., Any] = torch.compile(
            own, fullgraph=True, dynamic=False, backend=BACKEND, options=options
        )
        return compiled


def _graph_cache(layers: Sequence[Any], call: _CurrentCall, kv_len: int | None) -> Any:
    """Returns a transformers Cache over the tensors of ``layers`` for one graph: all that decides shapes is fixed."""
    from transformers.cache_utils import Cache, StaticLayer

    class GraphLayer(StaticLayer):  # type: ignore[no-untyped-call]
        def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
            super().__init__(keys.shape[2])
            self.stored_keys, self.stored_values = keys, values
            self.is_initialized = True

        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
            self._write(self.stored_keys, key_states)
            self._write(self.stored_values, value_states)
            if kv_len is None:
                return key_states, value_states
            return self.stored_keys[:, :, :kv_len], self.stored_values[:, :, :kv_len]

        def _write(self, stored: torch.Tensor, states: torch.Tensor) -> None:
            stored.view(-1, states.shape[-1]).index_copy_(0, call.cells[states.shape[1]], states.flatten(0, 2))

        def get_seq_length(self, *_: Any) -> int:
            return 0

        def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
            return kv_len or 0, 0

    return Cache(layers=[GraphLayer(layer.stored_keys, layer.stored_values) for layer in layers])


@contextlib.contextmanager
def storing_code_in(folder: Path) -> Iterator[None]:
    """Store inductor's code in ``folder``, and use the code there. The C++ headers that it compiles first are next to
    the folder until the end."""
    with (
        tempfile.TemporaryDirectory(prefix="headers-", dir=folder.parent) as headers,
        _headers_in(Path(headers)),
        _cache_dir(folder),
    ):
        yield


@contextlib.contextmanager
def using_code_from(folder: Path) -> Iterator[None]:
    """Use the code in ``folder`` through a copy: torch writes there even when it finds all code, and the folder may be
    read by others, or be read-only."""
    with _folder_for_a_copy() as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        with _headers_in(None), _cache_dir(copy):
            yield


@contextlib.contextmanager
def _folder_for_a_copy() -> Iterator[Path]:
    """Yields a temporary folder. Removes those of killed processes: unlocked, and old enough to have been locked by
    their owner."""
    for stale in Path(tempfile.gettempdir()).glob(f"{COPY}*"):
        with contextlib.suppress(OSError):
            about = stale.lstat()
            is_ours = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid()
            if is_ours and time.time() - about.st_mtime > YOUNG_S:
                with file_lock.try_exclusive(stale / HELD) as is_free:
                    if is_free:
                        shutil.rmtree(stale)
    with tempfile.TemporaryDirectory(prefix=COPY) as copy, file_lock.exclusive(Path(copy, HELD)):
        yield Path(copy)


@contextlib.contextmanager
def _cache_dir(folder: Path) -> Iterator[None]:
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    _forget_loaded()
    try:
        yield
    finally:
        _forget_loaded()
        if before is None:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


@contextlib.contextmanager
def _headers_in(folder: Path | None) -> Iterator[None]:
    """Set the folder of inductor's precompiled headers. By default it is in the machine's temporary folder, under a
    name shared by all users, and stays there with hundreds of megabytes. None: do not compile them, which inductor
    would do even where it finds all code.

    No setting names that folder (torch 2.13, ``_inductor/codecache.py``); in a torch without it nothing is changed.
    """
    from torch._inductor import codecache

    before = {name: getattr(codecache, name, None) for name in (*HEADER_FOLDERS, PRECOMPILE)}
    if None in before.values():
        yield
        return
    precompile: Any = before[PRECOMPILE]
    now: dict[str, Any] = dict.fromkeys([PRECOMPILE], _without_headers)
    if folder is not None:
        now = dict(zip(HEADER_FOLDERS, (str(folder), str(folder / "locks")), strict=True))
    precompile.cache_clear()  # it caches paths
    vars(codecache).update(now)
    try:
        yield
    finally:
        vars(codecache).update(before)
        precompile.cache_clear()


def _without_headers(*_: Any, **__: Any) -> None:
    """Replaces ``_precompile_header``, which returns the path of a header."""


def _forget_loaded() -> None:
    """Clear inductor's caches: code loaded from one folder is otherwise not written to another."""
    from torch._inductor.utils import clear_caches

    clear_caches()


def misses() -> int:
    """Returns the number of graphs that torch has compiled in this process because it did not find them."""
    from torch._dynamo.utils import counters

    inductor: Mapping[str, int] = counters["inductor"]
    return inductor.get("fxgraph_cache_miss", 0) + inductor.get("fxgraph_cache_bypass", 0)
