"""The stand-in of the Neuron runtime does to processes what the real one does."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.contracts import PACKAGES, contract, parse_signature
from tests.doubles import Neuron
from tests.doubles.machine import DRIVER, Machine, build_machine
from tests.readable import is_readable
from workers.host.facts.reading import Places, read_host_facts

DEADLINE_S = 30
# Each line of its input is one expression; the answer is a JSON line: [value, None] or [None, error].
PROCESS = """
import json, sys
from neuron_double.runtime import runtime
from neuron_double.compiler import compile_graph
for line in sys.stdin:
    try:
        answer = [eval(line), None]
    except RuntimeError as error:
        answer = [None, str(error)]
    print(json.dumps(answer), flush=True)
"""


@dataclass
class Process:
    """A process of its own on the machine that the stand-ins play."""

    popen: subprocess.Popen[str]

    def ask(self, expression: str) -> Any:
        """The value. Raises RuntimeError with the runtime's message."""
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.popen.stdin.write(expression + "\n")
        self.popen.stdin.flush()
        assert is_readable(self.popen.stdout, DEADLINE_S), "no answer"
        value, error = json.loads(self.popen.stdout.readline())
        if error is not None:
            raise RuntimeError(error)
        return value

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait(DEADLINE_S)


class Start:
    """Starts processes, and ends them with the test."""

    def __init__(self, neuron: Neuron) -> None:
        self.neuron = neuron
        self.processes: list[Process] = []

    def __call__(self, cores: str | None = None, **env: str) -> Process:
        visible = {} if cores is None else {"NEURON_RT_VISIBLE_CORES": cores}
        popen = subprocess.Popen(
            [sys.executable, "-c", PROCESS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PATH": os.environ["PATH"], **self.neuron.env, **visible, **env},
        )
        self.processes.append(Process(popen))
        return self.processes[-1]


@pytest.fixture
def start(neuron: Neuron) -> Iterator[Start]:
    started = Start(neuron)
    yield started
    for process in started.processes:
        process.kill()
        for pipe in (process.popen.stdin, process.popen.stdout, process.popen.stderr):
            assert pipe is not None
            pipe.close()


def test_two_processes_hold_cores_of_their_own(start: Start) -> None:
    """Ranges that do not meet can be held at once; the ids are the host's."""
    first, second = start("0-3"), start("4-7")

    assert (first.ask("runtime().claim()"), second.ask("runtime().claim()")) == ([0, 1, 2, 3], [4, 5, 6, 7])


def test_a_core_is_held_by_one_process(start: Start) -> None:
    """The second one is told how many of its cores are free, in the runtime's words."""
    start("0-3").ask("runtime().claim()")

    with pytest.raises(RuntimeError) as caught:
        start("2-5").ask("runtime().claim()")

    assert str(caught.value) == (
        "nrt_allocate_neuron_cores NeuronCore(s) not available - Requested:nc2-nc5 Available:2"
    )


def test_a_refused_process_holds_nothing(start: Start, neuron: Neuron) -> None:
    """The cores of its range that were free stay free."""
    start("0-3").ask("runtime().claim()")

    with pytest.raises(RuntimeError):
        start("2-5").ask("runtime().claim()")

    assert sorted(neuron.held()) == [0, 1, 2, 3]


@pytest.mark.parametrize("env", [{}, {"NEURON_RT_NUM_CORES": "0"}, {"NEURON_RT_VISIBLE_CORES": ""}])
def test_without_a_range_every_core_is_taken(start: Start, env: dict[str, str]) -> None:
    """Neither variable set, or an empty one as Ray writes it: the process reserves the whole host."""
    assert start(**env).ask("runtime().claim()") == list(range(24))


def test_a_number_of_cores_takes_free_ones(start: Start) -> None:
    """With NEURON_RT_NUM_CORES alone the runtime chooses."""
    start("0-3").ask("runtime().claim()")

    assert start(NEURON_RT_NUM_CORES="4").ask("runtime().claim()") == [4, 5, 6, 7]


def test_the_range_overrides_the_number(start: Start) -> None:
    """Both set: NEURON_RT_VISIBLE_CORES counts."""
    assert start("8-9", NEURON_RT_NUM_CORES="4").ask("runtime().claim()") == [8, 9]


@pytest.mark.parametrize("form", ["3-6", "3,4,5,6", "3-5,6"])
def test_a_range_may_be_written_in_three_ways(start: Start, form: str) -> None:
    """A range, a list, or both mixed."""
    assert start(form).ask("runtime().claim()") == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("cores", "message"),
    [("3,5,6", "Neuron cores are not contiguous"), ("6-3", "not contiguous"), ("23-24", "Could not open the nd12")],
)
def test_an_impossible_range_is_refused(start: Start, cores: str, message: str) -> None:
    """One increasing run, within the machine."""
    with pytest.raises(RuntimeError, match=message):
        start(cores).ask("runtime().claim()")


