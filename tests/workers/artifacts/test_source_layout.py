"""Which files of a source are fetched, and how models are laid out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.artifacts.sources.layout import layout_of, metadata_files, selected, served_by
from workers.artifacts.sources.listing import Listing, RemoteFile, SourceError
from workers.compiled.manifest import LOCK_FILE

SAFE = ("config.json", "model.safetensors", "tokenizer.json")
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
SPLIT = ("pytorch_model.bin/key_to_filename.json", "pytorch_model.bin/p0.safetensors")
SPLIT_PICKLED = ("pytorch_model.bin/key_to_filename.json", "pytorch_model.bin/p0.bin")
CONFIG = "config.json"
HF_ENGINES = ("cpu", "transformers-neuronx", "nxd-inference", "vllm", "server", "optimum-neuron", "torch-neuronx")


def listed(*names: str) -> Listing:
    files = tuple(RemoteFile(name=name, size=10, tag="t") for name in sorted(names))
    return Listing(source="org/model", revision="c0", files=files)


def taken(*names: str, allow_pickle: bool = False, trust_remote_code: bool = False) -> set[str]:
    result = selected(listed(*names), allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    assert (result.source, result.revision) == ("org/model", "c0")
    return {file.name for file in result.files}


@pytest.mark.parametrize(
    "beside",
    [
        ("pytorch_model.bin",),
        ("pytorch_model-00001-of-00001.bin", "model.pt", "consolidated.00.pth"),
        ("optimizer.pt", "training_args.bin", "rng_state_0.pth"),
        ("model.gguf", "tf_model.h5", "flax_model.msgpack", "model.onnx", "onnx/model.onnx", "64.tflite"),
        ("original/consolidated.00.pth", "runs/events", "coreml/x.mlmodel"),
        ("consolidated.safetensors", "adapter_model.safetensors", "model.fp16.safetensors", "other.safetensors"),
        ("modeling_own.py", "README.md", "logo.png", ".gitattributes"),
        ("corewright-artifact.json", "corewright-head.json"),
        SPLIT_PICKLED,
    ],
)
def test_safetensors_exclude_other_weights(beside: tuple[str, ...]) -> None:
    """Without files of other programs, code, and corewright's own."""
    assert taken(*SAFE, *beside) == set(SAFE)


def test_modules_of_sentence_transformers_are_selected() -> None:
    """With safetensors rather than pickles; their configurations are among the metadata."""
    modules = ("modules.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors")
    beside = ("2_Dense/pytorch_model.bin", "onnx/model.onnx", "1_Pooling/README.md")

    assert taken(*SAFE, *modules, *beside) == {*SAFE, *modules}
    metadata = {file.name for file in metadata_files(listed(*SAFE, *modules)).files}
    assert metadata == {CONFIG, "tokenizer.json", *modules[:3]}


def test_a_module_with_pickled_weights_only_is_rejected() -> None:
    """Unless pickles are allowed."""
    with pytest.raises(SourceError, match=r"2_Dense/pytorch_model\.bin"):
        taken(*SAFE, "2_Dense/pytorch_model.bin")
    assert "2_Dense/pytorch_model.bin" in taken(*SAFE, "2_Dense/pytorch_model.bin", allow_pickle=True)


def test_all_shards_of_an_index_are_selected() -> None:
    """Whatever their names; other precisions and formats are not."""
    others = ("consolidated.safetensors", "model.fp16-00001-of-00001.safetensors")
    assert taken(CONFIG, INDEX, *SHARDS, "odd.safetensors", *others) == {CONFIG, INDEX, *SHARDS, "odd.safetensors"}


@pytest.mark.parametrize(
    "names",
    [
        ("pytorch_model.bin",),
        ("pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"),
        ("consolidated.00.pth",),
        ("weights.ckpt",),
        SPLIT_PICKLED,
        ("neuron_config.json", "model.pt", "model.safetensors"),
        ("checkpoint/pytorch_model.bin", "compiled/a.neff"),
    ],
)
def test_pickles_are_rejected_unless_allowed(names: tuple[str, ...]) -> None:
    """Before anything is fetched; with `allow_pickle` all are selected."""
    with pytest.raises(SourceError, match=r"org/model are pickled") as refused:
        taken(CONFIG, *names)
    assert refused.value.id == "pickle-refused"
    assert taken(CONFIG, *names, allow_pickle=True) == {CONFIG, *names}


def test_only_pickles_that_transformers_reads_are_selected() -> None:
    """Not the original weights beside them."""
    allowed = taken(CONFIG, "pytorch_model.bin", "consolidated.00.pth", allow_pickle=True)
    assert allowed == {CONFIG, "pytorch_model.bin"}


