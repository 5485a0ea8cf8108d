"""The measurements of `corewright verify`, part by part. Each yields verdicts on claims of `claims.CLAIMS`."""

from __future__ import annotations

import contextlib
import os
import resource
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median

import psutil

from orchestrator.control.resolve.spec_file import SpecFile
from orchestrator.process.failure import Failed
from orchestrator.process.speed_record import SpeedRecord
from orchestrator.verify.answers import ask, prompt
from orchestrator.verify.claims import Verdict, not_run, proved
from orchestrator.verify.judging import (
    first_difference,
    held_up,
    paces,
    pinned,
    step_s,
)
from orchestrator.verify.stand import MAX_CLAIM_S, Placed, Stand
from orchestrator.verify.trials import BUCKETS, TOKENS, Extent, degrees, is_here
from placements.engines.memory import GIB
from placements.engines.registry import capabilities
from placements.facts.cpu_layout import LAYOUTS
from placements.facts.topology import TOPOLOGIES, Host
from placements.resources.calibration import shape_of
from placements.resources.environ import cpu_list
from placements.resources.estimate import LOAD_BYTES_S, speed
from placements.resources.measured_times import LEAST_REQUESTS, LEAST_TOKENS, PACE, Times, length_class, note, speeds_of
from placements.resources.memory import estimate
from placements.spec.problems import Problem
from workers.artifacts.sources.listing import Stopped
from workers.compiled import preparation
from workers.compiled.host_sets import compiles
from workers.host.facts.machine import HostFacts
from workers.host.facts.reading import read_host_facts
from workers.host.host_facts import parse_cpulist
from workers.host.neuron_faults import VAGUE
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure, Reaction

MIN_OPEN_FILES = 65_536  # the hard limit that AWS sets (Neuron SDK docs, nxd-training/training-troubleshooting.rst)
MAX_FREE_S = 2.0  # from SIGKILL to a successful claim: the replica's second attempt comes 1 s after the first
MIN_HOST_MEMORY = 0.95  # of the instance type's, the rest is the kernel's
READ_BYTES = 256 * 2**20  # of the disk; written first
KILL_AFTER_S = 3.0  # of a compile
WEIGHTS = (".safetensors", ".bin")  # shards of cores, which no engine checks


# Facts


def facts(
    problems: Sequence[Problem], readings: HostFacts, host: Host, folder: Path, record: SpeedRecord
) -> Iterator[Verdict]:
    """Judges what `doctor` reads about this machine, its limits, and the rate of the disk of ``folder``, which it
    records for later plans."""
    errors = [problem for problem in problems if problem.severity == "error"]
    finding = "; ".join(f"{problem.id}: {problem.what}" for problem in problems) or "no problems"
    yield proved("doctor", not errors, finding)
    topology = TOPOLOGIES.get(readings.instance_type or "")
    if host.emulated or topology is None:
        why = "the host is emulated" if host.emulated else f"the instance type {readings.instance_type} is not known"
        yield from (not_run(claim, why) for claim in ("devices", "host-memory", "cpu-layout"))
    else:
        here = f"{len(readings.devices)} devices, {len(readings.cores)} cores"
        wanted = host.topology if host.topology and host.topology.instance == topology.instance else topology
        holds = (len(readings.devices), len(readings.cores)) == (wanted.devices, wanted.cores)
        yield proved("devices", holds, f"{here}; {wanted.instance} has {wanted.devices} devices, {wanted.cores} cores")
        gib = psutil.virtual_memory().total / 2**30
        finding = f"{gib:.0f} GiB of {topology.memory_gib}"
        yield proved("host-memory", gib >= MIN_HOST_MEMORY * topology.memory_gib, finding, gib=round(gib, 1))
        yield _cpu_layout(host, topology.instance)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    unlimited = files == resource.RLIM_INFINITY
    yield proved("open-files", unlimited or files >= MIN_OPEN_FILES, f"the hard limit is {files}", limit=files)
    rate = read_rate(folder)
    record.add_constants(host.machine, "", {"read_bytes_s": round(rate)}, time.time())
    finding = f"{rate / 1e9:.2f} GB/s, `plan` assumes {LOAD_BYTES_S / 1e9:.2f}"
    yield proved("disk-rate", rate >= LOAD_BYTES_S, finding, bytes_s=round(rate))