def test_a_message_is_logged_as_the_runtime_logs_it(start: Start) -> None:
    """Standard error carries what the log of a real process would: the time, pids, the function, the text."""
    process = start("3,5")
    with pytest.raises(RuntimeError):
        process.ask("runtime().claim()")
    process.kill()

    assert process.popen.stderr is not None
    line = process.popen.stderr.read()
    pid = process.popen.pid
    assert line.split(maxsplit=2)[2].split() == (
        f"{pid}:{pid} ERROR NRT:nrt_init Neuron cores are not contiguous".split()
    )


def test_changing_the_range_later_has_no_effect(start: Start) -> None:
    """It is read at the first operation of the process, and never again."""
    process = start("0-1")
    process.ask("runtime().claim()")
    process.ask("__import__('os').environ.update(NEURON_RT_VISIBLE_CORES='4-5')")

    assert process.ask("runtime().claim()") == [0, 1]


def test_a_killed_process_holds_nothing(start: Start, neuron: Neuron) -> None:
    """SIGKILL frees the cores at once."""
    process = start("0-7")
    process.ask("runtime().claim()")

    process.kill()

    assert neuron.held() == {}


def test_importing_claims_nothing(start: Start, neuron: Neuron) -> None:
    """Cores are reserved by the first operation on a device."""
    start("0-7").ask("compile_graph('graph', '-O1').decode()")

    assert neuron.held() == {}


def test_a_fork_is_refused(start: Start) -> None:
    """The runtime does not live through a fork: the child has no runtime."""
    process = start("0-1")
    process.ask("runtime().claim()")

    process.ask("setattr(runtime(), '_pid', 1)")  # what a child sees: the claim of another pid

    with pytest.raises(RuntimeError, match="nrt_init status=13"):
        process.ask("runtime().execute()")


@pytest.mark.parametrize(
    ("instance", "cores", "tp", "message"),
    [
        ("trn1.32xlarge", "0-3", 4, "Unsupported topology. Supported number of Neuron Cores is 1, 2, 8, 16 or a mul"),
        ("trn1.32xlarge", "4-11", 8, "Unsupported topology"),
        ("inf2.48xlarge", "1-4", 4, "Unsupported topology"),
        ("inf2.48xlarge", "0-2", 3, "Unsupported topology"),
        ("inf2.48xlarge", "0-3", 8, "Could not find VNC id 4"),
        ("trn1.32xlarge", "8-15", 8, None),
        ("trn1.32xlarge", "0-31", 32, None),
        ("inf2.48xlarge", "2-5", 4, None),
        ("inf2.48xlarge", "7", 1, None),
        ("trn2.48xlarge", "0-63", 64, None),
    ],
)
def test_groups_of_cores_are_those_of_the_machine(
    start: Start, instance: str, cores: str, tp: int, message: str | None
) -> None:
    """trn1 joins 1, 2, 8, 16 or 32 cores at multiples of that; inf2 whole consecutive devices."""
    process = start(cores, NEURON_DOUBLE_INSTANCE=instance)
    if message is None:
        assert process.ask(f"runtime().load_collectives({tp})") is None
    else:
        with pytest.raises(RuntimeError, match=message):
            process.ask(f"runtime().load_collectives({tp})")


def test_an_lnc_of_one_doubles_the_cores(start: Start) -> None:
    """Trainium 2 has 64 logical cores of two, or 128 of one."""
    process = start(NEURON_DOUBLE_INSTANCE="trn2.48xlarge", NEURON_LOGICAL_NC_CONFIG="1")

    assert process.ask("runtime().visible") == 128


def test_hbm_is_counted_until_it_is_full(start: Start) -> None:
    """16 GiB a core on inf2; the allocation that exceeds them fails with status 4 and its out-of-memory lines."""
    process = start("0-1")
    process.ask("runtime().allocate(10 << 30, 'weights')")

    with pytest.raises(RuntimeError) as caught:
        process.ask("runtime().allocate(7 << 30, 'tensors')")

    lines = str(caught.value).splitlines()
    assert [line.split()[0] for line in lines] == ["mc_alloc", "mempool", "nrt_tensor_allocate"]
    assert lines[-1] == "nrt_tensor_allocate status=4"


