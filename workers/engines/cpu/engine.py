"""The CPU engine: stock transformers modeling code with a KV cache of static slots.

Transformers' own static cache has one position for all rows. Two hooks give each slot its own position, without any
model code of ours:
1. a cache layer that writes each row at its own position and returns the first ``kv_len`` positions of the rows in
   this step (``slot_cache``);
2. a four-dimensional attention mask, ``[rows, 1, queries, kv_len]``, which transformers uses unchanged.
Bloom's position bias needs a two-dimensional mask and is overridden on the instance (``give_alibi``).
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placements.engines.cpu.capabilities import FIRST_TRANSFORMERS
from placements.facts.versions import reaches
from workers.artifacts.fetch.arrival import wait_for_all, wait_for_small
from workers.batching.buckets import default_decode_buckets, default_prefill_buckets
from workers.compiled.host_sets import Buildable, LockedEntry, Tell, compiling, entry
from workers.engines.checkpoint_files import check_rotary, eos_token_ids, read_config
from workers.engines.cpu import artifacts
from workers.engines.cpu.checkpoint import (
    arrived,
    check_positions,
    check_weights,
    family_of,
    load_model,
    weight_files,
    windows_of,
)
from workers.engines.cpu.graphs import Graphs, TracedParts, misses, storing_code_in, using_code_from
from workers.engines.cpu.slot_cache import CacheReach, give_alibi, slot_cache
from workers.engines.engine_setup import LoadableEngine, checked_lengths, dtype_on, kept_in, source_of
from workers.engines.speculative import buildables_of, with_draft
from workers.host.memory_limits import is_out_of_memory, out_of_memory
from workers.host.start_phases import START
from workers.messages.engine_protocol import EngineLoadError, EngineSpec, GenerateEngine
from workers.messages.replica_config import ReplicaConfig

if TYPE_CHECKING:
    import torch

    _Seen = Callable[[int, int, torch.Tensor], None]

log = logging.getLogger(__name__)

CPU_PACKAGES = "run python -m pip install torch safetensors numpy in the replica's Python"
NEWER_TRANSFORMERS = f"run python -m pip install 'transformers>={FIRST_TRANSFORMERS}' in the replica's Python"
SCORED_TOKENS = 64  # with a vocabulary of 150,000, their logits are 40 MB
PREFIX_BLOCK = 16  # tokens; fewer save less than the chunked prefill costs


def open_cpu(config: ReplicaConfig) -> GenerateEngine:
    """Returns the engine, not loaded yet, with its draft if there is one. Raises EngineLoadError without a source."""
    return with_draft(*_engines(config), config.draft_k)


def buildables(config: ReplicaConfig, _read: bool = True) -> list[Buildable]:
    """Returns the engine's compile units, with its draft's; none without `compile`. Raises EngineLoadError."""
    target, draft = _engines(config)
    return buildables_of(target, draft) if target.compile else []


def check(config: ReplicaConfig) -> None:
    """See `CpuEngine.check`; also checks the draft."""
    target, draft = _engines(config)
    target.check()
    if draft is not None:
        draft.check()


def _engines(config: ReplicaConfig) -> tuple[CpuEngine, CpuEngine | None]:
    source, options = source_of(config), config.model.engine_options
    shared: dict[str, Any] = {
        "slots": config.model.max_batch,
        "max_len": config.max_len,
        "dtype": config.dtype,
        "prefill_buckets": config.model.buckets.prefill,
        "decode_buckets": config.model.buckets.decode,
        "prefill_chunk": options.get("prefill_chunk"),
        "allow_pickle": config.model.allow_pickle,
        "trust_remote_code": config.model.trust_remote_code,
        "compile": options.get("compile", False),
        "compiled": kept_in(config),
    }
    target = CpuEngine(source, prefix_cache=options.get("prefix_cache", False), **shared)
    return target, None if config.draft_source is None else CpuEngine(Path(config.draft_source), **shared)


@dataclass(eq=False, repr=False)
class CpuEngine(LoadableEngine[EngineSpec]):
    """Implements ``GenerateEngine`` for a directory with safetensors weights. Float32 logits ``[rows, vocab_size]``.

    A decode leaves unlisted slots intact. Nothing is read before ``load``.
    """

    source: Path
    _: KW_ONLY
    slots: int
    max_len: int
    dtype: str = "fp32"
    threads: int | None = None  # torch's, for this process; None: as OMP_NUM_THREADS
    prefill_buckets: Sequence[int] = ()  # empty: lengths that double up to ``max_len``; so are decode_buckets
    decode_buckets: Sequence[int] = ()
    # The tokens of each prompt that are processed together; None: all. The attention scores of a prompt then take
    # chunk x length numbers a head, instead of length x length.
    prefill_chunk: int | None = None
    prefix_cache: bool = False  # reuse the prompt prefixes that slots hold (``PrefixEngine``)
    # Without safetensors, read ``pytorch_model.bin`` and its shards, with torch's ``weights_only``: it creates tensors
    # and plain containers and calls no function that the file names. But unpicklers have had vulnerabilities.
    allow_pickle: bool = False
    trust_remote_code: bool = False  # run the Python code that config.json names (``auto_map``), whatever the family
    compile: bool = False  # pad prompts and steps to their buckets, and run them as inductor's code for each
    compiled: Path | None = None  # the folder of that code; None: it is not kept

    def __post_init__(self) -> None:
        self._reach = CacheReach()
        self._model: Any = None  # transformers' stock model, its body, its output layer, and our cache
        self._base: Any = None
        self._head: Any = None
        self._cache: Any = None
        self._graphs: Graphs | None = None  # with `compile`
        self._into: tuple[LockedEntry, Tell] | None = None  # set when it is loaded only to compile

    def load(self) -> None:
        """Map the weights, which the first step reads; with `compile`, run every bucket once. Raises
        ``EngineLoadError``."""
        try:
            self._load()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise out_of_memory(error, self._size) from error

    @property
    def _size(self) -> str:
        return f"{self.source} with {self.slots} slots of {self.max_len} tokens in {self.dtype}"

    def buildable(self) -> Buildable:
        """Returns the engine's compile unit, without torch and weights. Raises EngineLoadError."""
        family_of(read_config(self.source), self.source, self.trust_remote_code)
        return Buildable(source=self.source, manifest=self._manifest(), is_whole=artifacts.is_whole, make=self._make)

    def _manifest(self) -> dict[str, Any]:
        prefill_buckets, decode_buckets = self._checked_sizes()
        return artifacts.manifest(
            self.source,
            dtype=self.dtype,
            slots=self.slots,
            max_len=self.max_len,
            prefill_buckets=prefill_buckets,
            decode_buckets=decode_buckets,
            trust_remote_code=self.trust_remote_code,
        )

    def _make(self, target: LockedEntry, tell: Tell) -> None:
        """Compile into ``target``, which is locked exclusively, by loading and running every graph once."""
        self._into = target, tell
        try:
            self.load()
        finally:
            self.close()

    def check(self) -> tuple[dict[str, Any], bool]:
        """Check everything that ``load`` needs except cores and memory: the libraries, config.json, the header of each
        weight file. Returns config.json, and whether the weights are pickles. Raises EngineLoadError."""
        if self.compile:
            artifacts.check_compiler()
        self._checked_sizes()
        arrived(lambda: wait_for_small(self.source))
        settings = read_config(self.source)
        family_of(settings, self.source, self.trust_remote_code)
        eos_token_ids(self.source, settings)
        weights, pickled = weight_files(self.source, self.allow_pickle)
        try:
            import safetensors  # noqa: F401
            import torch  # noqa: F401 - see below
            import transformers
            from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: F401 - only tests the import
        except ImportError as error:
            raise EngineLoadError("engine-not-installed", f"the cpu engine needs {error.name}", CPU_PACKAGES) from error
        if not reaches(transformers.__version__, FIRST_TRANSFORMERS):
            message = f"the cpu engine needs transformers {FIRST_TRANSFORMERS} or later, not {transformers.__version__}"
            raise EngineLoadError("engine-not-installed", message, NEWER_TRANSFORMERS)
        START.end("imports")
        check_weights(weights, pickled)
        return settings, pickled

    def _load(self) -> None:
        settings, pickled = self.check()
        family = family_of(settings, self.source, self.trust_remote_code)
        eos = eos_token_ids(self.source, settings)
        prefill_buckets, decode_buckets = self._checked_sizes()
        import torch

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        model = load_model(self.source, getattr(torch, dtype_on("cpu", self.dtype)), pickled, self.trust_remote_code)
        check_rotary(settings, model.config)
        check_positions(model.config, self.max_len)

        self._model = model
        self._base = model.base_model
        self._head = model.get_output_embeddings()
        self._takes_positions = "position_ids" in inspect.signature(self._base.forward).parameters
        self._additive_mask = getattr(model.config, "_attn_implementation", "eager") == "eager"
        self._kv_positions = torch.arange(self.max_len)
        self._windows = windows_of(family, model.config)
        if family.alibi:
            give_alibi(self._base, self._reach, self.max_len)
        room = self.max_len + (1 if self.compile else 0)  # where idle slots of a graph write
        self._cache = slot_cache(self._reach, model.config.num_hidden_layers, self.slots, room, self._size)
        START.end("weights")
        self._spec = EngineSpec(
            slots=self.slots,
            max_len=self.max_len,
            prefill_buckets=prefill_buckets,
            decode_buckets=decode_buckets,
            vocab_size=int(model.config.vocab_size),
            eos_token_ids=eos,
            prefix_block=PREFIX_BLOCK if self.prefix_cache else 0,
            scores_prompts=True,
        )
        if self.compile:  # without graphs, the first run of a length takes less than 50 ms more than the second
            self._load_graphs()
            START.end("warm_up")
        arrived(lambda: wait_for_all(self.source))  # serve only once every file is fetched and verified

    def prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """See ``GenerateEngine.prefill``. Prompts of one call are padded to the longest of them."""
        return self._logits(slots, self._read_prompts(slots, prompts))

    def score(
        self,
        slots: Sequence[int],
        prompts: Sequence[Sequence[int]],
        read: Callable[[int, Sequence[int], Any], None],
    ) -> torch.Tensor:
        """See ``ScoringEngine.score``. The logits of ``SCORED_TOKENS`` are in memory at a time."""
        import torch

        def seen(row: int, first: int, hidden: torch.Tensor) -> None:
            for at in range(0, len(hidden), SCORED_TOKENS):
                begin = first + at + 1
                ids = prompts[row][begin : begin + min(SCORED_TOKENS, len(hidden) - at)]
                with torch.inference_mode():
                    read(row, ids, self._head(hidden[at : at + len(ids)]).float())

        return self._logits(slots, self._read_prompts(slots, prompts, seen))

    def copy_prefix(self, source: int, slot: int, count: int) -> None:
        """See ``PrefixEngine.copy_prefix``."""
        import torch

        with torch.inference_mode():
            for layer in self._cache.layers:
                layer.keys[slot, :, :count] = layer.keys[source, :, :count]
                layer.values[slot, :, :count] = layer.values[source, :, :count]

    def prefill_from(
        self, slots: Sequence[int], prompts: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> torch.Tensor:
        """See ``PrefixEngine.prefill_from``. Whole prompts are processed separately, without reading the cache."""
        import torch

        hidden: list[Any] = [None] * len(prompts)
        unshared = [row for row, start in enumerate(starts) if not start]
        reusing = [row for row, start in enumerate(starts) if start]
        if unshared:
            read = self._read_prompts([slots[row] for row in unshared], [prompts[row] for row in unshared])
            for row, last in zip(unshared, read, strict=True):
                hidden[row] = last
        if reusing:
            chunk = self.prefill_chunk or self.max_len
            of = [slots[row] for row in reusing], [prompts[row] for row in reusing], [starts[row] for row in reusing]
            for row, last in zip(reusing, self._read_chunks(*of, chunk), strict=True):
                hidden[row] = last
        return self._logits(slots, torch.stack(hidden))

    def _read_prompts(
        self, slots: Sequence[int], prompts: Sequence[Sequence[int]], seen: _Seen | None = None
    ) -> torch.Tensor:
        """Returns the hidden states ``[rows, hidden]`` of the last token of each whole prompt.

        ``seen`` gets those of all tokens: the row, the position of the first, and states ``[tokens, hidden]``."""
        import torch

        longest = max(len(prompt) for prompt in prompts)
        if self._graphs is not None and longest <= (self.prefill_chunk or self.max_len):
            last: list[Any] = []
            with torch.inference_mode():
                for row, prompt in enumerate(prompts):
                    states = self._graphs.prompt(slots[row], prompt)
                    if seen is not None:
                        seen(row, 0, states)
                    last.append(states[-1].clone())
                return torch.stack(last)
        if self.prefill_chunk is not None and longest > self.prefill_chunk:
            return self._read_chunks(slots, prompts, [0] * len(prompts), self.prefill_chunk, seen)
        ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts])
        ends = torch.tensor([len(prompt) - 1 for prompt in prompts])
        self._reach.move(slots, None, longest)
        # Padding comes after the prompt, so the causal mask alone excludes it.
        positions = self._kv_positions[None, :longest]
        hidden = self._forward(ids, positions)
        if seen is not None:
            for row, prompt in enumerate(prompts):
                seen(row, 0, hidden[row, : len(prompt)])
        return hidden[torch.arange(len(prompts)), ends]

    def _read_chunks(
        self,
        slots: Sequence[int],
        prompts: Sequence[Sequence[int]],
        starts: Sequence[int],
        chunk: int,
        seen: _Seen | None = None,
    ) -> torch.Tensor:
        """Returns the same, from ``starts`` on: each chunk attends to the cached tokens before it.

        Finished prompts leave the batch. A padded chunk that would exceed the slot begins earlier, and processes some
        tokens again.
        """
        import torch

        last: list[Any] = [None] * len(prompts)
        for offset in range(0, max(len(prompt) - start for prompt, start in zip(prompts, starts, strict=True)), chunk):
            rows = [row for row, prompt in enumerate(prompts) if len(prompt) - starts[row] > offset]
            width = min(chunk, max(len(prompts[row]) - starts[row] - offset for row in rows))
            begins = [min(starts[row] + offset, self.max_len - width) for row in rows]
            pieces = [prompts[row][begin : begin + width] for row, begin in zip(rows, begins, strict=True)]
            ids = torch.tensor([[*piece, *[0] * (width - len(piece))] for piece in pieces])
            together = len(set(begins)) == 1
            positions = torch.tensor(begins[:1] if together else begins)[:, None] + self._kv_positions[:width]
            self._reach.move([slots[row] for row in rows], positions, max(begins) + width)
            hidden = self._forward(ids, positions)
            for index, (row, begin) in enumerate(zip(rows, begins, strict=True)):
                if seen is not None:
                    first = starts[row] + offset
                    seen(row, first, hidden[index, first - begin : len(prompts[row]) - begin])
                if len(prompts[row]) <= begin + width:
                    last[row] = hidden[index, len(prompts[row]) - 1 - begin]
        return torch.stack(last)

    def decode(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """See ``GenerateEngine.decode``. All rows read as much of the KV cache as the longest one."""
        import torch

        if self._graphs is not None:
            with torch.inference_mode():
                return self._logits(slots, self._graphs.step(slots, tokens, positions))
        column = torch.tensor(positions)[:, None]
        self._reach.move(slots, column, max(positions) + 1)
        hidden = self._forward(torch.tensor(tokens)[:, None], column)
        return self._logits(slots, hidden[:, 0])

    def verify(self, slots: Sequence[int], tokens: Sequence[Sequence[int]], positions: Sequence[int]) -> torch.Tensor:
        """See ``VerifyingEngine.verify``."""
        import torch

        ids = torch.tensor(tokens)
        columns = torch.tensor(positions)[:, None] + self._kv_positions[: ids.shape[1]]
        kv_len = max(positions) + ids.shape[1]
        self._reach.move(slots, columns, kv_len)
        return self._logits(slots, self._forward(ids, columns))

    def close(self) -> None:
        """Release the weights and the KV cache."""
        self._spec = None
        self._model = self._base = self._head = self._cache = self._graphs = None

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Returns the last hidden states ``[rows, queries, hidden]`` of ``ids`` ``[rows, queries]``.

        ``positions`` are ``[rows, queries]``, or ``[1, queries]`` where all rows have the same.
        """
        import torch

        with torch.inference_mode():
            arguments: dict[str, Any] = {"position_ids": positions} if self._takes_positions else {}
            # forward, not __call__: there are no hooks, and for a tiny model the overhead shows.
            output = self._base.forward(
                input_ids=ids,
                attention_mask=self._mask(positions, self._reach.kv_len),
                past_key_values=self._cache,
                use_cache=True,
                return_dict=True,
                **arguments,
            )
            hidden: torch.Tensor = output.last_hidden_state
            return hidden

    def _mask(self, positions: torch.Tensor, kv_len: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """Returns a mask ``[rows or 1, 1, queries, kv_len]`` of the positions that each query attends to.

        A dict by layer type where the family needs one.
        """
        if isinstance(self._windows, dict):
            return {kind: self._one_mask(positions, kv_len, window) for kind, window in self._windows.items()}
        return self._one_mask(positions, kv_len, self._windows)

    def _one_mask(self, positions: torch.Tensor, kv_len: int, window: int | None) -> torch.Tensor:
        import torch

        keys, queries = self._kv_positions[:kv_len], positions[..., None]
        visible = keys <= queries
        if window is not None and kv_len > window:
            visible &= keys > queries - window  # the window includes the query itself
        visible = visible[:, None]
        if not self._additive_mask:
            return visible
        dtype = self._model.dtype
        return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)

    def _logits(self, slots: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits ``[..., vocab_size]`` of hidden states ``[rows, hidden]`` or ``[rows, queries, hidden]``."""
        import torch

        with torch.inference_mode():
            logits: torch.Tensor = self._head(hidden).float()
            finite = logits.flatten(1).sum(dim=-1).isfinite()
            if not finite.all():
                self._wipe([slot for slot, ok in zip(slots, finite.tolist(), strict=True) if not ok])
            return logits

    def _wipe(self, slots: list[int]) -> None:
        """Clear slots that contain NaN: even masked out, it would reach the next request (0 x NaN)."""
        for layer in self._cache.layers:
            layer.keys[slots] = 0
            layer.values[slots] = 0

    def _warm_up(self, tell: Tell | None = None) -> None:
        """Run the graph of every bucket once; ``tell`` gets the progress."""
        total = len(self.spec.prefill_buckets) + len(self.spec.decode_buckets)
        for done, bucket in enumerate(self.spec.prefill_buckets):
            if tell is not None:
                tell(done, total)
            self.prefill([0], [[0] * bucket])
        every_slot = range(self.spec.slots)
        for done, bucket in enumerate(self.spec.decode_buckets, len(self.spec.prefill_buckets)):
            if tell is not None:
                tell(done, total)
            self.decode(every_slot, [0] * len(every_slot), [bucket - 1] * len(every_slot))

    def _load_graphs(self) -> None:
        """Load a graph for each bucket from the entry of the manifest, or compile them into it."""
        if self._into is not None:
            self._compile_into(*self._into)
            return
        with contextlib.ExitStack() as stack:
            root = self.compiled or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="corewright-cpu-")))
            target = stack.enter_context(entry(root, self._manifest(), artifacts.is_whole))
            if not target.complete:
                self._compile_into(target)
                return
            before = misses()
            with using_code_from(target.path / artifacts.CODE):
                self._open_graphs()
            if misses() > before:
                target.forget()
                log.warning("discarding %s: torch did not find %d graphs there", target.path, misses() - before)

    def _compile_into(self, target: LockedEntry, tell: Tell | None = None) -> None:
        code = target.path / artifacts.CODE
        code.mkdir()
        activity = f"{self.source} with torch.compile"
        with compiling(activity, "this takes up to a minute for each bucket"), storing_code_in(code):
            self._open_graphs(tell)
        shutil.rmtree(code / "locks", ignore_errors=True)
        target.finish(str(self.source))

    def _open_graphs(self, tell: Tell | None = None) -> None:
        # Run once without graphs: this allocates the KV cache, which the graphs refer to.
        every_slot = range(self.slots)
        self.prefill([0], [[0]])
        self.decode(every_slot, [0] * self.slots, [0] * self.slots)
        self._graphs = Graphs(
            TracedParts(
                base=self._base,
                layers=self._cache.layers,
                slots=self.slots,
                takes_positions=self._takes_positions,
                mask=self._mask,
                before=lambda rows: self._reach.move(range(rows), None, 0),
            ),
            self.spec.prefill_buckets,
            self.spec.decode_buckets,
        )
        self._warm_up(tell)

    def _checked_sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        dtype_on("cpu", self.dtype)
        return checked_lengths(
            self.prefill_buckets or default_prefill_buckets(self.max_len),
            self.decode_buckets or default_decode_buckets(self.max_len),
            self.max_len,
        )