def test_the_record_of_compiled_files_is_selected() -> None:
    """corewright's record beside NEFFs is not a file of the store."""
    names = {CONFIG, "checkpoint/config.json", "checkpoint/model.safetensors", "compiled/a.neff"}
    assert taken(*names, f"compiled/{LOCK_FILE}") == {*names, f"compiled/{LOCK_FILE}"}


def test_python_files_need_trust_remote_code() -> None:
    """They are not fetched otherwise."""
    names = (*SAFE, "modeling_own.py", "tokenization_own.py")
    assert taken(*names) == set(SAFE)
    assert taken(*names, trust_remote_code=True) == set(names)


@pytest.mark.parametrize(
    "name", ["../x.json", "/etc/x.json", "a/../../x", "a//b", "./x", "a/.", "", "x\0.json", "n" * 256]
)
def test_names_that_lead_out_of_the_folder_are_rejected(name: str) -> None:
    """Write access to the bucket gives no write access to the home."""
    with pytest.raises(SourceError) as refused:
        taken(*SAFE, name)
    assert refused.value.id == "name-unsafe"


def test_a_source_without_config_json_is_not_a_model() -> None:
    """Such as a prefix one level too high."""
    with pytest.raises(SourceError, match=r"llama/config\.json") as refused:
        taken("llama/config.json", "llama/model.safetensors")
    assert refused.value.id == "layout-unknown"


@given(
    st.sets(st.sampled_from([*SAFE, *SHARDS, INDEX, *SPLIT, *SPLIT_PICKLED, "pytorch_model.bin.x", "a.py", "x.bin"]))
)
def test_selecting_twice_equals_selecting_once(names: set[str]) -> None:
    """Excluded files never decide."""
    once = selected(listed(CONFIG, *names), allow_pickle=True, trust_remote_code=True)
    assert selected(once, allow_pickle=True, trust_remote_code=True) == once


@pytest.mark.parametrize(
    ("names", "config", "layout", "engines"),
    [
        (SAFE, {}, "hf", HF_ENGINES),
        ((CONFIG,), {}, "hf", HF_ENGINES),
        ((CONFIG, *SPLIT), {}, "split", ("transformers-neuronx",)),
        (
            (CONFIG, "checkpoint/config.json", "checkpoint/pytorch_model.bin/p0.bin", "compiled/a.neff"),
            {"neuron": {}},
            "optimum",
            ("transformers-neuronx", "optimum-neuron"),
        ),
        (
            (CONFIG, "compiled/a.neff"),
            {"neuron": {"task": "text-generation"}},
            "optimum",
            ("transformers-neuronx", "optimum-neuron"),
        ),
        (
            (CONFIG, "neuron_config.json", "model.pt", "checkpoint/weights/tp0_sharded_checkpoint.safetensors"),
            {},
            "optimum",
            ("optimum-neuron",),
        ),
        ((CONFIG, "neuron_config.json", "model.pt"), {}, "presharded", ("nxd-inference", "optimum-neuron")),
        ((CONFIG, "weights/tp0_sharded_checkpoint.safetensors"), {}, "presharded", ("nxd-inference",)),
        ((CONFIG, "model.pt", "weights/tp0_sharded_checkpoint.safetensors"), {}, "presharded", ("nxd-inference",)),
        ((CONFIG, "tp0_sharded_checkpoint.safetensors"), {}, "presharded", ()),
        ((CONFIG, "a.safetensors"), {"is_presharded_checkpoint": True}, "presharded", ()),
        ((CONFIG, "DecoderLMHead.safetensors", "decoder_layer_0.safetensors"), {}, "presharded", ()),
    ],
)
def test_layouts_are_detected_by_names_and_config(
    names: tuple[str, ...], config: dict[str, object], layout: str, engines: tuple[str, ...]
) -> None:
    """With the engines that load each."""
    result = layout_of(names, config)
    assert (result, served_by(result, names)) == (layout, engines)


def test_a_cache_of_compiled_graphs_is_no_model() -> None:
    """As Optimum Neuron has one on the hub."""
    with pytest.raises(SourceError) as refused:
        layout_of(("neuronxcc-2.21.33363.0/MODULE_123+abc/model.neff", "0_REGISTRY/0.4.5/inference/llama/x.json"))
    assert refused.value.id == "layout-unknown"
    assert "is a cache of compiled graphs" in refused.value.what


def test_metadata_files_are_small_files_of_the_root() -> None:
    """The config and the tokenizer; no weights, index, folders or huge files."""
    huge = RemoteFile(name="vocab.json", size=65 * 2**20, tag="t")
    small = listed(*SAFE, INDEX, "merges.txt", "tokenizer.model", "chat_template.jinja", "compiled/x.json")
    result = metadata_files(Listing(source="s", files=(*small.files, huge)))
    expected = {CONFIG, "tokenizer.json", "merges.txt", "tokenizer.model", "chat_template.jinja"}
    assert {file.name for file in result.files} == expected
