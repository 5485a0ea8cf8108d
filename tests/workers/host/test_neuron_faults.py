"""Faults recognized in messages and status codes of the Neuron runtime and compiler."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from placements.facts.known_failures import KNOWN_FAILURES
from workers.host import host_facts
from workers.host.neuron_faults import STATUS_NAMES, after_serving, explained, fault_of
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
    (STAMP + "NMGR:dlr_infer   Inference completed with err: 1006. mode->h_nn=1001", "out-of-bounds", "stop", "1006"),
    (STAMP + "NMGR:dlr_infer   Inference completed with err: 1002. mode->h_nn=1001", "runtime-failed", "retry", "1002"),
]

# (the issue or document, the text that it shows, the fault's id, its reaction, a part of its hint)
REPORTED = [
    (
        "aws-neuron/aws-neuron-sdk#1303",
        "[INTERNAL_ERROR] [NCC_IXCG856] MATCH_REPLACE8 Instruction expects at least 8 input elements per partition",
        "known-failure",
        "stop",
        "aws-neuron/aws-neuron-sdk#1303",
    ),
    (
        "aws-neuron/aws-neuron-sdk#1304",
        "ERROR LOWERING Traceback:\n[NCC_ITEN404] Internal tensorizer error: SimplifyNeuronTensor:idx i0: <class",
        "known-failure",
        "stop",
        "remove engine_options.prefix_cache (aws-neuron/aws-neuron-sdk#1304)",
    ),
    (
        "aws-neuron/aws-neuron-sdk#947",
        "[TEN404] Internal tensorizer error: NeuronValueNumbering:insertAtEnd()",
        "known-failure",
        "stop",
        "SDK 2.24 to 2.27",
    ),
    (
        "aws-neuron/aws-neuron-sdk#1365",
        "ERROR [job.WalrusDriver.0]: Backend exited with code -6 and stderr:\nwalrus_driver: Hwm.cpp:325: "
        'virtual int64_t bir::Hwm::getLatency(const bir::InstRangeSelect&) const: Assertion `false && "getLatency( '
        "const InstRangeSelect & ) not implemented\"' failed.",
        "known-failure",
        "stop",
        "SDK 2.28",
    ),
    (
        "aws-neuron/aws-neuron-sdk#1000",
        "ERROR 3808 [job.WalrusDriver.0]: Backend exited with code -6 and stderr: No existing axis k2 found",
        "compiler-crashed",
        "stop",
        "another release",
    ),
    (
        "aws-neuron/aws-neuron-sdk#751",
        'The neuronx-cc (neuron compiler) crashed (SEGFAULT)."',
        "compiler-crashed",
        "stop",
        "another release",
    ),
    (
        "aws-neuron/aws-neuron-sdk#1369",
        'RuntimeError: neuronx-cc compilation failed with 70. Check compiler logs.\nERROR   File ".../neuron_parallel_'
        'state.py", line 1318, in tp_barrier\nERROR RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed',
        "known-failure",
        "retry",
        "start it again",
    ),
    (
        "vllm-project/vllm#11189",
        "Failed compilation with ['neuronx-cc', 'compile', '--target=trn1']: 2024-12-14T00:55:07Z [XCG863] (uint32<1 x "
        "8> $13494:13494)0: ISA check failed - Please open a support ticket",
        "known-failure",
        "stop",
        "vllm-project/vllm#11189",
    ),
    (
        "aws-neuron/aws-neuron-samples#40",
        "Failed compilation with ['neuronx-cc', '--target=trn1', 'compile', '--verbose=35']: 2023-09-19T09:36:54Z Too "
        "many instructions after unroll for function sg0000 !",
        "graph-exceeds-instructions",
        "stop",
        "raise tp_degree",
    ),
    (
        "aws-neuron/aws-neuron-sdk#819",
        "[LUR015]  Compiler generated too many instructions (6888787).",
        "graph-exceeds-instructions",
        "stop",
        "raise tp_degree",
    ),
    (
        "aws-neuron/aws-neuron-sdk:compiler/error-codes/EOOM001.rst",
        "[NCC_EOOM001] The combined memory needed for the model tensors exceeds the high-bandwidth memory limit.",
        "graph-exceeds-hbm",
        "stop",
        "max_batch",
    ),
    (
        "philschmid/huggingface-inferentia2-samples#12",
        "[XCG815]  Estimated peak HBM usage (19.000523) exceeds 16GB. Neff won't be able to load on chip",
        "graph-exceeds-hbm",
        "stop",
        "max_batch",
    ),
    (
        "aws-neuron/aws-neuron-sdk#749",
        "Failed compilation with ['neuronx-cc', '--target=trn1', 'compile', '--verbose=35']: something new",
        "compiler-failed",
        "stop",
        "optlevel",
    ),
    (
        "huggingface/optimum-neuron#698",
        "/usr/local/lib/python3.10/dist-packages/neuronxcc/starfish/bin/walrus_driver: error while loading shared "
        "libraries: libxml2.so.2: cannot open shared object file: No such file or directory",
        "environment-incomplete",
        "stop",
        "PATH",
    ),
    (
        "aws-neuron/aws-neuron-sdk#737",
        "RuntimeError: neuronx-cc compiler binary does not exist",
        "environment-incomplete",
        "stop",
        "PATH",
    ),
    (
        "aws-neuron/aws-neuron-samples#69",
        "FileNotFoundError: [Errno 2] No such file or directory: 'libneuronpjrt-path'",
        "environment-incomplete",
        "stop",
        "libneuronxla",
    ),
    (
        "aws-neuron/aws-neuron-sdk#1222",
        "the process that compiled m ended with exit code -9",
        "compiler-killed",
        "retry",
        "more memory",
    ),
    (
        "aws-neuron/aws-neuron-sdk#287",
        "A process in the process pool was terminated abruptly while the future was running or pending.",
        "compiler-killed",
        "retry",
        "more memory",
    ),
    (
        "aws-neuron/aws-neuron-sdk#1306",
        "NRT:nrt_infodump   Failure: NRT_EXEC_OOB in nrt_execute()",
        "out-of-bounds",
        "stop",
        "NEURON_RT_DBG_DUMP_INPUTS_ON_ERR",
    ),
    (
        "aws-neuron/aws-neuron-sdk#351",
        'Execute failed: nrt_execute: status=1004, error message="Execution was completed with other errors".',
        "execution-failed",
        "elsewhere",
        "log",
    ),
    (
        "aws-neuron/aws-neuron-sdk#1338",
        "ERROR   NRT:nrt_allocate_neuron_cores   NeuronCore(s) not available - Requested:1 Available:0",
        "cores-taken",
        "elsewhere",
        "the driver keeps them for a dead",
    ),
    (
        "aws-neuron/aws-neuron-sdk#1189",
        "NRT:nrt_infodump   Failure: NRT_INVALID in nrt_load()",
        "neff-invalid",
        "stop",
        "compiled again",
    ),
    (
        "aws-neuron/aws-neuron-sdk:neuron-runtime/api/nrt_status.rst",
        "RuntimeError: nrt_load_collectives status=2",
        "neff-invalid",
        "stop",
        "compiled again",
    ),
    (
        "aws-neuron/aws-neuron-sdk#713",
        "[18] bootstrap.cc:106 CCOM WARN Call to accept failed : Too many open files\n"
        "RX, connection closed by remote peer",
        "open-files-exhausted",
        "stop",
        "ulimit -n 65536",
    ),
    (
        "aws-neuron/aws-neuron-sdk#718",
        "RuntimeError: The PyTorch Neuron Runtime could not be initialized. Neuron Driver issues are logged",
        "runtime-not-started",
        "elsewhere",
        "dmesg",
    ),
    (
        "aws-neuron/aws-neuron-samples#44",
        "RuntimeError: Neuron runtime cannot be initialized; cannot determine the number of available NeuronCores",
        "runtime-not-started",
        "elsewhere",
        "neuron-ls",
    ),
    (
        "aws-solutions-library-samples/guidance-for-machine-learning-inference-on-aws#2",
        "ERROR NRT:nrt_init  Unable to determine Neuron Driver version. Please check aws-neuron-dkms.",
        "no-devices",
        "stop",
        "lsmod",
    ),
    (
        "aws-neuron/aws-neuron-sdk:neuron-runtime/faq.rst",
        "ERROR NRT:nrt_init This runtime requires Neuron Driver version 2.0 or greater. Please upgrade the",
        "known-failure",
        "stop",
        "update aws-neuronx-dkms",
    ),
]


@pytest.mark.parametrize(("source", "text", "id", "reaction", "hint"), REPORTED, ids=[each[0] for each in REPORTED])
def test_what_others_have_reported_is_recognized(source: str, text: str, id: str, reaction: str, hint: str) -> None:
    """A generic match of its code is not enough: the hint is that of this failure."""
    fault = fault_of(RuntimeError("boom"), ["loading", *text.splitlines()])
    assert fault is not None
    assert (fault.id, fault.reaction) == (id, Reaction(reaction))
    assert hint in fault.hint


def test_every_text_of_a_known_failure_matches_a_report() -> None:
    """Each text of the table matches the text of a report."""
    texts = {row.text for row in KNOWN_FAILURES if row.text}
    assert {text for text in texts if any(re.search(text, each[1]) for each in REPORTED)} == texts


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
    1004: "execution-failed",
    1006: "out-of-bounds",
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


def test_an_unknown_failure_of_a_compilation_stops_with_its_last_lines(tmp_path: Path) -> None:
    """It would fail again. The compiler's output is the cause, or in the log; a full disk may be freed."""
    failure = Failure("compile-failed", "compiling m ended with exit code 3", "its output is in /c.log")
    error = RuntimeError("compile-failed")
    output, log = "\n".join(["INFO compiling", *(f"line {i}" for i in range(9)), "  "]), tmp_path / "m.log"
    log.write_text(output)
    last = "compiling m ended with exit code 3; its last lines: line 4; line 5; line 6; line 7; line 8"
    expected = Failure("compile-failed", last, failure.hint, Reaction.STOP)
    assert explained(failure, error, str(log)) == expected
    log.write_text("the compilers write elsewhere")
    error.__cause__ = RuntimeError(output)
    assert explained(failure, error, str(log)) == expected
    error.__cause__ = OSError(28, "No space left on device")
    assert explained(failure, error, str(log)) == failure


def test_an_engines_own_text_of_a_fault_keeps_the_faults_reaction() -> None:
    """The engine added the bucket to the text in another process."""
    own = Failure("graph-exceeds-hbm", "the bucket of 512 tokens is not compiled")
    assert explained(own, RuntimeError("boom"), "").reaction is Reaction.STOP


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
