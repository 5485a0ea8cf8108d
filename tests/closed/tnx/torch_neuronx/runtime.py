"""The operators and classes that libtorchneuron registers with torch, on the CPU.

Cores, memory, NEFFs and planned faults are those of ``neuron_double``; programs run in the HLO interpreter.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from neuron_double.runtime import runtime

from torch_neuronx.hlo_interpreter import Program

PROGRAMS: list[Program] = []  # loaded ones
FAILURES: list[str] = []  # of executions whose exceptions the package's warm-up ignores


class DeviceTensor(torch.Tensor):
    """A tensor on each rank behind one handle that has a shape and a dtype and computes nothing."""

    ranks: list[torch.Tensor]

    @staticmethod
    def __new__(cls, ranks: list[torch.Tensor]) -> DeviceTensor:
        """Returns the handle of tensors of one shape and dtype, one for each rank."""
        handle = torch.Tensor._make_wrapper_subclass(cls, ranks[0].shape, dtype=ranks[0].dtype, device="xla")
        handle.ranks = ranks
        return handle

    def __repr__(self) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, ranks={len(self.ranks)})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises RuntimeError: the host cannot compute with memory of a device."""
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise RuntimeError(f"{function} on a tensor of the device: it has to be copied to the host first")


class ParallelTensorSet:
    """The inputs or outputs of a program, by number."""

    def __init__(self, names: Sequence[str], tp_degree: int):
        """``names`` of all of them."""
        self.names, self.tp_degree = names, tp_degree
        self.init()

    def init(self) -> None:
        """Forgets the tensors."""
        self.tensors: dict[int, DeviceTensor] = {}

    def add(self, number: int, tensor: DeviceTensor) -> None:
        """Sets one tensor. Raises RuntimeError for one that the program does not have, or of other ranks."""
        if number >= len(self.names) or len(tensor.ranks) != self.tp_degree:
            raise RuntimeError(f"tensor {number} of {len(tensor.ranks)} ranks in a set of {len(self.names)}")
        self.tensors[number] = tensor


class ParallelModel:
    """A NEFF on ``tp_degree`` cores."""

    def __init__(self, neff: bytes, tp_degree: int, start: int = 0, count: int | None = None):
        """Reads nothing before ``load``."""
        self._neff, self._tp_degree = neff, tp_degree
        self.program: Program | None = None

    def load(self) -> None:
        """Loads the NEFF. Raises RuntimeError with the runtime's message."""
        device = runtime()
        record = device.load_neff(self._neff)
        if self._tp_degree > 1:
            device.load_collectives(self._tp_degree)
        self.program = Program(base64.b64decode(record["program"]))
        PROGRAMS.append(self.program)

    @torch.no_grad()
    def run(self, inputs: ParallelTensorSet, outputs: ParallelTensorSet) -> None:
        """Runs the program on all ranks. Raises RuntimeError."""
        program = self.program
        if program is None:
            raise RuntimeError("the model is not loaded")
        runtime().execute()
        missing = set(range(len(program.parameters))) - set(inputs.tensors)
        if missing:
            raise RuntimeError(f"{program.name}: inputs {sorted(missing)} are not set")
        tensors = [inputs.tensors[number] for number in range(len(program.parameters))]
        for number, (tensor, (sizes, _, dtypes)) in enumerate(zip(tensors, program.parameters, strict=True)):
            if tuple(tensor.shape) != sizes or tensor.dtype not in dtypes:
                found = f"{tuple(tensor.shape)} of {tensor.dtype}"
                raise RuntimeError(f"{program.name}: input {number} is {found} and not {sizes} of {dtypes}")
        for output, parameter in program.aliases.items():
            if outputs.tensors[output] is not tensors[parameter]:
                raise RuntimeError(f"{program.name}: output {output} does not share memory with input {parameter}")
        dtypes = [dtype for _, dtype, _ in program.parameters]
        results = program(
            [
                [tensor.ranks[rank].to(dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
                for rank in range(self._tp_degree)
            ]
        )
        for rank, values in enumerate(results):
            for number, value in enumerate(values):
                outputs.tensors[number].ranks[rank].copy_(value)
        program.runs += 1


class ParallelExecutor:
    """A model with its memory, which copies inputs in and outputs out."""

    def __init__(
        self,
        model: ParallelModel,
        all_inputs: ParallelTensorSet,
        all_outputs: ParallelTensorSet,
        inputs: Sequence[DeviceTensor],
        outputs: Sequence[DeviceTensor],
    ):
        """``inputs`` and ``outputs`` are those that the host writes and reads."""
        self._model, self._all_inputs, self._all_outputs = model, all_inputs, all_outputs
        self._inputs, self._outputs = inputs, outputs

    def run(self, inputs: Sequence[torch.Tensor], return_ranks: int) -> list[list[torch.Tensor]]:
        """Returns each output of the first ``return_ranks`` ranks; -1: of all ranks.

        The package leaves out the last inputs where several prompts run at once; those buffers keep their values.
        """
        for buffer, tensor in zip(self._inputs, inputs):  # noqa: B905
            _write(buffer, [tensor] * len(buffer.ranks))
        self._model.run(self._all_inputs, self._all_outputs)
        if return_ranks == 0:
            return []
        ranks = slice(None if return_ranks < 0 else return_ranks)
        return [[tensor.clone() for tensor in output.ranks[ranks]] for output in self._outputs]


@torch.no_grad()
def _write(target: DeviceTensor, ranks: Sequence[torch.Tensor]) -> None:
    for held, new in zip(target.ranks, ranks, strict=True):
        if held.shape != new.shape or held.dtype != new.dtype:
            raise RuntimeError(f"writing {tuple(new.shape)} of {new.dtype} to {tuple(held.shape)} of {held.dtype}")
        held.copy_(new)


def _to_device(ranks: Sequence[torch.Tensor]) -> DeviceTensor:
    """Copies a tensor to each core. A tensor of the device does not share memory with its source."""
    runtime().allocate(max(tensor.nbytes for tensor in ranks), "tensors")
    return DeviceTensor([tensor.detach().clone() for tensor in ranks])


def _run(model: ParallelModel, inputs: ParallelTensorSet, outputs: ParallelTensorSet) -> None:
    """Runs a program. Raises RuntimeError, and keeps its text in ``FAILURES``."""
    try:
        model.run(inputs, outputs)
    except Exception as error:
        FAILURES.append(str(error))
        raise


def _slice(tensor: DeviceTensor, dim: int, start: int, end: int, step: int) -> DeviceTensor:
    """Returns a view, which shares memory with the tensor."""
    window = (slice(None),) * dim + (slice(start, end, step),)
    return DeviceTensor([part[window] for part in tensor.ranks])


def register() -> None:
    """Puts the operators at ``torch.ops.neuron`` and the classes at ``torch.classes.neuron``."""
    torch.ops.neuron = SimpleNamespace(
        _init_neuron=lambda: runtime().claim() and None,
        _parallel_to_neuron=_to_device,
        _parallel_from_neuron=lambda tensor: [part.clone() for part in tensor.ranks],
        _parallel_write_neuron=_write,
        _parallel_slice_neuron=_slice,
        _parallel_run_neuron=_run,
        _parallel_executor_run=lambda executor, inputs, return_ranks: executor.run(inputs, return_ranks),
    )
    torch.classes.neuron = SimpleNamespace(
        ParallelTensorSet=ParallelTensorSet, ParallelModel=ParallelModel, ParallelExecutor=ParallelExecutor
    )
