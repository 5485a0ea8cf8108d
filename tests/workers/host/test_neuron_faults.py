"""Faults recognized in messages and status codes of the Neuron runtime and compiler."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from workers.host import host_facts
from workers.host.neuron_faults import STATUS_NAMES, after_serving, fault_of
from workers.messages.status import Failure, Reaction

STAMP = "2023-Jan-09 20:27:41.0593 15042:15042 ERROR  "
MODULE = "/var/tmp/neuron-compile-cache/neuronxcc-2.8.0.25+a3ad0f342/MODULE_12486829708343293975+d41d8cd9"

# (a line as AWS's guides or users show it, the fault's id, its reaction, a part of its text)
LINES = [
    (
        STAMP + "NRT:nrt_allocate_neuron_cores   NeuronCore(s) not available - Requested:nc4-nc7 Available:3",
        "cores-taken",
        Reaction.ELSEWHERE,
        "nc4-nc7 were requested, 3 of them",
    ),
    (STAMP + "NRT:nrt_allocate_neuron_cores   Neuron cores are not contiguous", "visible-cores-refused", "stop", ""),
    (STAMP + "TDRV:tdrv_init_mla_phase1   Could not open the nd12", "device-missing", "quarantine", "device 12"),
    (STAMP + "TDRV:tdrv_get_dev_info   No neuron device available", "no-devices", "stop", ""),
    (STAMP + "TDRV:db_vtpb_get_mla_and_tpb   Could not find VNC id 2", "neff-wants-cores", "stop", "core 2"),
    (
        "nrt_load_collectives Unsupported topology. Supported number of Neuron Cores is 1, 2, 8, 16 or a multiple of 32"
        "\nnrt_load_collectives status=4",
        "topology-refused",
        "stop",
        "1, 2, 8, 16 or a multiple of 32",
    ),
    ("NEFF version mismatch supported: 1.1 received: 2.0", "neff-unsupported", "stop", "version 2.0, and 1.1 is"),
    (
        STAMP + "TDRV:translate_one_pseudo_instr_v2   Unsupported hardware operator code 214 found in neff.",
        "neff-unsupported",
        "stop",
        "code 214",
    ),
    ("NRT:nrt_load   status=2: compiled for trn2 with lnc 1", "lnc-differs", "stop", "trn2 with lnc 1"),
    ("NEFF was built for LNC 2, which does not match the device's 1", "lnc-differs", "stop", "LNC 2"),
    (
        f"INFO ||NCC_WRAPPER||: Got a cached failed neff at {MODULE}/model.neff. Will skip compilation",
        "compile-cached-failure",
        "stop",
        f"{MODULE}/model.neff",
    ),
    ("RuntimeError: neuronx-cc failed with -9", "compiler-killed", "retry", "memory"),
    ("[F137] neuronx-cc was forcibly killed - This most commonly occurs due to ...", "compiler-killed", "retry", ""),
    ("Compilation of neuronx-cc died with <Signals.SIGKILL: 9>", "compiler-killed", "retry", ""),
    ("INFO:Neuron:Compile command returned: -9", "compiler-killed", "retry", "memory"),
    ("neuronx-cc was killed by signal 9", "compiler-killed", "retry", "memory"),
    ("RuntimeError: neuronx-cc failed with -15", "compiler-killed", "retry", "from outside (-15)"),
    ("Compilation of neuronx-cc died with <Signals.SIGINT: 2>", "compiler-killed", "retry", "from outside"),
    ("RuntimeError: neuronx-cc failed with 9", "compiler-failed", "stop", "(9)"),
    ("RuntimeError: neuronx-cc failed with -11", "compiler-failed", "stop", "(-11)"),
    (
        f"[ERROR]: Got a cached failed neff at {MODULE}/model.neff.\nWill skip compilation, please set "
        "--retry_failed_compilation\n[F137] neuronx-cc was forcibly killed",
        "compile-cached-failure",
        "stop",
        MODULE,
    ),
    (STAMP + "NRT:nrt_infodump   Failure: NRT_EXEC_NC_BUSY in nrt_execute()", "cores-taken", "elsewhere", "NC_BUSY"),
    ("RuntimeError: neuronx-cc failed with 70", "compiler-failed", "stop", "70"),
    ("[ERROR] [NCC_EVRF029] Operation sort is not supported", "compiler-failed", "stop", "NCC_EVRF029"),
    (
        STAMP + "TDRV:log_dev_mem  Failed to allocate 13.500MB (alignment: none, usage: tensors) on ND 0:NC 0",
        "hbm-exhausted",
        "stop",
        "13.500MB",
    ),
    (
        "neuron:mc_alloc: device mempool [0:0] total 1073741568 occupied 960539030 needed 1272 available 768",
        "hbm-exhausted",
        "stop",
        "1272 bytes, 768 are free",
    ),
    ("nrt_tensor_allocate status=4", "hbm-exhausted", "stop", ""),
    ("nrt_load_collectives status=4", "hbm-exhausted", "stop", "join the cores into one group"),
    (
        "nrt_load_collectives status=4\nneuron:mc_alloc: device mempool [0:0] total 10 needed 1272 available 768",
        "hbm-exhausted",
        "stop",
        "1272 bytes, 768 are free",
    ),
    (
        "(FATAL-RT-UNDEFINED-STATE) [ND 3][NC 1] Uncorrectable memory error is detected, metadata: 0x16. Please "
        "terminate or stop/start this instance to prevent future impact from the hardware error.",
        "memory-uncorrectable",
        "quarantine",
        "(device 3)",
    ),
    (
        "(FATAL-RT-UNDEFINED-STATE) Uncorrectable HBM memory error is detected. Execution results may be invalid. "
        "Please reload the neuron driver or reboot your EC2 instance to prevent future impact from the hardware error.",
        "memory-repairable",
        "quarantine",
        "repaired",
    ),
    ("[MLA 4][NC 0] DMA TX engine 0 is in an abort state", "device-failed", "quarantine", "DMA TX engine 0"),
    (
        "(FATAL-RT-UNDEFINED-STATE) missing collectives status on Neuron Device 2 NC 0, model 0 - suspected hang",
        "collectives-hung",
        "quarantine",
        "",
    ),
    (
        "(FATAL-RT-UNDEFINED-STATE) execution timeout (30000 ms) on Neuron Device 0 NC 0, model x.neff, waiting for",
        "execution-timeout",
        "retry",
        "(30000 ms)",
    ),
    ("Error notifications found on NC .... INFER_ERROR_SUBTYPE_NUMERICAL", "numerical-error", "retry", "NUMERICAL"),
    (STAMP + "NRT:nrt_infodump   Failure: NRT_EXEC_SW_NQ_OVERFLOW in nrt_execute()", "notifications-lost", "retry", ""),
    (
        "NCCL init error: Error opening libnccom.so, cannot use collective operations! Please set LD_LIBRARY_PATH",
        "collectives-missing",
        "stop",
        "libnccom.so",
    ),
    ("RX, connection closed by remote peer", "collectives-failed", "retry", ""),
    (STAMP + "NMGR:dlr_infer   Inference completed with err: 1006. mode->h_nn=1001", "runtime-failed", "retry", "1006"),
]


@pytest.mark.parametrize(("line", "id", "reaction", "detail"), LINES, ids=[f"{i}-{x[1]}" for i, x in enumerate(LINES)])
def test_a_message_gives_its_fault_with_its_numbers(line: str, id: str, reaction: str, detail: str) -> None:
    """Also where a library wrote the message to the log."""
    fault = fault_of(RuntimeError(f"boom\n{line}\n"))
    assert fault is not None
    assert (fault.id, fault.reaction) == (id, Reaction(reaction))
    assert detail in fault.what
    assert fault.hint
    assert fault_of(RuntimeError("boom"), ["loading", *line.splitlines()]) == fault


STATUSES = {
    4: "hbm-exhausted",
    5: "execution-timeout",
    6: "device-failed",
    9: "neff-wants-cores",
    10: "neff-unsupported",
    11: "out-of-memory",
    101: "device-failed",
    1003: "numerical-error",
    1005: "cores-taken",
    1100: "collectives-failed",
    1200: "collectives-hung",
    1201: "memory-uncorrectable",
    1202: "memory-uncorrectable",
    1203: "device-failed",
    1204: "notifications-lost",
    1205: "memory-repairable",
    1206: "collectives-failed",
}


@pytest.mark.parametrize("code", STATUS_NAMES)
def test_every_status_of_the_runtime_gives_a_fault(code: int) -> None:
    """A status without a known cause is reported by its number and name."""
    fault = fault_of(RuntimeError(f"nrt_execute status={code} message='...'"))
    assert fault is not None
    assert fault.id == STATUSES.get(code, "runtime-failed")
    if fault.id == "runtime-failed":
        assert f"{code} ({STATUS_NAMES[code]})" in fault.what
    suspected = code in (6, 101, 1200, 1201, 1202, 1203, 1205)
    assert (fault.reaction is Reaction.QUARANTINE) == suspected


@pytest.mark.parametrize(
    "text",
    [
        "KeyError: 'status'",
        "HTTP status=404 of a request",
        "compiled 9 graphs with neuronx-cc in 137 s",
        "config.json has no hidden_size",
        "nrt_execute status=0",
        "the replica was killed by signal 9",
        "",
    ],
)
def test_other_failures_are_not_faults_of_the_runtime(text: str) -> None:
    """Numbers after common words such as "status" are not its codes."""
    assert fault_of(RuntimeError(text), ["INFO loading weights, status: 5 of 12 files"]) is None


def test_the_cause_of_an_error_counts_as_the_error() -> None:
    """The error of a framework often has no details; its cause has them."""
    try:
        try:
            raise RuntimeError("nrt_execute status=1201")
        except RuntimeError as cause:
            raise ValueError("the forward pass failed") from cause
    except ValueError as error:
        fault = fault_of(error)
    assert fault is not None
    assert fault.id == "memory-uncorrectable"


def test_a_message_takes_precedence_over_a_status() -> None:
    """Bad memory ends executions with the status of a timeout."""
    log = [
        "(FATAL-RT-UNDEFINED-STATE) [ND 7][NC 0] Uncorrectable memory error is detected, metadata: 0x16.",
        "(FATAL-RT-UNDEFINED-STATE) execution timeout (30000 ms) on Neuron Device 6 NC 0, model x.neff",
    ]
    fault = fault_of(RuntimeError("nrt_execute status=5"), log)
    assert fault is not None
    assert (fault.id, fault.devices) == ("memory-uncorrectable", (6, 7))


def test_the_devices_of_a_fault_are_those_that_its_lines_name() -> None:
    """Without such lines the devices are unknown."""
    named = fault_of(RuntimeError("[MLA 4][NC 0] DMA RX engine 1 is in an abort state"), ["[ND 2][NC 0] fine so far"])
    assert named is not None
    assert named.devices == (4,)
    unnamed = fault_of(RuntimeError("nrt_execute status=1203"))
    assert unnamed is not None
    assert unnamed.devices == ()


def test_a_replica_that_has_served_is_retried_instead_of_stopped() -> None:
    """Its model fits, since it once ran. A broken device stays quarantined."""
    full = Failure("hbm-exhausted", "full", reaction=Reaction.STOP)
    broken = Failure("device-failed", "dead", reaction=Reaction.QUARANTINE)
    assert after_serving(full).reaction is Reaction.RETRY
    assert after_serving(broken) == broken


def test_a_long_output_is_searched_within_seconds() -> None:
    """The output of a failed compiler may have megabytes; no pattern backtracks over it."""
    line = "neuron nrt_x compiled core lnc neuronx-cc exit status error code " * 40
    began = time.monotonic()
    fault_of(RuntimeError(f"{line}\n" * 2000), [line] * 400)
    assert time.monotonic() - began < 5.0


def test_last_words_begin_at_the_start_of_the_process_or_when_it_was_ready(tmp_path: Path) -> None:
    """A log outlives the process; lines of an earlier process do not count."""
    log = tmp_path / "m-0.log"
    log.write_text("nrt_execute status=1201\n")
    with log.open("ab") as file:
        host_facts.mark_log(file.fileno())
    assert host_facts.last_words(log) == []
    with log.open("a") as more:
        more.write("loading\n")
    assert host_facts.last_words(log) == ["loading"]
    assert host_facts.log_tail(log, 5) == ["nrt_execute status=1201", "loading"]
    assert host_facts.last_words(tmp_path / "none.log") == []
