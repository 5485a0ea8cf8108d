"""Turns the latest line of a running `neuron-monitor` into metric families of this host's Neuron devices.

Names and labels are those of AWS's exporter, `neuron-monitor-prometheus.py`, so that its dashboards work.
"""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import IO

from workers.host.facts.neuron_monitor import CONFIG, INSTANCE_LABELS, MonitorSample, Runtime, parse_neuron_monitor
from workers.host.facts.reading import Places
from workers.host.facts.tools import find_tool
from workers.messages.metric_family import FamilyKind, MetricFamily, Point

log = logging.getLogger(__name__)

PERIOD = "5s"  # the tool's own default
STALE_S = 30.0  # older lines are not reported: no value is better than a wrong one
AGAIN_S = 30.0  # pause before a restart after the tool has exited
MOST_LINE = 1 << 20  # bytes
MEMORY = ("constants", "model_code", "model_shared_scratchpad", "runtime_memory", "tensors")
ECC = ("mem_corrected", "mem_uncorrected", "sram_corrected", "sram_uncorrected")
# The shell kills the tool when its standard input closes, hence when the process that started it dies.
WATCHED = '"$0" "$@" </dev/null & tool=$!; exec 1>&-; read -r _; kill -KILL "$tool"'


class DeviceMonitor:
    """Runs the tool from the first call on, if there are devices and the tool is installed. Thread-safe."""

    def __init__(self, places: Places | None = None) -> None:
        self._places = places or Places.of_this_host()
        self._lock = threading.Lock()  # guards the attributes below
        self._began = False
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._sample: tuple[float, MonitorSample] | None = None
        self._sums = Sums()

    def families(self) -> list[MetricFamily]:
        """Returns the families of the latest line; none before the first line, without the tool, or if it is stale."""
        with self._lock:
            if not self._began:
                self._began = True
                threading.Thread(target=self._keep_reading, name="neuron-monitor", daemon=True).start()
            if self._sample is None or time.monotonic() - self._sample[0] > STALE_S:
                return []
            return device_families(self._sample[1], self._sums)

    def close(self) -> None:
        """Ends the tool for good."""
        with self._lock:
            self._closed = True
            process = self._process
        if process is not None:
            _end(process)

    def _keep_reading(self) -> None:
        """Runs and restarts the tool, on a thread of its own."""
        if not any(self._places.dev.glob("neuron[0-9]*")):
            return
        path = find_tool("neuron-monitor", self._places.tools)
        if path is None:
            log.info("neuron-monitor is not installed: no device metrics")
            return
        with tempfile.NamedTemporaryFile("w", suffix=".json") as config:
            json.dump({**CONFIG, "period": PERIOD}, config)
            config.flush()
            while self._run([path, "-c", config.name]):
                time.sleep(AGAIN_S)

    def _run(self, command: list[str]) -> bool:
        """Reads until the tool exits. False: it must not be restarted."""
        with self._lock:
            if self._closed:
                return False
            try:
                self._process = subprocess.Popen(
                    ["/bin/sh", "-c", WATCHED, *command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                log.warning("neuron-monitor cannot be started: %s", error)
                return True
            process = self._process
        assert process.stdout is not None
        for line in _lines(process.stdout):
            sample = parse_neuron_monitor(line)
            with self._lock:
                self._sums.add(sample)
                self._sample = time.monotonic(), sample
        _end(process)
        with self._lock:
            if not self._closed:
                log.warning("neuron-monitor exited; restarting it in %.0f s", AGAIN_S)
            return not self._closed


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Yields lines as they arrive; skips overlong ones."""
    at_start = True
    while line := stream.readline(MOST_LINE):
        complete = line.endswith(b"\n")
        if at_start and complete:
            yield line
        at_start = complete


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)


class Sums:
    """Counters of errors and executions, summed over the periods of the tool's lines."""

    def __init__(self) -> None:
        self.errors: Counter[tuple[str, str]] = Counter()  # by runtime tag and kind
        self.executions: Counter[tuple[str, str]] = Counter()

    def add(self, sample: MonitorSample) -> None:
        """Adds one line. Drops processes that are gone: their tags may be pids, of which there is no end."""
        tags = {_tag(runtime) for runtime in sample.runtimes}
        for sums in (self.errors, self.executions):
            for key in [key for key in sums if key[0] not in tags]:
                del sums[key]
        for runtime in sample.runtimes:
            for sort, count in runtime.errors.items():
                self.errors[(_tag(runtime), sort)] += count
            for sort, count in runtime.executions.items():
                self.executions[(_tag(runtime), sort)] += count


def device_families(sample: MonitorSample, sums: Sums) -> list[MetricFamily]:
    """Returns the families of one line. A family without values has no series."""
    return list(_families(sample, sums))


def _families(sample: MonitorSample, sums: Sums) -> Iterable[MetricFamily]:
    instance = {"instance_type": sample.instance_type or "", **dict.fromkeys(INSTANCE_LABELS, ""), **sample.instance}

    def family(
        name: str, kind: FamilyKind, help: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]
    ) -> MetricFamily:
        points = tuple(Point((*instance.values(), *own), float(value)) for own, value in values)
        return MetricFamily(name=name, kind=kind, help=help, labels=(*instance, *labels), points=points)

    uses = [(_tag(runtime), use) for runtime in sample.runtimes for use in runtime.cores]
    yield family(
        "neuroncore_utilization_ratio",
        "gauge",
        "NeuronCore utilization ratio",
        ("runtime_tag", "neuroncore"),
        [((tag, str(use.core)), use.utilization / 100) for tag, use in uses if use.utilization is not None],
    )
    for sort in MEMORY:
        yield family(
            f"neuroncore_memory_usage_{sort}",
            "gauge",
            f"NeuronCore memory utilization for {sort}",
            ("runtime_tag", "memory_location", "neuroncore"),
            [((tag, "None", str(use.core)), use.memory[sort]) for tag, use in uses if sort in use.memory],
        )
    yield family(
        "neuron_runtime_memory_used_bytes",
        "gauge",
        "Runtime memory used bytes",
        ("runtime_tag", "memory_location"),
        [
            ((_tag(runtime), where), used)
            for runtime in sample.runtimes
            for where, used in (("host", runtime.host_bytes), ("neuron_device", runtime.device_bytes))
            if used is not None
        ],
    )
    errors = ("runtime_tag", "error_type")
    yield family("execution_errors", "counter", "Execution errors total", errors, sums.errors.items())
    outcomes = ("runtime_tag", "status_type")
    yield family("execution_status", "counter", "Execution status total", outcomes, sums.executions.items())
    yield family(
        "execution_latency_seconds",
        "gauge",
        "Execution latency in seconds",
        ("runtime_tag", "percentile"),
        [((_tag(runtime), p), seconds) for runtime in sample.runtimes for p, seconds in runtime.latency_s.items()],
    )
    yield family(
        "hardware_ecc_events",
        "counter",
        "Hardware ecc events total",
        ("event_type", "neuron_device_index"),
        [
            ((sort.replace("_", "_ecc_"), str(ecc.device)), count)
            for ecc in sample.ecc
            for sort in ECC
            if (count := getattr(ecc, sort)) is not None
        ],
    )
    for name, value in (("total", sample.memory_total_bytes), ("used", sample.memory_used_bytes)):
        values: list[tuple[tuple[str, ...], float]] = [] if value is None else [((), value)]
        yield family(f"system_memory_{name}_bytes", "gauge", f"System memory {name}_bytes bytes", (), values)
    if sample.device_count is not None:
        counts = (str(sample.device_count), str(sample.cores_per_device or ""))
        labels = ("neuron_device_count", "neuroncore_per_device_count")
        yield family("neuron_hardware_info", "gauge", "Neuron Hardware Information", labels, [(counts, 1)])
    if sample.device_memory_bytes is not None and sample.cores_per_device:
        # not in AWS's exporter; needed to compute how full a core's memory is
        help = "Memory of a Neuron device by its NeuronCores."
        share = sample.device_memory_bytes / sample.cores_per_device
        yield family("corewright_neuroncore_memory_total_bytes", "gauge", help, (), [((), share)])


def _tag(runtime: Runtime) -> str:
    return runtime.tag or str(runtime.pid)
