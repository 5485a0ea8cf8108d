"""What replaces each property of LMI's Neuron handler and of DJL Serving: a field, or the reason why nothing does.

The properties are those of LMI's page on transformers-neuronx and of `tnx_properties.py`, `properties.py` and
`ModelInfo.java` of DJL Serving 0.25 to 0.33.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from placements.engines.options import UNSERVED
from placements.engines.registry import Engine
from placements.facts.tables import by_name, read_table
from placements.lmi.conversion import TRUE, Conversion, Read, boolean, integer, lengths, one_of, text
from placements.lmi.settings import IMAGE, MODEL_DATA, LmiSetting
from placements.spec.notation import source_kind

Row = Callable[[Conversion, LmiSetting], None]

ENGINES: Mapping[str, Engine] = {
    "tnx": "transformers-neuronx",
    "optimum": "optimum-neuron",
    "vllm": "vllm",
    "nxdi": "vllm",  # which loads NxD Inference
}
"""LMI's model loader -> the engine."""

HANDLERS: Mapping[str, str] = {"transformers_neuronx": "", "lmi_vllm.vllm_async_service": "vllm"}
"""LMI's handlers of text on Neuron -> the loader that each implies; "": none."""

_SECRETS = frozenset({"token", "secret", "secrets", "password", "passwd", "key", "keys", "apikey", "credentials"})
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_CORE = re.compile(r"nc(\d{1,3})")
_MODEL_FOLDER = "/opt/ml/model"
_DRAFTS = ("speculative_draft_model", "draft_model_id", "speculative_model")
_LENGTHS = ("speculative_length", "spec_length", "num_speculative_tokens")


def field_row(path: str, read: Read = text) -> Row:
    """A row for a setting whose value, as it is read, is that of a field."""
    return lambda model, setting: model.map(setting, path, read(setting.value))


def dropped(reason: str) -> Row:
    """A row for a setting without effect."""
    return lambda model, setting: model.note(setting, "dropped", reason)


def refused(reason: str) -> Row:
    """A row for a setting without a replacement."""
    return lambda model, setting: model.note(setting, "refused", reason)


def _unless(harmless: frozenset[str], reason: str) -> Row:
    """Drops these values, which change nothing, and refuses others."""

    def row(model: Conversion, setting: LmiSetting) -> None:
        fine = setting.value.lower() in harmless
        model.note(setting, "dropped" if fine else "refused", "it changes nothing" if fine else reason)

    return row


def _option(read: Read, *, if_true: bool = False) -> Row:
    """An option of transformers-neuronx's NeuronConfig; LMI passes a false one of ``if_true`` not on."""

    def row(model: Conversion, setting: LmiSetting) -> None:
        value = read(setting.value)
        reason = UNSERVED["transformers_neuronx.NeuronConfig"].get(setting.name)
        if if_true and value is False:
            model.note(setting, "dropped", "it is false by default")
        elif reason is not None:
            model.note(setting, "dropped", reason)
        elif model.fields.get("engine") != "transformers-neuronx":
            model.note(setting, "dropped", "an option of transformers-neuronx")
        else:
            model.map(setting, f"engine_options.{setting.name}", value)

    return row


_READS: Mapping[str, Read] = {"text": text, "integer": integer, "boolean": boolean, "lengths": lengths}


def _read(kind: str | list[str]) -> Read:
    """Returns the reader of a kind of values: its name, or the values to choose from."""
    return _READS[kind] if isinstance(kind, str) else one_of(*kind)


def plain_rows(loader: str) -> dict[str, Row]:
    """Returns the rows of the settings that need no code of their own, from settings.json."""
    table = read_table("lmi/settings.json")[loader]
    rows = {name: dropped(reason) for name, reason in by_name(table.get("dropped", {})).items()}
    rows |= {name: refused(reason) for name, reason in by_name(table.get("refused", {})).items()}
    rows |= {name: field_row(path, _read(kind)) for name, (path, kind) in table.get("fields", {}).items()}
    rows |= {name: _option(_read(kind)) for name, kind in table.get("options", {}).items()}
    rows |= {name: _option(boolean, if_true=True) for name in table.get("switches", ())}
    for reason, settings in table.get("harmless", {}).items():
        rows |= {name: _unless(frozenset(values), reason) for name, values in settings.items()}
    return rows


def _flag(flag: str) -> Row:
    """A compiler flag, which LMI adds for any value."""

    def row(model: Conversion, setting: LmiSetting) -> None:
        if setting.value.lower() not in TRUE:
            model.comments.setdefault("compiler", []).append(f"LMI adds {flag} for any value")
        _add_flags(model, setting, flag)

    return row


