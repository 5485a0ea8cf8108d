"""A compiled application: its file, and the runtime that executes it.

The file has the recipe of each submodel and the NEFF of each bucket. Executing a bucket calls the package's own module
on each rank, with the weights of that rank and the states that all submodels of a rank share.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from neuron_double.runtime import runtime

from torch_neuronx.device_semantics import DeviceSemantics
from torch_neuronx.ranks import Ranks

MAGIC = b"a program of stand-ins\n"


@dataclass(frozen=True)
class Graph:
    """One bucket of a submodel."""

    submodel: str
    bucket: int
    inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    neff: bytes

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(shape for shape, _ in self.inputs)


@dataclass(frozen=True)
class Program:
    """What a model builder compiled."""

    recipes: dict[str, Any]  # by submodel: the package's model instance, without its module
    graphs: tuple[Graph, ...]
    sizes: dict[str, int]  # of the groups of ranks, by the names of ``initialize_model_parallel``
    custom_groups: Callable[[], None] | None
    ranks: int  # of this process


def build(builder: Any) -> TracedModel:
    """Returns the traced model of a builder whose graphs are compiled: its ``build_nxd_model``."""
    recipes, graphs = {}, []
    for name, container in builder.model_collection.items():
        recipes[name] = copy.copy(container.model_instance)
        recipes[name].module = recipes[name].input_output_aliases = None
        neffs = [Path(artifacts.neff_filename).read_bytes() for artifacts in container.neff_artifact_collection]
        for bucket, (inputs, neff) in enumerate(zip(container.example_inputs, neffs, strict=True)):
            graphs.append(Graph(name, bucket, tuple((tuple(tensor.shape), tensor.dtype) for tensor in inputs), neff))
    sizes = {
        "tensor_model_parallel_size": builder.tp_degree,
        "pipeline_model_parallel_size": builder.pp_degree,
        "expert_model_parallel_size": builder.ep_degree,
        "lnc_size": builder.logical_nc_config,
    }
    groups = builder.init_custom_process_group_fn
    return TracedModel(Program(recipes, tuple(graphs), sizes, groups, builder.local_ranks_size))


def loading(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``torch.jit.load`` that also reads the files of ``TracedModel.save``."""

    def load(file: Any, *arguments: Any, **keywords: Any) -> Any:
        if isinstance(file, str | Path) and Path(file).is_file():
            with Path(file).open("rb") as stream:
                if stream.read(len(MAGIC)) == MAGIC:
                    return TracedModel(pickle.load(stream))
        return original(file, *arguments, **keywords)

    return load


class TracedModel(torch.nn.Module):
    """What a trace returns, and ``torch.jit.load``. It passes for a ScriptModule, by which the package knows it."""

    __class__ = property(lambda self: torch.jit.ScriptModule)  # type: ignore[assignment]
    _c = SimpleNamespace(_type=lambda: "TracedModel")  # for torch's log of what is saved

    def __init__(self, program: Program) -> None:
        super().__init__()
        object.__setattr__(self, "nxd_model", Executable(program))

    def save(self, file: str, _extra_files: Any = None) -> None:
        """See ``torch.jit.save``."""
        Path(file).write_bytes(MAGIC + pickle.dumps(self.nxd_model.program))

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.nxd_model.forward(inputs)


