"""Parses YAML text into a Spec, and reports every problem with the line and column of its key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from placements.facts.engines import DTYPES, ENGINES, NAMED_ENGINES, Engine
from placements.facts.topology import DEGREES, LNC_CHOICES, TOPOLOGIES
from placements.spec.problems import Problem, has_errors, in_order
from placements.spec.schema import (
    GROUP_QUERY_ATTENTIONS,
    MAX_HOSTS,
    NAME,
    NAME_RULE,
    OPTLEVELS,
    OWN_FIELDS,
    QUANTIZATIONS,
    QUEUE_ORDERS,
    SAMPLINGS,
    STRATEGIES,
    TOOL_PARSERS,
    Buckets,
    Compiler,
    Deadlines,
    Draft,
    EngineSettings,
    HostsSpec,
    ModelSpec,
    Objectives,
    Replicas,
    Reserve,
    Scaling,
    Schedule,
    Spec,
    Spread,
    Update,
)
from placements.spec.source_positions import Path, SourcePosition, SourcePositions
from placements.spec.yaml_tree import BROKEN, MAX_CHARACTERS, Tree, read

_M = TypeVar("_M", bound=BaseModel)

_TOP = ("version", "name", "hosts", "engines", "defaults", "models")
_HOSTS = tuple(HostsSpec.model_fields)
_RESERVE = tuple(Reserve.model_fields)
_MODEL = tuple(key for key in ModelSpec.model_fields if key not in ("name", "base_dir", "broken"))
_NESTED: Mapping[str, tuple[str, ...]] = {
    "replicas": tuple(Replicas.model_fields),
    "draft": tuple(Draft.model_fields),
    "update": tuple(Update.model_fields),
    "deadlines": tuple(Deadlines.model_fields),
    "spread": tuple(Spread.model_fields),
    "buckets": tuple(Buckets.model_fields),
    "compiler": tuple(Compiler.model_fields),
    "objectives": tuple(Objectives.model_fields),
    "scaling": tuple(Scaling.model_fields),
}
_SCHEDULE = tuple(Schedule.model_fields)
_SETTINGS = tuple(EngineSettings.model_fields)
_DEFAULTS = tuple(key for key in _MODEL if key not in OWN_FIELDS)

_ALIASES: Mapping[str, tuple[str, ...]] = {
    "tp_degree": ("tp", "tensor_parallel", "tensor_parallel_degree", "tensor_parallel_size", "num_cores", "tp_size"),
    "max_batch": ("batch", "batch_size", "max_batch_size", "max_rolling_batch_size", "max_num_seqs", "slots"),
    "max_len": ("n_positions", "max_model_len", "max_length", "max_seq_len", "seq_len", "sequence_length", "context"),
    "source": ("model", "model_id", "model_path", "path", "checkpoint", "hf_model_id", "uri", "url"),
    "revision": ("rev", "commit", "branch", "git_revision", "model_revision", "hf_revision"),
    "trust_remote_code": ("remote_code", "allow_remote_code", "hf_trust_remote_code"),
    "dtype": ("amp", "torch_dtype", "precision", "data_type", "auto_cast_type"),
    "neff_cache": ("cache", "compile_cache", "compiled_graph_path", "neuron_compile_cache_url", "neffs"),
    "cores": ("core", "pins", "pin", "core_range", "visible_cores", "neuron_rt_visible_cores"),
    "replicas": ("replica", "num_replicas", "instances"),
    "engine": ("backend", "runtime", "model_loader"),
    "max_queue": ("queue", "queue_size", "max_queue_size"),
    "max_queue_bytes": ("queue_bytes", "max_queue_size_bytes"),
    "max_wait_s": ("queue_timeout", "max_wait", "max_wait_time", "queue_deadline_s", "request_timeout_s"),
    "queue_order": ("queue_policy", "queue_discipline", "scheduling_policy"),
    "objectives": ("slo", "slos", "objective", "targets", "service_level_objectives"),
    "ttft_ms": ("ttft", "time_to_first_token_ms", "first_token_ms"),
    "tpot_ms": ("tpot", "itl_ms", "itl", "time_per_output_token_ms"),
    "queue_ms": ("queue_time_ms", "wait_ms"),
    "scaling": ("autoscaling", "autoscaling_config", "autoscale", "autoscaler"),
    "auto": ("enabled", "automatic"),
    "max_swap_s": ("hold_s",),  # its name until two fields had that one
    "idle_s": ("idle", "idle_timeout", "idle_timeout_s", "ttl", "scale_to_zero_after", "keep_alive"),
    "schedules": ("schedule", "cron", "crons", "timers"),
    "timezone": ("tz", "time_zone", "zone"),
    "start": ("begin", "from"),
    "end": ("stop", "until", "to"),
    "worth_per_1000": ("worth", "value_per_1000"),
    "price_per_core_hour": ("price", "cost", "core_price", "price_per_core"),
    "aliases": ("alias", "served_model_name", "served_model_names", "model_alias"),
    "tool_parser": ("tool_call_parser", "tool_calls", "tools"),
    "threads": ("omp", "omp_num_threads", "num_threads"),
    "models": ("model",),
    "hosts": ("host", "nodes", "machines"),
    "defaults": ("default",),
    "instance": ("instance_type", "type"),
    "emulate": ("emulated", "emulation"),
    "reserve": ("reserved",),
    "draft": ("draft_model", "speculative", "speculation", "assistant", "speculative_model", "speculative_config"),
    "k": ("num_speculative_tokens", "speculation_length", "num_assistant_tokens", "tokens"),
    "count": ("num", "number", "replicas"),
    "vcpus": ("cpus", "vcpu", "cpu"),
    "min": ("minimum", "min_replicas"),
    "max": ("maximum", "max_replicas"),
    "lnc": (
        "logical_nc_config",
        "neuron_logical_nc_config",
        "neuron_rt_virtual_core_size",
        "virtual_core_size",
        "logical_cores",
    ),
    "memory_gib": ("memory", "ram", "ram_gib", "mem", "memory_gb"),
    "spread": ("anti_affinity", "antiaffinity", "pod_anti_affinity", "max_per_host", "max_per_node"),
    "host": ("hosts", "node", "max_per_host", "max_per_node", "per_host", "hostname"),
    "host_memory_gib": ("host_memory", "memory", "memory_gib", "ram", "ram_gib", "host_ram_gib"),
    "quantize": (
        "quantization",
        "quant",
        "quantized",
        "quantization_dtype",
        "quant_dtype",
        "neuron_quant",
        "neuron_quant_dtype",
        "load_in_8bit",
        "int8",
    ),
    "group_query_attention": ("gqa", "grouped_query_attention", "gqa_sharding", "kv_sharding"),
    "quantize_kv": (
        "kv_cache_quant",
        "kv_quant",
        "kv_cache_dtype",
        "kv_dtype",
        "quantize_kv_cache",
        "kv_cache_quantization",
    ),
    "buckets": ("bucket", "bucketing", "bucket_sizes"),
    "prefill": (
        "context",
        "context_length_estimate",
        "context_encoding_buckets",
        "context_length_buckets",
        "neuron_context_length_estimate",
        "prompt",
    ),
    "decode": ("token", "token_generation_buckets", "token_gen_buckets", "n_positions", "generation", "kv"),
    "sampling": ("on_device_sampling", "on_device_generation", "sample_on_device", "device_sampling", "sampler"),
    "fuse_qkv": ("fused_qkv", "qkv_fused", "fuse_qkv_weights"),
    "compiler": ("compile", "neuronx_cc", "compiler_options", "compiler_args"),
    "optlevel": ("opt_level", "optimize_level", "neuron_optimize_level", "optimization_level"),
    "flags": ("cc_flags", "neuron_cc_flags", "args", "options"),
    "workers": ("compilation_worker_count", "compile_workers", "num_workers", "jobs"),
    "engines": ("interpreters", "engine_settings", "environments"),
    "python": ("interpreter", "python_path", "executable"),
    "transformers-neuronx": ("tnx", "transformers_neuronx", "transformers_neuron"),
    "nxd-inference": ("nxdi", "nxd_inference", "neuronx_distributed_inference", "neuronx_distributed", "nxd"),
    "optimum-neuron": ("optimum", "optimum_neuron"),
    "torch-neuronx": ("torch_neuronx", "torch_neuron"),
}
_MEANT: Mapping[tuple[str, bool], object] = {
    **{(key, True): "int8" for key in ("load_in_8bit", "quantized", "neuron_quant", "int8")},
    **{(key, False): None for key in ("load_in_8bit", "quantized", "neuron_quant", "int8")},
    **{(key, True): "fp8" for key in ("kv_cache_quant", "kv_quant")},
    **{(key, False): None for key in ("kv_cache_quant", "kv_quant")},
    **{(key, True): "device" for key in ("on_device_sampling", "on_device_generation", "sample_on_device")},
    **{(key, False): "host" for key in ("on_device_sampling", "on_device_generation", "sample_on_device")},
    **{(key, True): "host" for key in ("anti_affinity", "antiaffinity")},
    **{(key, False): None for key in ("anti_affinity", "antiaffinity")},
}
"""(Key of another tool, boolean) -> the value of the field that replaces it."""

_VALUE_ALIASES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "f16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "f32": "fp32",
    "float": "fp32",
    "tnx": "transformers-neuronx",
    "transformers_neuronx": "transformers-neuronx",
    "nxdi": "nxd-inference",
    "neuronx-distributed-inference": "nxd-inference",
    "optimum": "optimum-neuron",
    "torch-neuron": "torch-neuronx",
    "hf": "cpu",
    "transformers": "cpu",
    **dict.fromkeys(("f8", "float8", "f8e4m3", "f8e4m3fn", "float8_e4m3", "float8_e4m3fn"), "fp8"),
    "on_device": "device",
    **dict.fromkeys(("static_int8", "s8", "i8", "8bit", "w8", "int8_weights", "dynamic_int8"), "int8"),
    **{mode.replace("-", "_"): mode for mode in GROUP_QUERY_ATTENTIONS},
    "replicate-to-tp-degree": "replicated-heads",
    **dict.fromkeys(("llama3_json", "llama4_json", "llama", "llama-3"), "llama3"),
    **dict.fromkeys(("qwen", "qwen2", "qwen3", "qwen25"), "hermes"),
}

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "engine": ENGINES,
    "dtype": DTYPES,
    "strategy": STRATEGIES,
    "queue_order": QUEUE_ORDERS,
    "tool_parser": TOOL_PARSERS,
    "version": ("1",),
    "quantize": QUANTIZATIONS,
    "quantize_kv": QUANTIZATIONS,
    "sampling": SAMPLINGS,
    "optlevel": tuple(map(str, OPTLEVELS)),
    "group_query_attention": GROUP_QUERY_ATTENTIONS,
    "lnc": tuple(map(str, LNC_CHOICES)),
}

_WHOLE, _TEXT, _MAPPING, _SECONDS = "a whole number", "text", "a mapping", "seconds, or a duration like 10m or 1h30m"
_GIB = "a number of GiB"
_LENGTHS = "a list of whole numbers, like [128, 512]"
_WANTS: Mapping[str, str] = {
    "name": _TEXT,
    "source": _TEXT,
    "engine": "one of " + ", ".join(ENGINES),
    "dtype": "one of " + ", ".join(DTYPES),
    "cores": 'a list of ranges, like ["0-7"]',
    "aliases": "a list of names, like [gpt-4o]",
    "tool_parser": "one of " + ", ".join(TOOL_PARSERS),
    "replicas": "a whole number, or {min: 1, max: 2}",
    "neff_cache": _TEXT,
    "threads": "share, lmi or a whole number from 1 to 1024",
    "allow_head_padding": "true or false",
    "allow_degrees": "a list of whole numbers, like [6]",
    "hbm_overhead_gib": _GIB,
    "host_memory_gib": _GIB,
    "memory_gib": _GIB,
    "spread": "host, or a mapping like {host: 2}",
    "quantize": "int8 or fp8",
    "quantize_kv": "int8 or fp8",
    "buckets": "a mapping, like {prefill: [128, 512], decode: [512, 2048]}",
    "prefill": _LENGTHS,
    "decode": _LENGTHS,
    "sampling": "host or device",
    "fuse_qkv": "true or false",
    "compiler": "a mapping, like {optlevel: 1}",
    "optlevel": "1, 2 or 3",
    "flags": _TEXT,
    "python": "a path, like ~/envs/nxdi/bin/python",
    "engines": "a mapping from engines to settings, like {nxd-inference: {python: ~/envs/nxdi/bin/python}}",
    "group_query_attention": "one of " + ", ".join(GROUP_QUERY_ATTENTIONS),
    "lnc": "1 or 2",
    "allow_pickle": "true or false",
    "trust_remote_code": "true or false",
    "revision": "a branch, tag or commit",
    "draft": "a mapping with a source, like {source: ./models/draft, k: 4}",
    "engine_options": "a mapping from option names to values",
    "update": "a mapping, like {strategy: surge}",
    "deadlines": "a mapping, like {start_s: 600}",
    "strategy": "one of " + ", ".join(STRATEGIES),
    "rollback": "true or false",
    **dict.fromkeys(("hold_s", "max_swap_s", "progress_deadline_s", "start_s", "fetch_s", "compile_s"), _SECONDS),
    **dict.fromkeys(("step_s", "drain_s", "max_wait_s", "idle_s"), _SECONDS),
    **dict.fromkeys(("ttft_ms", "tpot_ms", "queue_ms"), "a number of milliseconds"),
    **dict.fromkeys(("start", "end"), 'a cron expression, like "0 8 * * MON-FRI"'),
    "timezone": "a time zone, like Europe/Berlin",
    "objectives": "a mapping, like {ttft_ms: 500}",
    "scaling": "a mapping, like {idle_s: 600}",
    "schedules": 'a list, like [{start: "0 8 * * *", end: "0 18 * * *", min: 2}]',
    "auto": "true or false",
    "queue_order": "one of " + ", ".join(QUEUE_ORDERS),
    "worth_per_1000": "a number",
    "price_per_core_hour": "a number",
    "instance": _TEXT,
    "emulate": _TEXT,
    "reserve": "a mapping, like {vcpus: 8, cores: [23]}",
    "hosts": "a mapping, like {instance: inf2.48xlarge}, or a list of them",
    "defaults": _MAPPING,
    "models": "a mapping from model names to their fields",
}


@dataclass(frozen=True)
class Parsed:
    """The spec of a text, as far as it can be read, and its problems.

    ``spec`` is set even with errors, so that `checks` can report more: fields that could not be read are missing and
    listed in its ``broken``. Only a spec without errors may be used (``ok``). None: nothing could be read.
    """

    spec: Spec | None
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether there is a spec without errors."""
        return self.spec is not None and not has_errors(self.problems)