def test_a_planned_fault_comes_when_it_was_planned(start: Start, neuron: Neuron) -> None:
    """The third step of each process meets it; what the runtime calls uncorrectable stays."""
    neuron.plan({"at": "execute", "count": 3, "status": 1201})
    process = start("0-1")
    process.ask("[runtime().execute() for _ in range(2)]")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="nrt_execute status=1201 message='HBM uncorrectable error'"):
            process.ask("runtime().execute()")


def test_a_fault_of_a_core_hits_its_owner(start: Start, neuron: Neuron) -> None:
    """A process on other cores is well."""
    neuron.plan({"at": "execute", "core": 5, "status": 1202})
    start("0-3").ask("runtime().execute()")

    with pytest.raises(RuntimeError, match="status=1202"):
        start("4-7").ask("runtime().execute()")


def test_a_fault_may_come_a_number_of_times(start: Start, neuron: Neuron) -> None:
    """In that many processes; the next one is well."""
    neuron.plan({"at": "claim", "status": 1, "times": 1})
    with pytest.raises(RuntimeError, match="nrt_init status=1"):
        start("0-1").ask("runtime().claim()")

    assert start("2-3").ask("runtime().claim()") == [2, 3]


def test_a_killed_compiler_gives_its_exit_code(start: Start, neuron: Neuron) -> None:
    """-9 is what the kernel's OOM killer leaves, in the words of the compiler's callers."""
    neuron.plan({"at": "compile", "exit": -9})

    with pytest.raises(RuntimeError, match="neuronx-cc failed with -9"):
        start().ask("compile_graph('graph', '-O1').decode()")


@pytest.mark.parametrize(
    ("compiled", "loaded", "message"),
    [
        ({"NEURON_DOUBLE_NEFF_VERSION": "3"}, {}, "NEFF version mismatch"),
        ({"NEURON_DOUBLE_INSTANCE": "trn2.48xlarge"}, {}, "nrt_load status=2"),
        (
            {"NEURON_DOUBLE_INSTANCE": "trn2.48xlarge", "NEURON_LOGICAL_NC_CONFIG": "1"},
            {"NEURON_DOUBLE_INSTANCE": "trn2.48xlarge"},
            "nrt_load status=2",
        ),
        ({"NEURON_DOUBLE_INSTANCE": "trn1.32xlarge"}, {}, None),
    ],
)
def test_a_neff_loads_where_it_was_compiled_for(
    start: Start, compiled: dict[str, str], loaded: dict[str, str], message: str | None
) -> None:
    """No newer than the runtime, of the same target (inf2 and trn1 share one) and the same LNC."""
    neff = start(**compiled).ask("compile_graph('graph', '-O1', cores=2).decode()")
    process = start("0-1", **loaded)
    load = f"runtime().load_neff({neff!r}.encode())['cores']"
    if message is None:
        assert process.ask(load) == 2
    else:
        with pytest.raises(RuntimeError, match=message):
            process.ask(load)


def test_a_neff_of_more_cores_is_refused(start: Start) -> None:
    """The process must see as many cores as the NEFF was compiled for."""
    neff = start().ask("compile_graph('graph', '-O1', cores=8).decode()")

    with pytest.raises(RuntimeError, match="Could not find VNC id 4"):
        start("0-3").ask(f"runtime().load_neff({neff!r}.encode())")


def test_the_cache_compiles_a_graph_once(neuron: Neuron) -> None:
    """The same graph with the same flags is found again; the wrapper's own flags do not count, others do."""
    compiler = importlib.import_module("neuron_double.compiler")
    for flags in ("-O1", "-O1 --retry_failed_compilation", "-O2"):
        compiler.cached_compile("graph", flags)

    assert [line["flags"] for line in compiler.compiles()] == ["-O1", "-O2"]


def test_a_failed_entry_of_the_cache_stays_failed(neuron: Neuron) -> None:
    """Until a retry is asked for, nothing is compiled again."""
    compiler = importlib.import_module("neuron_double.compiler")
    neuron.plan({"at": "compile", "exit": 1})
    messages = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            compiler.cached_compile("graph", "-O1")
        messages.append(str(caught.value))

    assert messages[0] == "neuronx-cc failed with 1"
    assert "cached failed neff" in messages[1]
    assert compiler.cached_compile("graph", "-O1 --retry_failed_compilation")