class Executable:
    """The runtime's side of a program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._graphs = {graph.shapes: graph for graph in program.graphs}  # as in the package, the last of equal ones
        self._groups: _Groups | None = None
        self._submodels: list[dict[str, _Submodel]] = []  # of each rank
        self.states: list[dict[str, torch.Tensor]] = []  # of each rank
        self._ranks = Ranks(program.ranks)

    def initialize(self, checkpoint: Sequence[dict[str, torch.Tensor]], start_rank: torch.Tensor) -> None:
        """Claim the cores and load the graphs and each rank's weights. Raises RuntimeError."""
        device = runtime()
        device.claim()
        device.load_collectives(self.program.ranks)
        for graph in self.program.graphs:
            device.load_neff(graph.neff)
        self._groups = _Groups(self.program)
        with self._groups.active():
            for weights in checkpoint:
                states: dict[str, torch.Tensor] = {}
                self.states.append(states)
                self._submodels.append(
                    {name: _Submodel(recipe, weights, states) for name, recipe in self.program.recipes.items()}
                )
                size = sum(tensor.nbytes for tensor in [*weights.values(), *states.values()])
                if len(self._submodels) == 1:
                    device.allocate(size, "tensors")

    def forward(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Execute the graph of the inputs' shapes. Raises ValueError without one, RuntimeError for other types."""
        shapes = tuple(tuple(tensor.shape) for tensor in inputs)
        if shapes not in self._graphs:
            raise ValueError(f"no graph has the input shapes {shapes}: {list(self._graphs)}")
        graph = self._graphs[shapes]
        wrong = [
            (index, tensor.dtype, expected)
            for index, (tensor, (_, expected)) in enumerate(zip(inputs, graph.inputs, strict=True))
            if tensor.dtype != expected and tensor.numel()
        ]
        if wrong:
            raise RuntimeError(
                f"{graph.submodel}: inputs of another type than compiled (index, type, expected): {wrong}"
            )
        if self._groups is None:
            raise ValueError("the model is not initialized")
        runtime().execute()
        with self._groups.active():
            answers = self._ranks.run(lambda rank: self._submodels[rank][graph.submodel].run(graph.bucket, inputs))
        return answers[0]


class _Submodel:
    """A submodel on one rank."""

    def __init__(self, recipe: Any, weights: dict[str, torch.Tensor], states: dict[str, torch.Tensor]) -> None:
        """``states`` are shared by the submodels of a rank: those that it lacks are added, as zeros."""
        self._instance = copy.copy(recipe)
        self._instance.load_module()
        module, aliases = self._instance.get(0)
        names = {id(tensor): name for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
        self._states, self._names = states, {names[id(state)]: state for state in aliases}
        for name, state in self._names.items():
            zeros = torch.zeros(state.shape, dtype=torch.float32).to(state.dtype)
            if _type(states.setdefault(name, zeros)) != _type(state):
                raise RuntimeError(f"the state {name} is {_type(states[name])}, but {_type(state)} in another submodel")
        for name, parameter in list(module.named_parameters()):
            if name in self._names:
                continue
            if name not in weights:  # a graph has only the weights that it uses: a use of this one fails
                owner, _, own = name.rpartition(".")
                meta = torch.nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
                module.get_submodule(owner).register_parameter(own, meta)
                continue
            if _type(weights[name]) != _type(parameter):
                raise RuntimeError(f"the weight {name} is {_type(weights[name])}, compiled for {_type(parameter)}")
            parameter.data = weights[name]
        for name, buffer in module.named_buffers():
            if name in weights:
                buffer.data = weights[name].to(buffer.dtype)

    def run(self, bucket: int, inputs: Sequence[torch.Tensor]) -> Any:
        """Returns the outputs that are not states; one by itself."""
        module, aliases = self._instance.get(bucket)
        for name, state in self._names.items():
            state.data = self._states[name]
        with DeviceSemantics():
            outputs = module(*[tensor.clone() for tensor in inputs])
        names = {id(state): name for name, state in self._names.items()}
        for state, index in aliases.items():
            self._states[names[id(state)]] = outputs[index].clone()
        answers = [output for index, output in enumerate(outputs) if index not in aliases.values()]
        return answers[0] if len(answers) == 1 else answers


class _Groups:
    """The package's groups of ranks as they were when the graphs were traced, active only while they are executed."""

    def __init__(self, program: Program) -> None:
        from neuronx_distributed.parallel_layers import parallel_state
        from neuronx_distributed.trace.mock_torchdist import mock_distributed

        self._state = vars(parallel_state)
        before = dict(self._state)
        known = inspect.signature(parallel_state.initialize_model_parallel).parameters
        sizes = {name: size for name, size in program.sizes.items() if name in known}
        with mock_distributed(world_size=program.ranks):
            self._distributed = torch.distributed
            torch.distributed.init_process_group("xla", rank=0, world_size=program.ranks)
            parallel_state.initialize_model_parallel(**sizes, skip_collective_init=True)
            if hasattr(parallel_state, "set_aot_mode"):
                parallel_state.set_aot_mode(True)
            if program.custom_groups is not None:
                program.custom_groups()
        changed = {name for name, value in self._state.items() if before.get(name) is not value}
        self._active = {name: self._state[name] for name in changed}
        self._state.update({name: before[name] for name in changed})

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        distributed, before = torch.distributed, {name: self._state[name] for name in self._active}
        self._state.update(self._active)
        torch.distributed = self._distributed
        try:
            yield
        finally:
            torch.distributed = distributed
            self._state.update(before)


def _type(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"