def _cpu_layout(host: Host, instance: str) -> Verdict:
    published, own = LAYOUTS.get(instance), host.layout
    if published is None or own is None:
        return not_run("cpu-layout", f"AWS publishes none for {instance}" if own else "the kernel lists no layout")
    finding = f"{len(own.cores)} cores on {len(set(own.nodes))} nodes"
    return proved("cpu-layout", (own.cores, own.nodes) == (published.cores, published.nodes), finding)


def read_rate(folder: Path) -> float:
    """Returns the bytes per second at which a new file of ``folder`` is read from the disk, not from the page cache."""
    with tempfile.TemporaryFile(dir=folder) as file:
        block = os.urandom(2**20)
        for _ in range(READ_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        began = time.monotonic()
        while file.read(2**23):
            pass
        return READ_BYTES / (time.monotonic() - began)


# Runtime


def runtime(stand: Stand, extent: Extent) -> Iterator[Verdict]:
    """Claims cores, alone and twice, measures when those of a killed process are free, and loads each degree."""
    config = stand.placed("base").config
    if not config.place.cores:
        why = f"the engine {stand.engine} takes no cores here"
        yield from (not_run(claim, why) for claim in ("claim", "double-claim", "claim-after-kill", "degrees"))
        return
    with stand.claiming(config) as first:
        claimed = first.result()
        texts = "; ".join(refusal.text for refusal in first.refusals)
        yield proved("claim", claimed is not None, texts or f"cores {_cores(config)}")
        if claimed is None:
            return
        with stand.claiming(config) as second:
            refusal = second.refused()
        text = "the claim succeeded" if refusal is None else f"{refusal.fault or 'not recognized'}: {refusal.text}"
        yield proved("double-claim", refusal is not None and refusal.fault == "cores-taken", text)
    yield _after_kill(stand, config, extent.kills)
    yield from degrees_at_their_starts(stand)


def degrees_at_their_starts(stand: Stand) -> Iterator[Verdict]:
    """Loads a model of each degree on each of its starts; its first answer takes a collective of its cores."""
    trials = [trial for trial in stand.trials.values() if trial.name.startswith("degree-")]
    for trial in trials:
        run = stand.run(trial.name, [[ask("a", prompt(9), 4)]])
        yield proved("degrees", not run.trouble, run.trouble or f"loaded in {run.load_s:.1f} s", trial.subject)
    topology, tried = stand.placed("base").host.topology, {len(trial.cores or ()) for trial in trials}
    for tp in degrees(topology) if topology and trials else ():
        if tp not in tried:
            yield not_run("degrees", "it has no free cores", f"tp {tp}")


def _after_kill(stand: Stand, config: ReplicaConfig, count: int) -> Verdict:
    """Kills a process that holds cores ``count`` times, while another one tries to claim them."""
    delays: list[float] = []
    with contextlib.ExitStack() as held:
        holder = held.enter_context(stand.claiming(config, MAX_CLAIM_S))
        if holder.result() is None:
            return proved("claim-after-kill", False, f"cores {_cores(config)} cannot be claimed")
        for _ in range(count):
            following = held.enter_context(stand.claiming(config, MAX_CLAIM_S))
            following.refused()
            at = holder.kill()
            claimed = following.result()
            if claimed is None:
                finding = f"still refused {MAX_CLAIM_S:.0f} s after kill {len(delays) + 1}: {following.refusals}"
                return proved("claim-after-kill", False, finding)
            delays.append(claimed.at - at)
            holder = following
    finding = f"median {median(delays):.2f} s, longest {max(delays):.2f} s of {count}"
    longest = round(max(delays), 3)
    return proved("claim-after-kill", longest <= MAX_FREE_S, finding, median_s=round(median(delays), 3), max_s=longest)


# Compiler and faults


def compiler(stand: Stand) -> Iterator[Verdict]:
    """Kills a compile, damages its result, and starts another one with options that no compiler accepts."""
    placed = stand.placed("compiled")
    if not compiles(placed.config):
        why = f"the engine {stand.engine} compiles nothing here"
        yield from (not_run(claim, why) for claim in ("compile-killed", "damaged-artifact", "compile-failed"))
        return
    with tempfile.TemporaryDirectory(dir=stand.folder) as folder:
        fresh = placed.at(folder)
        yield _killed_compile(stand, fresh)
        yield _damaged(stand, fresh, Path(folder))
    yield _failing_compile(stand)


def _failing_compile(stand: Stand) -> Verdict:
    """Compiles with an option that neuronx-cc does not have, and with a C++ compiler that fails."""
    ability, placed = capabilities(stand.engine), stand.placed("miscompiled")
    if ability.runs_on == "neuron" and "compiler" not in stand.trials["miscompiled"].fields:
        return not_run("compile-failed", f"the engine {stand.engine} takes no options of the compiler")
    with tempfile.TemporaryDirectory(dir=stand.folder) as folder:
        failure = stand.compiled(placed.at(folder, {**placed.config.place.env, "CXX": "false"}).config)
    if failure is None:
        return proved("compile-failed", False, "the compile succeeded with options that no compiler has")
    finding = f"{failure.id}, reaction {failure.reaction.value}: {failure.what}"
    return proved("compile-failed", failure.reaction is Reaction.STOP, finding)


def _killed_compile(stand: Stand, placed: Placed) -> Verdict:
    """Kills a compile after a while, checks what a start would find, and compiles to the end."""
    stop, began = threading.Event(), time.monotonic()
    timer = threading.Timer(KILL_AFTER_S, stop.set)
    timer.start()
    try:
        stand.compiled(placed.config, stop)
        return not_run("compile-killed", f"the compile ended in {time.monotonic() - began:.1f} s, before it was killed")
    except Stopped:
        left = preparation.verify(placed.config)
    finally:
        timer.cancel()
        timer.join()
    if isinstance(left, Failure):
        return proved("compile-killed", False, str(left))
    complete = [each.key for each in left if each.complete]
    began = time.monotonic()
    failure = stand.compiled(placed.config)
    after = preparation.verify(placed.config)
    built = failure is None and not isinstance(after, Failure) and all(each.complete for each in after)
    finding = (
        f"accepted as complete: {', '.join(complete) or 'nothing'}; compiled again in {time.monotonic() - began:.1f} s"
    )
    return proved("compile-killed", built and not complete, finding if built else str(failure or after))


def _damaged(stand: Stand, placed: Placed, folder: Path) -> Verdict:
    """Overwrites the middle of the largest compiled file that holds no weights, and loads it in a replica."""
    sound = stand.run(placed, [[ask("a", prompt(9))]])
    files = sorted(
        (file for file in folder.rglob("*") if file.is_file() and file.suffix not in WEIGHTS),
        key=lambda file: file.stat().st_size,
    )
    if sound.trouble or not files:
        return not_run("damaged-artifact", sound.trouble or "it has no files")
    size = files[-1].stat().st_size
    with files[-1].open("r+b") as file:
        file.seek(size // 3)
        file.write(bytes(size // 3))
    run = stand.run(placed, [[ask("a", prompt(9))]])
    if run.trouble:
        return proved("damaged-artifact", run.failure is not None and run.failure.id not in VAGUE, run.trouble)
    differs = first_difference(sound.answers["a"].token_ids, run.answers["a"].token_ids)
    return proved("damaged-artifact", not differs, f"the answer differs at {differs}" if differs else "compiled again")


def faults(stand: Stand) -> Iterator[Verdict]:
    """Loads a model that does not fit, and lists what failed in all parts without being recognized."""
    run = stand.run("too-large", [[ask("a", prompt(9))]])
    room = psutil.virtual_memory().total / GIB
    if run.failure is None and stand.placed("too-large").needs_gib < room:
        yield not_run("too-large", f"this host has room for it: it has {room:.0f} GiB of memory")
    else:
        refused = run.failure is not None and run.failure.id not in VAGUE
        yield proved("too-large", refused, run.trouble or "it was loaded, and has answered")
    unknown = sorted({f"{failure.id}: {failure.what}" for failure in stand.failures if failure.id in VAGUE})
    yield proved("texts-known", not unknown, "; ".join(unknown) or f"{len(stand.failures)} failures", texts=unknown)


# Memory


def memory(stand: Stand, record: SpeedRecord) -> Iterator[Verdict]:
    """Compares the memory of a replica with its estimate: on the host, and on the device by neuron-monitor. Records the
    excess for later plans."""
    used = Counter[str]()  # bytes by class on all cores

    def read(pid: int) -> None:
        below = {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
        for each in read_host_facts().runtimes:
            if each.pid in below:
                for core in each.cores:
                    used.update(core.memory)

    run = stand.run("base", [[ask(str(i), prompt(60, seed=i), 60) for i in range(4)]], during=read)
    if run.trouble or (placed := stand.placed("base")).checkpoint is None:
        yield proved("host-estimate", False, run.trouble or "its checkpoint cannot be read")
        return
    model, engine, allowed = placed.model, placed.config.model.engine, placed.needs_gib
    surplus = {"host_gib": round(max(0.0, run.peak_gib - allowed), 3)}
    record.add_constants(placed.host.machine, engine, surplus, time.time())
    finding = f"{run.peak_gib:.2f} GiB, `plan` estimates {allowed:.2f}"
    yield proved("host-estimate", run.peak_gib <= allowed, finding, gib=round(run.peak_gib, 3))
    if not used.total():
        yield not_run("hbm-estimate", "neuron-monitor reports no memory of the process")
        return
    need = estimate(model, placed.checkpoint, engine)
    planned = need.total + need.others * (model.tp_degree - 1)
    measured = used.total() / GIB
    overhead = (measured - (planned - model.tp_degree * (need.scratch + need.runtime))) / model.tp_degree
    surplus = {"hbm_gib": round(max(0.0, measured - planned) / model.tp_degree, 3)}
    record.add_constants(placed.host.machine, engine, surplus, time.time())
    finding = f"{measured:.2f} GiB on all cores, estimated {planned:.2f}; hbm_overhead_gib: {max(0.0, overhead):.2f}"
    classes = {name: round(size / GIB, 4) for name, size in sorted(used.items())}
    gib, overhead_gib, holds = round(measured, 3), round(overhead, 3), measured <= planned
    yield proved("hbm-estimate", holds, finding, gib=gib, overhead_gib=overhead_gib, gib_by_class=classes)


# The spec's own models


def speeds(stand: Stand, file: SpecFile, record: SpeedRecord, now: float) -> Iterator[Verdict]:
    """Measures each model of the user's spec on its own cores, and records its times for later plans."""
    for model in () if file.spec is None else file.spec.models:
        try:
            placed = stand.place(file, model.name)
        except Failed as failed:
            yield not_run("speeds", str(failed), model.name)
            continue
        if model.kind != "generate" or capabilities(placed.config.model.engine).forwards:
            yield not_run("speeds", "only models that generate", model.name)
            continue
        if not is_here(placed.host, file.machine):
            yield not_run("speeds", f"the place of the model is {placed.host.name}, another machine", model.name)
            continue
        longest = max(LEAST_TOKENS, placed.config.max_len - TOKENS)
        lengths = sorted({max(1, longest // part) for part in (16, 4, 2)})
        ids = [(f"{length} {i}", length) for length in lengths for i in range(LEAST_REQUESTS // 2)]
        run = stand.run(placed, [[ask(id, prompt(length, seed=i))] for i, (id, length) in enumerate(ids)])
        if run.failure is not None and run.failure.id == "cores-taken":
            yield not_run("speeds", run.trouble, model.name)
            continue
        if run.trouble or run.silent():
            yield proved("speeds", False, run.trouble or run.silent(), model.name)
            continue
        times: Times = {}
        for id, length in ids:
            note(times, length_class(length), run.answers[id].at[0])
            note(times, PACE, fmean(paces(run.answers[id])))
        engine = placed.config.model.engine
        record.add(shape_of(model, placed.checkpoint, engine, placed.hosts), times, now)
        guess = speed(model, placed.checkpoint, engine, placed.host.topology)
        measured = speeds_of(times)[0].get("step_ms", 0.0)
        finding = f"a step takes {measured:.2f} ms, `plan` estimates {1000 * guess.step_s:.2f} ({guess.source})"
        off = abs(measured / 1000 - guess.step_s) / guess.step_s
        yield proved("speeds", off <= guess.decode_error, finding, model.name, step_ms=measured, off=round(off, 3))


# Pinning and prefills


def pinning(stand: Stand, extent: Extent) -> Iterator[Verdict]:
    """Measures decoding steps with and without the planned CPUs, and how long prefills delay other slots."""
    placed = stand.placed("base")
    groups = [[ask(f"steps {i}", prompt(9, seed=i), 100)] for i in range(extent.rounds)]
    for length in BUCKETS:
        for i in range(extent.rounds):
            groups += [[ask(f"alone {length} {i}", prompt(length, seed=100 + length + i), 1)]]
            groups += [
                [
                    ask(f"stream {length} {i}", prompt(9, seed=300 + length + i), 60),
                    ask(f"beside {length} {i}", prompt(length, seed=200 + length + i), 1, after=20),
                ]
            ]
    run = stand.run("base", groups)
    if run.trouble or run.silent(least=1):
        yield proved("pinning", False, run.trouble or run.silent(least=1))
        return
    steps = step_s([run.answers[f"steps {i}"] for i in range(extent.rounds)])
    everywhere = tuple(sorted(os.sched_getaffinity(0)))
    own = parse_cpulist(placed.config.place.env.get("COREWRIGHT_CPUS", "")) or ()
    far = on_other_nodes(placed.host, own)
    for claim, cpus, where in (("pinning", everywhere, "all"), ("numa", far, "as many of other nodes")):
        if not own or not cpus:
            yield not_run(claim, "the machine has no other NUMA node" if own else "the plan binds no CPUs")
            continue
        other = stand.run("base", groups[: extent.rounds], env={"COREWRIGHT_CPUS": cpu_list(cpus)})
        answers = [] if other.trouble else [other.answers[f"steps {i}"] for i in range(extent.rounds)]
        yield pinned(claim, steps, step_s(answers), where)
    for length in BUCKETS:
        alone = [run.answers[f"alone {length} {i}"].at[0] for i in range(extent.rounds)]
        gaps = [max(paces(run.answers[f"stream {length} {i}"])[18:]) for i in range(extent.rounds)]
        yield held_up("", length, alone, gaps, steps)


def on_other_nodes(host: Host, cpus: Sequence[int]) -> tuple[int, ...]:
    """Returns as many CPUs of the host as ``cpus``, on the NUMA nodes that have none of these; () without enough."""
    layout = host.cpu_layout
    if layout is None:
        return ()
    nodes = {node for core, node in zip(layout.cores, layout.nodes, strict=True) if set(core) & set(cpus)}
    others = [core for core, node in zip(layout.cores, layout.nodes, strict=True) if node not in nodes]
    usable = [cpu for core in others for cpu in core if cpu in host.cpus]
    return tuple(usable[: len(cpus)]) if len(usable) >= len(cpus) else ()


def _cores(config: ReplicaConfig) -> str:
    return f"{config.place.cores[0]}-{config.place.cores[-1]}"
