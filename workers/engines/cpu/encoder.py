"""The CPU engine of encoders: transformers' model of the family, and what follows it, run on ragged batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placements.facts.encoders import families, longest_input
from workers.batching.buckets import ladder
from workers.engines.checkpoint_files import check_length, positions_of, read_config
from workers.engines.cpu.checkpoint import check_weights, load_model, weight_files
from workers.engines.encoder_graph import embedding_graph, score_graph
from workers.engines.encoder_layout import Dense, EncoderLayout, activation_of, read_layout
from workers.engines.engine_setup import LoadableEngine, dtype_on, source_of
from workers.host.memory_limits import is_out_of_memory, out_of_memory
from workers.host.start_phases import START
from workers.messages.encoder_protocol import EncodeInput, EncoderKind, EncoderSpec
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import ReplicaConfig

if TYPE_CHECKING:
    import numpy
    import torch

SHORTEST = 16  # tokens of the shortest bucket


def open_cpu_encoder(config: ReplicaConfig) -> CpuEncoder:
    """Returns the engine, not loaded yet. Raises EngineLoadError without a source."""
    assert config.model.kind != "generate"
    return CpuEncoder(
        source_of(config),
        kind=config.model.kind,
        rows=config.model.max_batch,
        max_len=config.max_len,
        dtype=config.dtype,
        allow_pickle=config.model.allow_pickle,
    )


@dataclass(eq=False, repr=False)
class CpuEncoder(LoadableEngine[EncoderSpec]):
    """Implements ``EncodeEngine`` for a folder with safetensors weights. Nothing is read before ``load``."""

    source: Path
    _: KW_ONLY
    kind: EncoderKind
    rows: int
    max_len: int
    dtype: str = "fp32"
    threads: int | None = None  # torch's, for this process; None: as OMP_NUM_THREADS
    allow_pickle: bool = False

    def __post_init__(self) -> None:
        self._graph: Any = None
        self._pad = 0

    def load(self) -> None:
        """Read the weights, then encode once. Raises ``EngineLoadError``."""
        try:
            self._load()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise out_of_memory(error, f"{self.source} in {self.dtype}") from error

    def _load(self) -> None:
        layout, settings = checked(self.source, self.kind)
        weights, pickled = weight_files(layout.transformer, self.allow_pickle)
        check_weights(weights, pickled)
        import torch

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        dtype = getattr(torch, dtype_on("cpu", self.dtype))
        START.end("imports")
        self._graph = load_graph(layout, self.kind, dtype, pickled)
        START.end("weights")
        config = self._graph.model.config
        check_length(self.max_len, longest_input(settings["model_type"], positions_of(settings), settings))
        self._pad = config.pad_token_id or 0
        labels = tuple(config.id2label[i] for i in range(config.num_labels)) if self.kind == "classification" else ()
        spec = EncoderSpec(
            rows=self.rows,
            buckets=ladder(SHORTEST, self.max_len),
            vocab_size=int(config.vocab_size),
            width=0,
            labels=labels,
            pads_to_longest=True,
        )
        probe = self._run([EncodeInput([min(1, spec.vocab_size - 1)] * min(2, self.max_len))])
        self._spec = EncoderSpec(**{**vars(spec), "width": probe.shape[1]})
        START.end("warm_up")

    def encode(self, inputs: Sequence[EncodeInput]) -> numpy.ndarray[Any, Any]:
        """See ``EncodeEngine.encode``. Inputs are padded to the longest of them."""
        return self._run(inputs)

    def close(self) -> None:
        self._graph = None

    def _run(self, inputs: Sequence[EncodeInput]) -> numpy.ndarray[Any, Any]:
        import torch

        with torch.inference_mode():
            vectors: torch.Tensor = self._graph(*tensors(inputs, max(len(input.ids) for input in inputs), self._pad))
        return vectors.numpy()


def tensors(inputs: Sequence[EncodeInput], length: int, pad: int) -> tuple[torch.Tensor, ...]:
    """Returns the inputs of a graph, each ``[len(inputs), length]``: ids, attended, pooled and types, padded on the
    right."""
    import numpy
    import torch

    ids = numpy.full((len(inputs), length), pad, dtype=numpy.int64)
    attended, mask, types = (numpy.zeros((len(inputs), length), dtype=numpy.int64) for _ in range(3))
    for row, input in enumerate(inputs):
        count = len(input.ids)
        ids[row, :count] = input.ids
        attended[row, :count] = 1
        mask[row, input.prompt : count] = 1
        if input.second:
            types[row, input.second : count] = 1
    return tuple(map(torch.from_numpy, (ids, attended, mask, types)))


def checked(source: Path, kind: EncoderKind) -> tuple[EncoderLayout, dict[str, Any]]:
    """Returns the layout of a checkpoint and its config.json. Raises EngineLoadError if the engine cannot serve it."""
    layout = read_layout(source, kind)
    settings = read_config(layout.transformer)
    if (family := settings.get("model_type")) not in families(kind):
        raise EngineLoadError(
            "unknown-family",
            f"the model_type {family!r} of {layout.transformer / 'config.json'} is not supported for kind {kind}",
            f"supported: {', '.join(families(kind))}",
        )
    return layout, settings


def load_graph(layout: EncoderLayout, kind: EncoderKind, dtype: torch.dtype, pickled: bool) -> Any:
    """Returns the graph with its weights, ready to run. Raises EngineLoadError."""
    if kind != "embedding":
        auto = "AutoModelForSequenceClassification"
        model = load_model(layout.transformer, dtype, pickled, trust_remote_code=False, auto_class=auto)
        return score_graph(model, score_activation(model.config, kind, layout.transformer)).eval()
    model = load_model(
        layout.transformer, dtype, pickled, trust_remote_code=False, auto_class="AutoModel", unused="pooler."
    )
    graph: Any = embedding_graph(model, layout)
    for module, part in zip(graph.after, layout.after, strict=True):
        if isinstance(part, Dense):
            _load_dense(module[0], part.folder)
    return graph.eval()


def score_activation(config: Any, kind: EncoderKind, folder: Path) -> str:
    """Returns the activation after the logits: that of the checkpoint for a reranker, as sentence-transformers chooses
    it; for classes, sigmoid for one label or several at once, else softmax, as transformers' pipeline does."""
    if kind == "rerank":
        given = getattr(config, "sentence_transformers", None) or {}
        name = given.get("activation_fn") or getattr(config, "sbert_ce_default_activation_function", None)
        return "Sigmoid" if name is None and config.num_labels == 1 else activation_of(name or _IDENTITY, folder)
    several = config.problem_type == "multi_label_classification" or config.num_labels == 1
    return "Sigmoid" if several else "Softmax"


_IDENTITY = "torch.nn.modules.linear.Identity"


def _load_dense(sequence: Any, folder: Path) -> None:
    from safetensors.torch import load_file

    file = folder / "model.safetensors"
    if not file.is_file():
        raise EngineLoadError("weights-missing", f"{folder} is missing model.safetensors", "copy the weights again")
    try:
        weights = {name.removeprefix("linear."): tensor.float() for name, tensor in load_file(file).items()}
        sequence.load_state_dict(weights)
    except Exception as error:  # a broken header, or weights of another shape
        raise EngineLoadError("weights-mismatch", f"{file} cannot be loaded: {error}", "copy it again") from error