def parse(text: str | bytes, filename: str = "<spec>", base_dir: str | None = None) -> Parsed:
    """Parses a spec. Reports all problems of the text, and raises none.

    ``filename`` is the file name in the positions of problems; ``base_dir`` the folder of relative sources, by default
    the current one.
    """
    tree = read(text, filename)
    other = _other_format(tree.value, text)
    if other is not None:
        what, hint = other
        return Parsed(None, (Problem("not-a-spec", "error", f"{filename}:1:1", what, hint),))
    spec = None if tree.value is BROKEN else _Reader(tree, base_dir or ".").spec()
    return Parsed(spec, in_order(tree.problems))


def _other_format(value: Any, text: str | bytes) -> tuple[str, str] | None:
    """Returns the problem and the hint for a file of another format; None if it may be a spec."""
    if isinstance(value, dict):
        if not ("apiVersion" in value and "kind" in value):
            return None
        kind = f" of kind {_short(value['kind'])}" if isinstance(value["kind"], str) else ""
        return f"the file is a Kubernetes manifest{kind}, not a spec", f"corewright does not read manifests; {_BEGIN}"
    start = text[:MAX_CHARACTERS]
    lines = (start.decode(errors="replace") if isinstance(start, bytes) else start).splitlines()
    first = next((line for line in lines if line.strip() and not line.lstrip().startswith(("#", "!"))), "")
    if not _PROPERTY.match(first):
        return None
    return "the file has properties, like serving.properties of LMI; it is not a spec", (
        f"docs/from-vllm-and-lmi.md lists the field for each property; {_BEGIN}"
    )


