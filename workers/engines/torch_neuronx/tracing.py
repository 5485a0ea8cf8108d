"""What torch-neuronx traces: the graph of an encoder, its compiled batch and lengths, and the compiler's options."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placements.engines.torch_neuronx.capabilities import TRACED_FAMILIES, TRACED_REFUSED, traced_batch, traced_lengths
from placements.facts.encoders import longest_input
from workers.batching.buckets import checked_buckets
from workers.engines.checkpoint_files import check_length, positions_of
from workers.engines.cpu.encoder import checked, load_graph, score_activation, tensors
from workers.engines.encoder_graph import embedding_graph, score_graph, takes_types
from workers.engines.encoder_layout import EncoderLayout
from workers.engines.engine_setup import dtype_on, source_of
from workers.messages.encoder_protocol import EncodeInput, EncoderKind
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import ReplicaConfig

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Tracing:
    """The traces of one checkpoint: one graph for each of ``lengths``, for ``batch`` rows."""

    source: Path
    layout: EncoderLayout
    kind: EncoderKind
    dtype: str  # torch's name
    batch: int
    lengths: tuple[int, ...]
    config: Any  # transformers' reading of config.json

    @classmethod
    def of(cls, config: ReplicaConfig) -> Tracing:
        """Returns the traces of a replica. Reads small files only. Raises EngineLoadError."""
        assert config.model.kind != "generate"
        source = source_of(config)
        layout, settings = checked(source, config.model.kind)
        _check_family(str(settings["model_type"]), layout.transformer)
        check_length(config.max_len, longest_input(settings["model_type"], positions_of(settings), settings))
        return cls(
            source=source,
            layout=layout,
            kind=config.model.kind,
            dtype=dtype_on("torch-neuronx", config.dtype),
            batch=traced_batch(config.model.max_batch, config.model.engine_options),
            lengths=_lengths(config),
            config=_read(layout.transformer),
        )

    @property
    def pad(self) -> int:
        return int(self.config.pad_token_id or 0)

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of a classification's classes."""
        count = self.config.num_labels if self.kind == "classification" else 0
        return tuple(self.config.id2label[i] for i in range(count))

    @property
    def activation(self) -> str:
        """The class of torch.nn after the logits; empty for embeddings."""
        return "" if self.kind == "embedding" else score_activation(self.config, self.kind, self.layout.transformer)

    @cached_property
    def blank(self) -> nn.Module:
        """The graph with zeros as weights. Its traces show nothing of a version, and fit each of them.

        Attention is written out: the fused one may leave out the mask, by the values of the inputs.
        """
        import torch
        import transformers

        auto: Any = (
            transformers.AutoModel if self.kind == "embedding" else transformers.AutoModelForSequenceClassification
        )
        model = auto.from_config(self.config, dtype=getattr(torch, self.dtype), attn_implementation="eager")
        graph = embedding_graph(model, self.layout) if self.kind == "embedding" else score_graph(model, self.activation)
        with torch.no_grad():
            for weight in graph.parameters():
                weight.zero_()
        return self._traced(graph.eval())

    def loaded(self, pickled: bool) -> nn.Module:
        """Returns the graph with the weights of the checkpoint. Raises EngineLoadError."""
        import torch

        return self._traced(load_graph(self.layout, self.kind, getattr(torch, self.dtype), pickled))

    def inputs(self, rows: list[EncodeInput], length: int) -> tuple[torch.Tensor, ...]:
        """Returns those inputs that the graph uses, each int64 ``[len(rows), length]``."""
        return tuple(tensors(rows, length, self.pad)[place] for place in self._uses)

    def example(self, length: int) -> tuple[torch.Tensor, ...]:
        """Returns inputs of a full batch with padding in each row. Control flow is frozen by these values: without
        padding, transformers would compute without a mask."""
        return self.inputs([self.probe(length)] * self.batch, length)

    def probe(self, length: int) -> EncodeInput:
        """Returns an input of an eighth of the length: the more padding, the more a lost mask shows."""
        count = max(1, length // 8)
        return EncodeInput([3 + i % (self.config.vocab_size - 3) for i in range(count)])

    @property
    def _uses(self) -> tuple[int, ...]:
        """The places of the inputs that the graph uses, of ids, attended, mask and types: the package drops others."""
        pooled = self.kind == "embedding" and any(mode != "lasttoken" for mode in self.layout.pooling)
        typed = takes_types(self._model_class)
        return (0, 1, *([2] if pooled else []), *([3] if typed else []))

    @cached_property
    def _model_class(self) -> Any:
        import transformers

        embeds = self.kind == "embedding"
        mapping: Any = transformers.MODEL_MAPPING if embeds else transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
        return mapping[type(self.config)]

    def _traced(self, graph: nn.Module) -> nn.Module:
        model: Any = graph.model
        if self.kind == "embedding" and getattr(model, "pooler", None) is not None:
            model.pooler = None  # its result is not used
        return _with_inputs(graph, self._uses)


def _with_inputs(graph: nn.Module, uses: tuple[int, ...]) -> nn.Module:
    """Returns a module that takes only the inputs at the places ``uses`` of the graph's four."""
    from torch import Tensor, nn

    class Traced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.graph = graph

        def forward(self, *given: Tensor) -> Tensor:
            four = [given[0]] * 4
            for place, tensor in zip(uses, given, strict=True):
                four[place] = tensor
            vectors: Tensor = self.graph(*four)
            return vectors

    return Traced().eval()


def _check_family(family: str, folder: Path) -> None:
    if family not in TRACED_FAMILIES:
        why = TRACED_REFUSED.get(family, "it was not tried")
        fact = f"torch-neuronx does not serve the model_type {family!r} of {folder / 'config.json'}: {why}"
        raise EngineLoadError("unknown-family", fact, f"use engine: cpu; supported: {', '.join(TRACED_FAMILIES)}")


def _lengths(config: ReplicaConfig) -> tuple[int, ...]:
    try:
        lengths = checked_buckets(
            "prefill", traced_lengths(config.model.buckets.prefill, config.max_len), config.max_len
        )
    except ValueError as error:
        raise EngineLoadError("bad-buckets", str(error)) from error
    if lengths[-1] != config.max_len:
        fact = f"the largest prefill bucket is {lengths[-1]}, less than max_len {config.max_len}"
        raise EngineLoadError("bad-buckets", fact, f"add {config.max_len}")
    return lengths


def _read(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        fact = f"{folder / 'config.json'} cannot be read: {type(error).__name__}: {error}"
        raise EngineLoadError("config-unreadable", fact) from error
