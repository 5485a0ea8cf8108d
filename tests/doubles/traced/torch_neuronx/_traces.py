"""Traces: compiled without a device or with one, saved, loaded to a core, and called."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from neuron_double.compiler import CompilerFailed, compile_graph
from neuron_double.runtime import runtime

MAGIC = b"NEURON-TRACE\n"
FLAGS = ("--target", "--lnc", "--model-type", "--auto-cast", "--auto-cast-type", "--optlevel", "-O1", "-O2", "-O3")
DYNAMIC = {"aten::nonzero", "aten::masked_select", "aten::unique", "aten::_unique2", "aten::unique_consecutive"}
_loads = 0  # of this process: the next goes to the least used core


class NeuronTrace(torch.nn.Module):
    """What the package gives as a ScriptModule with one fused operator."""

    def __init__(
        self, script: Any, inputs: Sequence[torch.Tensor], neff: bytes, weights: Sequence[str], separate: bool
    ) -> None:
        super().__init__()
        self.script = script
        self.weights = list(weights)  # names in the traced module's state
        self.shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in inputs]
        self.neff = neff
        self.separate = separate
        self.dynamic = False
        self.core: int | None = None  # of this process's own; None: it is not on a core
        self.has_weights = not separate  # on the core

    def load(self) -> None:
        """Puts it onto the least used core, without separate weights."""
        global _loads
        cores = runtime().visible
        runtime().load_neff(self.neff)
        self.core, _loads = _loads % cores, _loads + 1

    def state(self) -> dict[str, torch.Tensor]:
        every = self.script.state_dict()
        return {name: every[name] for name in self.weights}

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        if self.core is None:
            self.load()
        if not self.has_weights:
            raise RuntimeError("the weights are not on the core: each call would move them (move_trace_to_device)")
        batch = self._checked(given)
        compiled = self.shapes[0][0][0]
        outputs = []
        for start in range(0, batch, compiled):
            parts = [tensor[start : start + compiled] for tensor in given]
            filled = [torch.cat([part, part.new_zeros(compiled - len(part), *part.shape[1:])]) for part in parts]
            runtime().execute()
            outputs.append(self.script(*filled)[: len(parts[0])])
        return torch.cat(outputs)

    def _checked(self, given: Sequence[torch.Tensor]) -> int:
        """Returns the rows. Raises the package's errors for other tensors than those of the example."""
        if len(given) != len(self.shapes):
            raise RuntimeError(f"the trace takes {len(self.shapes)} inputs, not {len(given)}")
        for number, (tensor, (shape, dtype)) in enumerate(zip(given, self.shapes, strict=True)):
            if tensor.device.type != "cpu" or tensor.dtype != dtype:
                raise RuntimeError(f"input {number} is {tensor.dtype} on {tensor.device}, not {dtype} on the CPU")
            if tuple(tensor.shape[1:]) != shape[1:]:
                raise ValueError(f"input {number} has the shape {tuple(tensor.shape)}, the trace's is {shape}")
            if not self.dynamic and tuple(tensor.shape) != shape:
                raise ValueError(f"input {number} has {len(tensor)} rows, not {shape[0]}, without dynamic batching")
        if len({len(tensor) for tensor in given}) != 1:
            raise ValueError("the inputs differ in their first dimension")
        return len(given[0])


def trace(
    func: Any,
    example_inputs: Any,
    *,
    input_output_aliases: Mapping[Any, int] = {},
    compiler_workdir: str | None = None,
    compiler_args: str | Sequence[str] | None = None,
    partitioner_config: Any = None,
    inline_weights_to_neff: bool = True,
    cpu_backend: bool = False,
) -> NeuronTrace:
    """Compiles ``func``. Control flow is frozen as the values of the example have it: tensors are lazy, and ``func``
    does not know that it is traced."""
    if input_output_aliases or partitioner_config is not None:
        raise NotImplementedError("the stand-in has neither states nor a partitioner")
    inputs = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else tuple(example_inputs)
    flags = compiler_args.split() if isinstance(compiler_args, str) else list(compiler_args or ())
    _check_flags(flags, cpu_backend)
    if not cpu_backend:
        runtime().claim()
    with mock.patch.object(torch.jit, "is_tracing", return_value=False), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        script: Any = torch.jit.trace(func, inputs, check_trace=False)
    graph = script.inlined_graph
    if unused := [given.debugName() for given in list(graph.inputs())[1:] if not given.uses()]:
        raise RuntimeError(f"Received an input tensor that was unused when traced: {', '.join(unused)}")
    if kinds := {node.kind() for node in _nodes(graph)} & DYNAMIC:
        raise RuntimeError(f"operators with shapes that depend on data are not supported: {', '.join(sorted(kinds))}")
    shapes = [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in inputs]
    state = func.state_dict() if isinstance(func, torch.nn.Module) else {}
    weights = [f"{name} {tuple(weight.shape)} {weight.dtype}" for name, weight in state.items()]
    values = [str(weight.tolist()) for weight in state.values() if inline_weights_to_neff]
    hlo = "\n".join([*shapes, *weights, *values, re.sub(r" # .*", "", str(graph))])
    if compiler_workdir is not None:
        Path(compiler_workdir).mkdir(parents=True)
    try:
        neff = compile_graph(hlo, " ".join(flags))
    except CompilerFailed as error:
        raise RuntimeError(str(error)) from error
    if compiler_workdir is not None:
        (Path(compiler_workdir) / "graph.neff").write_bytes(neff)
    compiled = NeuronTrace(script, inputs, neff, list(state), separate=not inline_weights_to_neff)
    if not cpu_backend:
        compiled.load()
    return compiled