def test_a_call_that_does_not_bind_is_refused(neuron: Neuron, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the version that is played: NxD Inference 0.9 compiles with ``disable_fail_fast``, 0.4 does not know it."""
    bound = importlib.import_module("neuron_double.bound").bound
    name = "neuronx_distributed_inference.models.application_base.NeuronApplicationBase.compile"

    @bound(name)
    def compile(self: object, *args: object, **kwargs: object) -> str:
        return "compiled"

    monkeypatch.setenv("NEURON_DOUBLE_NXDI_VERSION", "0.9")
    assert compile(object(), "folder", disable_fail_fast=True) == "compiled"
    monkeypatch.setenv("NEURON_DOUBLE_NXDI_VERSION", "0.4")
    with pytest.raises(TypeError, match="disable_fail_fast"):
        compile(object(), "folder", disable_fail_fast=True)


def test_a_method_that_a_version_lacks_is_no_attribute(neuron: Neuron, monkeypatch: pytest.MonkeyPatch) -> None:
    """get_cte_model came with 0.7."""
    bound = importlib.import_module("neuron_double.bound").bound
    monkeypatch.setenv("NEURON_DOUBLE_NXDI_VERSION", "0.4")
    name = "neuronx_distributed_inference.models.application_base.NeuronApplicationBase.get_cte_model"
    call = bound(name)(lambda self: None)

    with pytest.raises(AttributeError, match=r"0\.4 has no"):
        call(None)


@pytest.mark.parametrize(
    "text",
    ["(self, a, b=1, *, c=Layout.HSB, **kwargs)", "(cls, *args)", "(a, b=[1, 2], c='x', d=None)", "(self)", "()"],
)
def test_a_recorded_signature_is_read_as_it_was_written(text: str) -> None:
    """Names, kinds and defaults; a default that is no literal keeps its text."""
    assert str(parse_signature(text)) == text


@pytest.mark.parametrize("engine", PACKAGES)
def test_every_name_of_the_surface_is_recorded(engine: str) -> None:
    """In its version each is a class or has a signature, with ``self`` or ``cls`` where it is a method."""
    recorded = contract(engine)
    for version, name in recorded.named:
        role = recorded.role(name)
        if role != "class":
            first = next(iter(recorded.signature(name, version).parameters), None)
            assert first == {"method": "self", "classmethod": "cls"}.get(role, first), name


def test_an_inherited_method_has_its_bases_signature() -> None:
    """LlamaForSampling.load stands in NeuronModelBase."""
    recorded = contract("transformers-neuronx")

    assert recorded.signature("transformers_neuronx.llama.model.LlamaForSampling.load") == inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", "directory")]
    )


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return build_machine(tmp_path_factory.mktemp("machine") / "inf2", "inf2.24xlarge")


def test_a_made_machine_is_read_as_a_real_one(machine: Machine) -> None:
    """corewright's own readers find its type, cores, driver and the process that holds cores, and no problem."""
    holder = subprocess.Popen(
        [machine.python, "-c", "from neuron_double.runtime import runtime; runtime().claim(); print(); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PATH": os.environ["PATH"], **machine.env, "NEURON_RT_VISIBLE_CORES": "4-7", "NEURON_PROCESS_TAG": "a/0"},
    )
    try:
        assert holder.stdout is not None
        assert is_readable(holder.stdout, DEADLINE_S)
        places = Places(
            sys=machine.root / "sys", dev=machine.root / "dev", tools=str(machine.root / "opt/aws/neuron/bin")
        )
        facts = read_host_facts(places)
    finally:
        holder.kill()
        holder.communicate()

    assert facts.problems == ()
    assert (facts.instance_type, len(facts.devices), facts.versions.driver) == ("inf2.24xlarge", 6, DRIVER)
    assert [(process.pid, process.cores) for process in facts.processes] == [(holder.pid, (4, 5, 6, 7))]


def test_a_made_interpreter_has_the_project_and_the_packages(machine: Machine) -> None:
    """Without a path in its environment it imports Ray, the project and the stand-ins."""
    result = subprocess.run(
        [
            machine.python,
            "-c",
            "import neuron_double, workers.messages.replica_config, ray, sys; print(ray.__version__, sys.prefix)",
        ],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"]},
        check=True,
        cwd=machine.root,
    )

    assert result.stdout.split()[1] == str(machine.python.parent.parent)