def _add_flags(model: Conversion, setting: LmiSetting, flags: str) -> None:
    before = model.fields.get("compiler", {}).get("flags", "")
    model.map(setting, "compiler.flags", f"{before} {flags}".strip())


def _source(model: Conversion, setting: LmiSetting) -> None:
    if setting.value.rstrip("/") == _MODEL_FOLDER and MODEL_DATA in model.settings:
        model.note(setting, "dropped", f"SageMaker's folder for {MODEL_DATA}")
        return
    if "{{" in setting.value or "djl://" in setting.value:
        raise ValueError(f"{setting.value[:60]!r} is not a folder, an S3 prefix or a hub id")
    source_kind(setting.value)
    model.map(setting, "source", setting.value)


def _model_data(model: Conversion, setting: LmiSetting) -> None:
    if model.text("model_id") and model.text("model_id").rstrip("/") != _MODEL_FOLDER:
        model.note(setting, "dropped", f"{model.settings['model_id'].written} counts")
    elif setting.value.endswith(".tar.gz"):
        raise ValueError(f"{setting.value[:200]!r} is an archive: unpack it to a prefix, which `source` names")
    else:
        _source(model, setting)


def degree_row(model: Conversion, setting: LmiSetting) -> None:
    """The tensor-parallel degree; `max` are all cores."""
    if setting.value == "max":
        model.map(setting, "tp_degree", model.cores)
    elif integer(setting.value) < 1:
        raise ValueError(f"{setting.value} is not a tensor-parallel degree")
    else:
        model.map(setting, "tp_degree", int(setting.value))


def _static_batch(model: Conversion, setting: LmiSetting) -> None:
    if model.text("rolling_batch") not in ("", "disable") and model.text("batch_size") in ("", "1"):
        model.note(setting, "dropped", "rolling batches are on, so max_rolling_batch_size counts")
    else:
        model.map(setting, "max_batch", integer(setting.value))


def _rolling_batch(model: Conversion, setting: LmiSetting) -> None:
    if setting.value == "disable":
        model.note(setting, "dropped", "batches always roll if the model's class supports it; max_batch is batch_size")
    elif setting.value == "vllm":
        model.note(setting, "mapped", "engine")
    else:
        model.note(setting, "dropped", "always, if the model's class supports it")


def _loader(model: Conversion, setting: LmiSetting) -> None:
    one_of(*ENGINES)(setting.value)
    model.note(setting, "mapped", "engine")


def _entry_point(model: Conversion, setting: LmiSetting) -> None:
    if setting.value.removeprefix("djl_python.").removesuffix(".py") in HANDLERS:
        model.note(setting, "mapped", "engine")
    else:
        raise ValueError(f"{setting.value[:60]!r} is not LMI's Neuron handler; other handlers are code of their own")


def _devices(model: Conversion, setting: LmiSetting) -> None:
    if setting.value == "*":
        model.note(setting, "dropped", "all cores, as by default")
        return
    matches = [_CORE.fullmatch(device.strip()) for device in setting.value.split(";")]
    degree = model.fields.get("tp_degree", 1)
    starts = [int(match[1]) for match in matches if match]
    if len(starts) != len(matches):
        raise ValueError(f"{setting.value[:60]!r} is not a list of NeuronCores like nc0;nc8")
    model.map(setting, "cores", [f"{start}-{start + degree - 1}" if degree > 1 else str(start) for start in starts])
    model.put("replicas", len(starts), setting.written)


def _workers(model: Conversion, setting: LmiSetting) -> None:
    count = integer(setting.value)
    if (setting.name == "maxWorkers" and count < 1) or count < 0:
        raise ValueError(f"{count} is not a number of workers")
    least = integer(model.text("minWorkers") or "1")
    most = max(least, integer(model.text("maxWorkers") or "1"), 1)
    model.map(setting, "replicas", least if least == most else {"min": least, "max": most})


def _quantize(model: Conversion, setting: LmiSetting) -> None:
    one_of("static_int8")(setting.value)
    model.map(setting, "quantize", "int8")


def _eight_bit(model: Conversion, setting: LmiSetting) -> None:
    if boolean(setting.value):
        model.map(setting, "quantize", "int8")
    else:
        model.note(setting, "dropped", "it is false by default")


def _split(model: Conversion, setting: LmiSetting) -> None:
    if boolean(setting.value):
        model.map(setting, "allow_pickle", True)
    else:
        model.note(setting, "dropped", "split checkpoints are recognized")


