"""The passes of the cpu engine as code that torch's inductor compiles: one graph for each bucket.

Shapes are fixed, as on Neuron: a prompt goes alone and padded to its bucket; a step takes all slots, and reads as much
of the KV cache as its bucket is long. Slots that are not in a step write to a position behind the last, which nobody
reads. Tensors that differ from call to call are made outside of the graphs; the KV cache is written in place.
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

from workers.artifacts.store import locks
from workers.batching.buckets import smallest_bucket

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

# Tests trace with "eager", which compiles nothing.
BACKEND = "inductor"
# Of inductor. The first: rounds where the code that is not compiled rounds, so that bf16 answers alike. The second:
# code for one number of threads would be slow, or too greedy, with another.
SETTINGS = {"emulate_precision_casts": True, "cpp.dynamic_threads": True}


COPY, HELD = "corewright-code-", ".held"  # a copy of a folder of code, and the lock in it
YOUNG_S = 60.0
HEADER_FOLDERS, PRECOMPILE = ("_HEADER_DIR", "_HEADER_LOCK_DIR"), "_precompile_header"  # of torch._inductor.codecache


@dataclass(frozen=True, kw_only=True)
class Traced:
    """What of an engine its graphs are made of."""

    base: Any  # transformers' model without its output layer
    layers: Sequence[Any]  # of the KV cache: ``stored_keys`` and ``stored_values`` ``[slots, heads, room, head_dim]``
    slots: int
    takes_positions: bool
    mask: Callable[[torch.Tensor, int], Any]  # of positions ``[rows, queries]`` and the length that is read
    before: Callable[[int], None]  # told how many rows the next call has


@dataclass
class _Now:
    """What the call that runs now writes: number of heads -> flat indices into keys and values."""

    cells: dict[int, torch.Tensor] = field(default_factory=dict)


class Graphs:
    """The compiled passes of one model. They are compiled, or found in torch's cache, when they are first called."""

    def __init__(self, of: Traced, prefill_buckets: Sequence[int], decode_buckets: Sequence[int]) -> None:
        import torch

        self._of = of
        self._prefill_buckets, self._decode_buckets = prefill_buckets, decode_buckets
        self._now = _Now()
        self._room = of.layers[0].stored_keys.shape[2]
        self._arange = torch.arange(self._room)
        heads = sorted({stored.shape[1] for layer in of.layers for stored in (layer.stored_keys, layer.stored_values)})
        rows = torch.arange(of.slots)[:, None]
        self._row_starts = {count: (rows * count + torch.arange(count)) * self._room for count in heads}
        self._prompts = {bucket: self._compiled(f"prompt_{bucket}", bucket, False) for bucket in prefill_buckets}
        self._steps = {bucket: self._compiled(f"step_{bucket}", bucket, True) for bucket in decode_buckets}

    def prompt(self, slot: int, ids: Sequence[int]) -> torch.Tensor:
        """The hidden state ``[hidden]`` of the last of ``ids``, which are a whole prompt. Raises NoBucket."""
        import torch

        bucket = smallest_bucket(self._prefill_buckets, len(ids))
        positions = self._arange[:bucket]
        self._now.cells = {
            count: (starts[slot][:, None] + positions).flatten() for count, starts in self._row_starts.items()
        }
        self._of.before(1)
        padded = torch.tensor([[*ids, *[0] * (bucket - len(ids))]])
        hidden: torch.Tensor = self._prompts[bucket](padded, positions[None])
        return hidden[0, len(ids) - 1].clone()

    def step(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """The hidden states ``[len(slots), hidden]`` of one token of each slot. Raises NoBucket."""
        import torch

        bucket = smallest_bucket(self._decode_buckets, max(positions) + 1)
        ids, at, writes = [0] * self._of.slots, [0] * self._of.slots, [self._room - 1] * self._of.slots
        for slot, token, position in zip(slots, tokens, positions, strict=True):
            ids[slot], at[slot], writes[slot] = token, position, position
        self._of.before(self._of.slots)
        column = torch.tensor(writes)[:, None]
        self._now.cells = {count: (starts + column).flatten() for count, starts in self._row_starts.items()}
        hidden: torch.Tensor = self._steps[bucket](torch.tensor(ids)[:, None], torch.tensor(at)[:, None])
        return hidden[list(slots), 0]

    def _compiled(self, name: str, bucket: int, reads: bool) -> Callable[..., Any]:
        """One graph. ``reads``: its tokens attend to the first ``bucket`` positions of the cache, and not only to each
        other."""
        import torch

        of, cache = self._of, _graph_cache(self._of.layers, self._now, bucket if reads else None)

        def run(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            arguments: dict[str, Any] = {"position_ids": positions} if of.takes_positions else {}
            output = of.base.forward(
                input_ids=ids,
                attention_mask=of.mask(positions, bucket),
                past_key_values=cache,
                use_cache=True,
                return_dict=True,
                **arguments,
            )
            hidden: torch.Tensor = output.last_hidden_state
            return hidden

        # Dynamo keeps what it traced by the code object, and gives up one that has too many: each graph has its own.
        own: Callable[..., Any] = FunctionType(
            run.__code__.replace(co_name=name), run.__globals__, name, None, run.__closure__
        )
        options: dict[str, Any] | None = dict(SETTINGS) if BACKEND == "inductor" else None
        compiled: Callable[..., Any] = torch.compile(
            own, fullgraph=True, dynamic=False, backend=BACKEND, options=options
        )
        return compiled


def _graph_cache(layers: Sequence[Any], now: _Now, kv_len: int | None) -> Any:
    """A transformers Cache over the tensors of ``layers``, for one graph: all that decides shapes is fixed."""
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
            stored.view(-1, states.shape[-1]).index_copy_(0, now.cells[states.shape[1]], states.flatten(0, 2))

        def get_seq_length(self, *_: Any) -> int:
            return 0

        def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
            return kv_len or 0, 0

    return Cache(layers=[GraphLayer(layer.stored_keys, layer.stored_values) for layer in layers])


@contextlib.contextmanager
def code_kept_in(folder: Path) -> Iterator[None]:
    """What inductor compiles meanwhile goes to ``folder``, and what is there is found. The C++ headers that it compiles
    first lie beside the folder until the end."""
    with (
        tempfile.TemporaryDirectory(prefix="headers-", dir=folder.parent) as headers,
        _headers_in(Path(headers)),
        _found_in(folder),
    ):
        yield


@contextlib.contextmanager
def code_taken_from(folder: Path) -> Iterator[None]:
    """What is in ``folder`` is found, through a copy: torch writes there even when it finds all, and others may be
    reading, or the folder may not be ours to write."""
    with _folder_for_a_copy() as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        with _headers_in(None), _found_in(copy):
            yield


@contextlib.contextmanager
def _folder_for_a_copy() -> Iterator[Path]:
    """Gone at the end. Those of processes that were killed go before: nobody holds their lock, and they are no longer
    so young that it may just be made."""
    for left in Path(tempfile.gettempdir()).glob(f"{COPY}*"):
        with contextlib.suppress(OSError):
            about = left.lstat()
            is_ours = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid()
            if is_ours and time.time() - about.st_mtime > YOUNG_S:
                with locks.at_once(left / HELD) as is_free:
                    if is_free:
                        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=COPY) as copy, locks.alone(Path(copy, HELD)):
        yield Path(copy)


@contextlib.contextmanager
def _found_in(folder: Path) -> Iterator[None]:
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
    """Where inductor keeps the headers that it compiles before all else. Else that is for good, hundreds of megabytes,
    in the machine's folder for temporary files, by a name that all its users know. None: they are not compiled, which
    it would do even where it finds all that they are for.

    No setting names that folder (torch 2.13, ``_inductor/codecache.py``); of a torch without it nothing is changed.
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
    precompile.cache_clear()  # it remembers paths
    vars(codecache).update(now)
    try:
        yield
    finally:
        vars(codecache).update(before)
        precompile.cache_clear()


def _without_headers(*_: Any, **__: Any) -> None:
    """As ``_precompile_header``, which gives the path of a header."""


def _forget_loaded() -> None:
    """What inductor has loaded from one folder, it would not write to another."""
    from torch._inductor.utils import clear_caches

    clear_caches()


def misses() -> int:
    """How many graphs of this process torch has compiled, since it did not find them."""
    from torch._dynamo.utils import counters

    inductor: Mapping[str, int] = counters["inductor"]
    return inductor.get("fxgraph_cache_miss", 0) + inductor.get("fxgraph_cache_bypass", 0)