def _check_flags(flags: Sequence[str], cpu_backend: bool) -> None:
    names = [flag.partition("=")[0] for flag in flags]
    if cpu_backend and "--target" not in names:
        raise ValueError("cpu_backend needs --target in compiler_args")
    values = {place + 1 for place, flag in enumerate(flags) if flag == "--target"}
    unknown = [name for place, name in enumerate(names) if place not in values and name not in FLAGS]
    if unknown:
        raise RuntimeError(f"neuronx-cc failed with 2: unrecognized arguments: {' '.join(unknown)}")


def _nodes(graph: Any) -> Iterator[Any]:
    for node in graph.nodes():
        yield node
        for block in node.blocks():
            yield from _nodes(block)


def dynamic_batch(neuron_script: NeuronTrace) -> NeuronTrace:
    if len({shape[0] for shape, _ in neuron_script.shapes}) != 1:
        raise ValueError("the inputs of the example differ in their first dimension")
    neuron_script.dynamic = True
    return neuron_script


def replace_weights(neuron_model: NeuronTrace, weights: torch.nn.Module | Mapping[str, torch.Tensor]) -> None:
    """Raises ValueError for weights of other names, shapes or types; of a trace without separate weights, too."""
    state = weights.state_dict() if isinstance(weights, torch.nn.Module) else weights
    own = neuron_model.state()
    if not neuron_model.separate:
        raise ValueError("the model has no separate weights")
    if state.keys() != own.keys():
        raise ValueError(f"the weights have other names: {sorted(state.keys() ^ own.keys())[:3]}")
    for name, weight in state.items():
        if (weight.shape, weight.dtype) != (own[name].shape, own[name].dtype):
            raise ValueError(
                f"{name} is {tuple(weight.shape)} {weight.dtype}, the trace's is {tuple(own[name].shape)} "
                f"{own[name].dtype}"
            )
    neuron_model.script.load_state_dict(state, strict=False)


def move_trace_to_device(trace: NeuronTrace, device_id: int) -> None:
    """Moves the trace and its weights to one of the process's own cores."""
    if type(device_id) is not int or not 0 <= device_id < runtime().visible:
        raise RuntimeError(f"nrt_load Could not find VNC id {device_id}")
    if trace.core is None:
        trace.load()
    runtime().allocate(sum(weight.nbytes for weight in trace.state().values()), "tensors")
    trace.core, trace.has_weights = device_id, True


def _quietly(function: Callable[..., Any], *arguments: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript, which the package is built on
        return function(*arguments)


def saving(save: Callable[..., Any]) -> Callable[..., Any]:
    """Returns torch.jit.save for traces, too."""

    def neuron_save(m: Any, f: Any, **kwargs: Any) -> None:
        if not isinstance(m, NeuronTrace):
            save(m, f, **kwargs)
            return
        script = io.BytesIO()
        _quietly(save, m.script, script)
        content = {"script": script.getvalue(), "neff": m.neff, "dynamic": m.dynamic, "separate": m.separate}
        content["weights"] = m.weights
        content |= {"shapes": [(shape, str(dtype)) for shape, dtype in m.shapes]}
        with Path(f).open("wb") as file:
            file.write(MAGIC)
            torch.save(content, file)

    return neuron_save


def loading(load: Callable[..., Any]) -> Callable[..., Any]:
    """Returns torch.jit.load for traces, too, which puts them onto a core at once."""

    def neuron_load(f: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(f, str | Path) or not Path(f).read_bytes().startswith(MAGIC):
            return load(f, *args, **kwargs)
        content = torch.load(io.BytesIO(Path(f).read_bytes()[len(MAGIC) :]), weights_only=True)
        inputs = [
            torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch."))) for shape, dtype in content["shapes"]
        ]
        script = _quietly(load, io.BytesIO(content["script"]))
        trace = NeuronTrace(script, inputs, content["neff"], content["weights"], content["separate"])
        trace.dynamic = content["dynamic"]
        trace.load()
        return trace

    return neuron_load