def draft_row(model: Conversion, setting: LmiSetting) -> None:
    """The draft of speculative decoding."""
    source_kind(setting.value)
    model.map(setting, "draft.source", setting.value)
    if not any(model.text(name) for name in _LENGTHS):
        model.put("draft.k", 5, "LMI's default of speculative_length")


def drafted_row(model: Conversion, setting: LmiSetting) -> None:
    """The number of tokens that a draft proposes."""
    if any(model.text(name) for name in _DRAFTS):
        model.map(setting, "draft.k", integer(setting.value))
    else:
        model.note(setting, "dropped", "there is no draft model")


def _remote_code(model: Conversion, setting: LmiSetting) -> None:
    if not boolean(setting.value):
        model.note(setting, "dropped", "it is false by default")
    elif model.trust_remote_code:
        model.map(setting, "trust_remote_code", True)
    else:
        model.note(setting, "dropped", "the checkpoint's code is trusted only with --trust-remote-code")


def _unroll(model: Conversion, setting: LmiSetting) -> None:
    if setting.value.lower() == "none":
        model.note(setting, "dropped", "LMI's default")
    else:
        _option(integer)(model, setting)


def _sharding(model: Conversion, setting: LmiSetting) -> None:
    known = one_of("shard-over-heads", "shard-over-batch", "replicated-heads", "all-gather-heads")
    if model.fields.get("engine") != "transformers-neuronx":
        model.note(setting, "dropped", "an option of transformers-neuronx")
    else:
        model.map(setting, "group_query_attention", known(setting.value))


def _on_device(model: Conversion, setting: LmiSetting) -> None:
    if setting.value.lower() in ("false", "0"):
        model.note(setting, "dropped", "it is false by default")
    else:
        model.map(setting, "sampling", "device")


def _length(model: Conversion, setting: LmiSetting) -> None:
    model.map(setting, "max_len", integer(setting.value))


def _speed(model: Conversion, setting: LmiSetting) -> None:
    if (level := integer(setting.value)) not in (1, 2, 3):
        raise ValueError(f"{level} is none of 1, 2, 3")
    model.map(setting, "compiler.optlevel", level)


ROWS: Mapping[str, Row] = {
    **plain_rows("neuron"),
    "model_id": _source,
    "s3url": _source,
    MODEL_DATA: _model_data,
    IMAGE: dropped("only its version of LMI counts, if --lmi-version names no other"),
    "trust_remote_code": _remote_code,
    "entryPoint": _entry_point,
    "model_loader": _loader,
    "rolling_batch": _rolling_batch,
    "tensor_parallel_degree": degree_row,
    "load_on_devices": _devices,
    "minWorkers": _workers,
    "maxWorkers": _workers,
    "batch_size": _static_batch,
    "max_dynamic_batch_size": _static_batch,
    "n_positions": _length,
    "max_model_len": _length,
    "quantize": _quantize,
    "load_in_8bit": _eight_bit,
    "neuron_quant": _eight_bit,
    "unroll": _unroll,
    "group_query_attention": _sharding,
    "neuron_optimize_level": _speed,
    "enable_mixed_precision_accumulation": _flag("--enable-mixed-precision-accumulation"),
    "enable_saturate_infinity": _flag("--enable-saturate-infinity"),
    "NEURON_CC_FLAGS": lambda model, setting: _add_flags(model, setting, setting.value),
    "load_split_model": _split,
    "speculative_draft_model": draft_row,
    "draft_model_id": draft_row,
    "speculative_length": drafted_row,
    "spec_length": drafted_row,
    "on_device_generation": _on_device,
}


def reason_for(setting: LmiSetting, loader: str) -> str:
    """Returns why a setting without a row is dropped with LMI's loader. Its value may be a secret, and is not shown."""
    name = setting.written
    if _SECRETS & {word.lower() for word in _WORD.findall(name)}:
        return "a secret is not copied; set it where `corewright up` runs"
    if name.startswith(("cpu.", "gpu.")):
        return "of machines with CPUs or GPUs"
    if name.startswith("NEURON_RT_"):
        return "replicas get it from the plan"
    if name.startswith(("SERVING_", "MODEL_SERVER_", "SAGEMAKER_", "JAVA_", "DJL_")):
        return "a setting of the container"
    if ENGINES.get(loader) == "vllm":
        return "neither LMI nor a recorded version of vLLM reads it"
    return "LMI's Neuron handler does not read it"