_BEGIN = "write a spec that begins with models: {NAME: {source: ...}}"
_PROPERTY = re.compile(r"\s*[A-Za-z][\w.-]*\s*=")


class _Reader:
    """Converts the tree of one document to a Spec, and collects problems in the tree."""

    def __init__(self, tree: Tree, base_dir: str) -> None:
        self._tree = tree
        self._base_dir = base_dir
        self._defaults_places: dict[str, list[tuple[Path, SourcePosition]]] = {}
        self._hosts_read: tuple[HostsSpec, ...] = ()

    def spec(self) -> Spec | None:
        if not isinstance(self._tree.value, dict):
            self._wrong_type((), "the spec", _MAPPING)
            return None
        top = self._known(self._tree.value, _TOP, ())
        broken = {key for key, value in top.items() if value is BROKEN}
        plain: dict[str, Any] = {key: top[key] for key in ("version", "name") if key in top}
        head = self._validated(Spec, plain, (), broken)
        hosts = self._hosts_read = self._hosts(top, broken)
        engines = self._engines(top, broken)
        models = self._models(top, broken)
        return Spec(
            version=1,
            name=head.name if head else "fleet",
            hosts=hosts,
            engines=engines,
            models=models,
            base_dir=self._base_dir,
            places=SourcePositions(self._tree.filename, self._tree.places),
            broken=frozenset(broken),
        )

    def _hosts(self, top: dict[str, Any], broken: set[str]) -> tuple[HostsSpec, ...]:
        """Reads one mapping, or a list of mappings for machines of several types."""
        path: Path = ("hosts",)
        value = top.get("hosts")
        if value is None and "hosts" not in top:
            return ()
        if value == []:
            hint = "list at least one type, or remove hosts to use this machine"
            self._report("wrong-type", path, "hosts is an empty list; it must be " + _WANTS["hosts"], hint)
        items = [((*path, i), item) for i, item in enumerate(value)] if isinstance(value, list) else [(path, value)]
        entries = [self._hosts_of(item, where) for where, item in items]
        hosts = [entry for entry in entries if entry is not None]
        if len(hosts) < max(1, len(entries)) or not self._together(hosts, [where for where, _ in items]):
            broken.add("hosts")
            return ()
        return tuple(hosts)

    def _together(self, hosts: list[HostsSpec], paths: list[Path]) -> bool:
        """Whether the entries of a list are consistent. Reports the first one that is not."""
        total = 0
        for entry, path in zip(hosts, paths, strict=True):
            if (entry.instance is None) != (hosts[0].instance is None):
                what = "hosts mixes real machines (instance) and emulated ones (emulate)"
                hint = "use instance for all entries, or emulate for all"
                self._report("hosts-mixed", (*path, "emulate" if entry.instance is None else "instance"), what, hint)
                return False
            total += entry.count
            if total > MAX_HOSTS:
                what = f"hosts has more than {MAX_HOSTS} machines in total"
                self._report("out-of-range", (*path, "count"), what, "lower count")
                return False
        return True

    def _hosts_of(self, value: Any, path: Path) -> HostsSpec | None:
        if not isinstance(value, dict):
            if value is not BROKEN:
                self._wrong_type(path, _label(path), _WANTS["hosts"] if len(path) == 1 else _HOSTS_ITEM)
            return None
        values = self._known(value, _HOSTS, path)
        if isinstance(values.get("reserve"), dict):
            values["reserve"] = self._known(values["reserve"], _RESERVE, (*path, "reserve"))
        missing: set[str] = {key for key, value in values.items() if value is BROKEN}
        for key in ("instance", "emulate"):
            name = values.get(key)
            if isinstance(name, str) and name not in TOPOLOGIES:
                self._unknown_instance((*path, key), key, name)
                missing.add(key)
        types = [key for key in ("instance", "emulate") if key in values]
        if len(types) != 1:
            label = _label(path)
            what = f"{label} has both instance and emulate" if types else f"{label} has no instance type"
            hint = "keep one of the two" if types else "add instance: inf2.48xlarge, or emulate: inf2.48xlarge"
            self._report("hosts-ambiguous", path, what, hint)
            missing.add("instance")
        hosts = self._validated(HostsSpec, values, path, missing)
        if missing or hosts is None:
            return None
        name = hosts.instance or hosts.emulate
        if name is None:  # a key without a value
            self._wrong_type((*path, types[0]), _label((*path, types[0])), "an instance type")
            return None
        if hosts.lnc is not None and TOPOLOGIES[name].lnc is None:
            what = f"lnc is {hosts.lnc}, but {name} does not support it; only trn2 does"
            self._report("lnc-without-choice", (*path, "lnc"), what, "remove lnc")
            hosts = hosts.model_copy(update={"lnc": None})
        return hosts

    def _unknown_instance(self, path: Path, key: str, name: str) -> None:
        supported = ", ".join(TOPOLOGIES)
        if name.startswith("inf1"):
            what = f'{key} "{name}" is not supported for language models; supported are {supported}'
            self._report("unsupported-instance", path, what, "use one of the inf2 types")
            return
        close = difflib.get_close_matches(name, TOPOLOGIES, 1)
        what = f'{key} "{name}" is not an instance type; supported are {supported}'
        self._report("unknown-instance", path, what, _did_you_mean(close) or "use one of these")

    def _engines(self, top: dict[str, Any], broken: set[str]) -> dict[Engine, EngineSettings]:
        """Reads the settings by engine, without those that cannot be read."""
        value = top.get("engines")
        if value is None or value is BROKEN:
            return {}
        if not isinstance(value, dict):
            self._wrong_type(("engines",), "engines", _WANTS["engines"])
            broken.add("engines")
            return {}
        settings_by_engine: dict[Engine, EngineSettings] = {}
        for name, fields in self._known(value, NAMED_ENGINES, ("engines",)).items():
            path: Path = ("engines", name)
            if isinstance(fields, dict):
                settings = self._validated(EngineSettings, self._known(fields, _SETTINGS, path), path, broken)
                if settings is not None:
                    settings_by_engine[next(engine for engine in NAMED_ENGINES if engine == name)] = settings
            elif fields is not BROKEN:
                self._wrong_type(path, f"engines.{name}", "a mapping, like {python: ~/envs/nxdi/bin/python}")
                broken.add("engines")
        return settings_by_engine

    def _models(self, top: dict[str, Any], broken: set[str]) -> tuple[ModelSpec, ...]:
        defaults, broken_defaults = self._defaults(top)
        value = top.get("models")
        if isinstance(value, dict) and value:
            models = [self._model(name, fields, defaults, broken_defaults) for name, fields in value.items()]
            if None in models:
                broken.add("models")
            return tuple(model for model in models if model is not None)
        if value is BROKEN:
            return ()
        broken.add("models")
        if value is None or value == {}:
            path: Path = ("models",) if "models" in top else ()
            what = "the spec lists no models"
            self._report("missing-key", path, what, "add models: {NAME: {source: ...}}")
        else:
            self._wrong_type(("models",), "models", _WANTS["models"])
        return ()

    def _defaults(self, top: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
        value = top.get("defaults")
        if value is None or value is BROKEN:
            return {}, set()
        if not isinstance(value, dict):
            self._wrong_type(("defaults",), "defaults", _WANTS["defaults"])
            return {}, set()
        values = self._known(value, _DEFAULTS, ("defaults",))
        broken: set[str] = set()
        self._nested_keys(values, ("defaults",))
        self._validated(ModelSpec, {**values, "name": "defaults", "source": "./"}, ("defaults",), broken)
        for key_path, place in self._tree.places.items():
            if key_path[:1] == ("defaults",) and len(key_path) > 1:
                self._defaults_places.setdefault(str(key_path[1]), []).append((key_path[2:], place))
        return {key: value for key, value in values.items() if key not in broken}, broken

    def _model(self, name: str, fields: Any, defaults: dict[str, Any], broken_defaults: set[str]) -> ModelSpec | None:
        path: Path = ("models", name)
        usable = NAME.fullmatch(name) is not None
        if not usable:
            what = f'the model name "{_short(name)}" is not valid: a name has {NAME_RULE}'
            self._report("bad-name", path, what, "rename the model; the name is part of paths and actor names")
        if fields is BROKEN:
            return None
        if not isinstance(fields, dict):
            self._wrong_type(path, f'model "{_short(name)}"', "a mapping, like {source: ./models/tiny}")
            return None
        own = self._known(fields, _MODEL, path)
        self._nested_keys(own, path)
        for key in defaults.keys() - own.keys():
            self._inherit(path, key)
        values = {**defaults, **own, "name": name if usable else "model", "base_dir": self._base_dir}
        broken = broken_defaults - own.keys()
        if "source" not in own and values.get("engine") == "echo":
            values["source"] = "echo"  # it has no checkpoint
        elif "source" not in own:
            self._report("missing-key", path, f'model "{_short(name)}" has no source', _SOURCE_HINT)
            broken.add("source")
        if broken & {"source"}:
            values["source"] = "./"
        model = self._validated(ModelSpec, values, path, broken)
        if model is None or not usable:
            return None
        source = "" if "source" in broken else model.source
        return model.model_copy(update={"broken": frozenset(broken), "source": source})

    def _inherit(self, path: Path, key: str) -> None:
        """Uses the position of a default as the position of the model's field."""
        for suffix, place in self._defaults_places.get(key, ()):
            where = (*path, key, *suffix)
            self._tree.places[where] = place

    def _nested_keys(self, values: dict[str, Any], path: Path) -> None:
        for key, allowed in _NESTED.items():
            if isinstance(values.get(key), dict):
                values[key] = self._known(values[key], allowed, (*path, key))
        scaling = values.get("scaling")
        if isinstance(scaling, dict) and isinstance(scaling.get("schedules"), list):
            inside: Path = (*path, "scaling", "schedules")
            scaling["schedules"] = [
                self._known(item, _SCHEDULE, (*inside, i)) if isinstance(item, dict) else item
                for i, item in enumerate(scaling["schedules"])
            ]

    def _known(self, values: dict[str, Any], allowed: tuple[str, ...], path: Path) -> dict[str, Any]:
        """Returns the known keys. Reports the others, and reads a misspelt key as the one that it probably means."""
        result: dict[str, Any] = {}
        for key, value in values.items():
            if key in allowed:
                result[key] = value
                continue
            meant = None if not path and key in _MODEL else _meant(key, allowed)  # `engine` is not `engines`
            where = (*path, key)
            hint = _did_you_mean([meant] if meant else []) or _belongs(key, path)
            hint = hint or _nearest_keys(key, allowed)
            self._report("unknown-key", where, f'"{_short(key)}" is not a known key{_of(path)}', hint)
            if meant and meant not in values and meant not in result:
                result[meant] = _as_meant(key, meant, value)
                for known in [known for known in _paths(where, value) if known in self._tree.places]:
                    renamed = (*path, meant, *known[len(where) :])
                    self._tree.places[renamed] = self._tree.places[known]
                    if known in self._tree.written:
                        self._tree.written[renamed] = self._tree.written[known]
        return result

    def _validated(self, kind: type[_M], values: dict[str, Any], path: Path, broken: set[str]) -> _M | None:
        """Returns a value of ``kind``. Fields that cannot be read are reported, removed, and added to ``broken``.

        Valid pins stay if others are invalid, for the rules that check each pin.
        """
        values = dict(values)
        if _holds_broken(values.get("engine_options")):  # reported by the tree; `checks` checks the types of values
            broken.add("engine_options")
            del values["engine_options"]
        for _ in range(2):
            try:
                return kind.model_validate(values)
            except ValidationError as failure:
                errors = failure.errors()
                self._explain(errors, path)
                for field in {str(error["loc"][0]) for error in errors if error["loc"]}:
                    broken.add(field)
                    items = {error["loc"][1] for error in errors if error["loc"][0] == field and error["loc"][1:]}
                    if field == "cores" and items:
                        self._remove_items(values, path, field, items)
                    elif field == "source":
                        values[field] = "./"
                    else:
                        values.pop(field, None)
        return None

    def _remove_items(self, values: dict[str, Any], path: Path, field: str, items: set[Any]) -> None:
        """Removes items from a list, and shifts the positions of those behind them."""
        remaining = [i for i in range(len(values[field])) if i not in items]
        values[field] = [values[field][i] for i in remaining]
        for new, old in enumerate(remaining):
            place = self._tree.places.get((*path, field, old))
            if place:
                where = (*path, field, new)
                self._tree.places[where] = place

    def _explain(self, errors: list[ErrorDetails], path: Path) -> None:
        reported: set[Path] = set()
        for error in errors:
            if error["input"] is BROKEN or (isinstance(error["input"], list) and BROKEN in error["input"]):
                continue  # reported by the tree
            where = self._known_path(path, error["loc"])
            if where not in reported:  # a union fails once for each of its members
                reported.add(where)
                self._explain_one(error, where)

    def _known_path(self, path: Path, loc: tuple[int | str, ...]) -> Path:
        """Converts pydantic's location to a path of keys, without the names of union members."""
        where = path
        for part in loc:
            if (*where, part) not in self._tree.places and (*where, part) not in self._tree.written:
                break
            where = (*where, part)
        return where

    def _explain_one(self, error: ErrorDetails, where: Path) -> None:
        label = _label(where)
        field = next((str(part) for part in reversed(where) if isinstance(part, str)), "")
        written = self._tree.written.get(where)
        shown = _shown(written.text, written.kind, written.plain) if written else "empty"
        kind, context = error["type"], error.get("ctx", {})
        if kind == "value_error":
            id = {
                "cores": "bad-range",
                "source": "bad-source",
                "neff_cache": "bad-source",
                "revision": "bad-revision",
                "name": "bad-name",
                "aliases": "bad-name",
                "start": "bad-cron",
                "end": "bad-cron",
                "timezone": "unknown-timezone",
            }
            what = str(context.get("error", error["msg"]))
            self._report(id.get(field, "wrong-type"), where, f"{label}: {what}", _VALUE_HINTS.get(field, ""))
        elif kind in _BOUNDS:
            word = _BOUNDS[kind]
            bound = next(iter(context.values()), "")
            hint = _degrees(self._hosts_read) if field == "tp_degree" else _BOUND_HINTS.get(field, "")
            self._report("out-of-range", where, f"{label} is {shown}; it must be {word} {bound}", hint)
        elif (
            kind == "literal_error"
            and field in _CHOICES
            and written
            and written.kind in ("text", "a number")
            and (written.plain or str(error["input"]) not in _CHOICES[field])
        ):
            text = str(error["input"])
            close = _VALUE_ALIASES.get(text.lower()) or next(
                iter(difflib.get_close_matches(text.lower(), _CHOICES[field], 1)), ""
            )
            close = close if close in _CHOICES[field] else ""
            choices = (
                " or ".join(_CHOICES[field]) if len(_CHOICES[field]) < 3 else "one of " + ", ".join(_CHOICES[field])
            )
            self._report(
                "unknown-value",
                where,
                f"{label} is {shown}; it must be {choices}",
                _did_you_mean([close] if close else []),
            )
        else:
            self._wrong_type(where, label, _wanted(where, field))

    def _wrong_type(self, where: Path, label: str, expected: str) -> None:
        written = self._tree.written.get(where)
        if written is None or written.kind == "empty":
            self._report("wrong-type", where, f"{label} is empty; it must be {expected}", "")
            return
        shown = _shown(written.text, written.kind, written.plain)
        if (
            written.plain
            and written.kind in ("a boolean", "a number")
            and expected in (_TEXT, _WANTS["engine"], _WANTS["dtype"], _WANTS["strategy"], _WANTS["revision"])
        ):
            reading = "a number"
            if written.kind == "a boolean":
                reading = "true" if written.text.lower() in ("on", "yes", "true") else "false"
            what = f"{label} is {written.text}, which YAML reads as {reading}; it must be {expected}"
            self._report("yaml-unquoted", where, what, f'write "{written.text}" in quotes')
            return
        hint = ""
        if (
            written.kind == "text"
            and not written.plain
            and expected.startswith(("a whole number", _WANTS["lnc"], _WANTS["optlevel"]))
        ):
            hint = "write the number without quotes"
        if where == ("models",) and written.kind == "a list":
            hint = "write each model as NAME: {source: ...} instead of a list item"
        self._report("wrong-type", where, f"{label} is {shown}, {written.kind}; it must be {expected}", hint)

    def _report(self, id: str, path: Path, what: str, hint: str) -> None:
        self._tree.report(id, self._nearest(path), what, hint)

    def _nearest(self, path: Path) -> SourcePosition:
        for length in range(len(path), 0, -1):
            if path[:length] in self._tree.places:
                return self._tree.places[path[:length]]
        return self._tree.places.get((), SourcePosition(1, 1))


def _holds_broken(value: Any) -> bool:
    """Whether a part of the value could not be read."""
    if isinstance(value, dict):
        return any(_holds_broken(item) for item in value.values())
    return any(_holds_broken(item) for item in value) if isinstance(value, list) else value is BROKEN


_HOSTS_ITEM = "a mapping, like {instance: inf2.48xlarge, count: 2}"
_SOURCE_HINT = "add source: ./path, s3://bucket/prefix or a hub id"
_BOUNDS = {
    "greater_than_equal": "at least",
    "less_than_equal": "at most",
    "greater_than": "more than",
    "less_than": "less than",
}
_BOUND_HINTS = {
    "replicas": "to start a model on its first request, write replicas: {min: 0, max: 1}",
    "max": "to start a model on its first request, write replicas: {min: 0, max: 1}",
}
_VALUE_HINTS = {
    "start": 'write it like "0 8 * * MON-FRI"',
    "end": 'write it like "0 18 * * MON-FRI"',
    "timezone": "use a name of the IANA database, like Europe/Berlin or UTC",
    "cores": 'write "0-7", or "inf2.48xlarge/0:0-7" to name the host as well',
    "source": "a source is a path, s3://bucket/prefix or a hub id like org/model",
}


def _degrees(hosts: tuple[HostsSpec, ...]) -> str:
    """Returns a hint with the degrees of these hosts, or of all families without hosts."""
    named = {name: TOPOLOGIES[name].at_lnc(entry.lnc) for entry in hosts if (name := entry.instance or entry.emulate)}
    types = named or {topology.family: topology for topology in sorted(TOPOLOGIES.values(), key=lambda t: t.cores)}
    legal = [(name, [tp for tp in DEGREES[type_.family] if tp <= type_.cores]) for name, type_ in types.items()]
    return "tp_degree can be " + "; ".join(f"{', '.join(map(str, degrees))} on {name}" for name, degrees in legal)


def _label(path: Path) -> str:
    """Returns the path as text, without the model's name: "tp_degree", "cores[1]", "replicas.max"."""
    inner = len(path) > 1 and not isinstance(path[1], int)  # the items of a list keep the list's name
    parts = path[2:] if path[:1] == ("models",) and len(path) > 2 else path[1:] if inner else path
    label = ""
    for part in parts:
        label += f"[{part}]" if isinstance(part, int) else f".{part}" if label else part
    return label or "the spec"


_ITEMS = {
    "cores": 'a range, like "0-7"',
    "aliases": "a name",
    "schedules": 'a mapping with a start and an end, like {start: "0 8 * * *", end: "0 18 * * *", min: 2}',
}


def _wanted(where: Path, field: str) -> str:
    if isinstance(where[-1] if where else "", int):
        return _ITEMS.get(field, _WHOLE)
    if where[:1] == ("hosts",) and field == "cores":
        return 'a list of core ids, like [20, "22-23"]'
    return _WANTS.get(field, _WHOLE)


def _shown(text: str, kind: str, plain: bool) -> str:
    return f'"{text}"' if kind == "text" and plain else text


def _paths(path: Path, value: Any) -> Iterator[Path]:
    """Yields the path of a value and of all values in it."""
    yield path
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _paths((*path, key), inner)


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def _plain(key: str) -> str:
    return key.lower().replace("-", "_").replace(" ", "_")


def _meant(key: str, allowed: tuple[str, ...]) -> str | None:
    plain = _plain(key)
    for known in allowed:
        if plain == known or plain in _ALIASES.get(known, ()):
            return known
    return next(iter(difflib.get_close_matches(plain, allowed, 1, 0.7)), None)


def _as_meant(key: str, meant: str, value: Any) -> Any:
    """Converts the value of a key of another tool to the value of the field that replaces it."""
    plain = _plain(key)
    if isinstance(value, bool):
        return _MEANT.get((plain, value), value)
    if meant == "spread" and isinstance(value, int):
        return {"host": value}
    return value


def _nearest_keys(key: str, allowed: tuple[str, ...]) -> str:
    """Returns a hint with the three known keys that share most pairs of letters; difflib is too slow for many keys."""
    if len(allowed) <= 3:
        return f"known keys are {', '.join(allowed)}"
    pairs = _pairs(_plain(key)[:60])
    nearest = sorted(allowed, key=lambda known: -len(pairs & _pairs(known)) / (len(pairs) + len(known)))
    return f"the nearest known keys are {', '.join(nearest[:3])}"


def _pairs(word: str) -> set[str]:
    return {word[i : i + 2] for i in range(len(word) - 1)}


def _did_you_mean(names: list[str]) -> str:
    return f'did you mean "{names[0]}"?' if names else ""


def _belongs(key: str, path: Path) -> str:
    if key == "name" and path[:1] == ("models",):
        return "the name of a model is the key of its fields"
    if path == ("defaults",) and key in _MODEL:
        return f"set {key} in each model"
    if not path and key in _MODEL:
        return f"set {key} in a model or in defaults"
    if not path and key in _HOSTS:
        return f"set {key} in hosts"
    return ""


def _of(path: Path) -> str:
    if not path:
        return " of a spec"
    if path[0] == "models":
        return f' of model "{_short(str(path[1]))}"' if len(path) == 2 else f" of {path[-1]}"
    return " of " + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
