"""The stand-in of NxD Inference: each promise and each trap of the real one."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.contracts import contract
from tests.doubles import Neuron, neuron  # noqa: F401 - the fixture

PACKAGE = "neuronx_distributed_inference"
VERSIONS = contract("nxd-inference").versions
MAX_LEN = 64
PROMPT = [7, 300, 21, 8, 90]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("nxdi") / "llama", "llama", eos=None)


def nxdi(module: str) -> Any:
    return importlib.import_module(f"{PACKAGE}.{module}")


def llama() -> Any:
    return nxdi("models.llama.modeling_llama")


def configured(source: Path, **options: Any) -> Any:
    """An InferenceConfig of the tiny model in float32: 3 slots of 64 tokens, batched continuously."""
    usual = {"batch_size": 3, "tkg_batch_size": 3, "ctx_batch_size": 1, "is_continuous_batching": True}
    neuron_config = nxdi("models.config").NeuronConfig(
        **{"tp_degree": 2, "seq_len": MAX_LEN, "torch_dtype": torch.float32, **usual, **options}
    )
    return llama().LlamaInferenceConfig(
        neuron_config, load_config=nxdi("utils.hf_adapter").load_pretrained_config(str(source))
    )


def loaded(source: Path, out: Path, config: Any = None, **options: Any) -> Any:
    """Compiled and loaded."""
    config = configured(source, **options) if config is None else config
    llama().NeuronLlamaForCausalLM(str(source), config).compile(str(out))
    model = llama().NeuronLlamaForCausalLM(str(source), llama().LlamaInferenceConfig.load(str(out)))
    model.load(str(out))
    return model


def prefill(model: Any, slots: list[int], prompts: list[list[int]], **more: Any) -> Any:
    width = max(2, *(len(prompt) for prompt in prompts))
    rows = [prompt + [0] * (width - len(prompt)) for prompt in prompts]
    places = [[*range(len(prompt)), *[0] * (width - len(prompt))] for prompt in prompts]
    return model.forward(
        input_ids=torch.tensor(rows), position_ids=torch.tensor(places), seq_ids=torch.tensor(slots), **more
    )


def decode(model: Any, slots: list[int], tokens: list[int], positions: list[int], **more: Any) -> Any:
    return model.forward(
        input_ids=torch.tensor(tokens)[:, None],
        position_ids=torch.tensor(positions)[:, None],
        seq_ids=torch.tensor(slots),
        **more,
    )


def expected(source: Path, ids: list[int]) -> torch.Tensor:
    """The logits after ``ids`` of transformers' own model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(source))
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0, -1]
    return logits


@pytest.fixture
def machine(neuron: Neuron, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Neuron:  # noqa: F811
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-1")
    monkeypatch.setenv("BASE_COMPILE_WORK_DIR", str(tmp_path / "work"))
    return neuron


# -- Names and options, by version


@pytest.mark.parametrize("version", VERSIONS)
def test_every_signature_is_the_recorded_one(machine: Neuron, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """What the stand-in shows and binds is the version's, and its own code takes every parameter of it."""
    monkeypatch.setenv("NEURON_DOUBLE_NXDI_VERSION", version)
    recorded = contract("nxd-inference")
    checked = 0
    for dotted in recorded.surface:
        if recorded.role(dotted) == "class":
            continue
        module, _, path = dotted.partition(".models.")[0], "", dotted
        function = _found(path)
        if not recorded.has(dotted, version):
            assert function is None, f"{dotted} is not in {version}"
            continue
        assert function is not None, dotted
        wished = recorded.signature(dotted, version)
        own = inspect.signature(inspect.unwrap(function))
        assert str(inspect.signature(function)) in (str(wished), str(_without_first(wished))), dotted
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.parameters.values()):
            assert {name for name in wished.parameters if name not in ("self", "cls")} <= set(own.parameters), dotted
        checked += 1
    assert checked >= 15, module


def _without_first(signature: inspect.Signature) -> inspect.Signature:
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _found(dotted: str) -> Any:
    """The stand-in's own, or None."""
    parts = dotted.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            value = getattr(value, name, None)  # type: ignore[assignment]
        return value
    return None


@pytest.mark.parametrize("version", VERSIONS)
def test_the_registry_and_the_options_are_those_of_the_version(
    machine: Neuron, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """Architectures, option names and literal defaults, and the metadata, are what was recorded."""
    monkeypatch.setenv("NEURON_DOUBLE_NXDI_VERSION", version)
    data = contract("nxd-inference").data
    snapshot = data["snapshots"].get(version) or data["other_revisions"][version]
    wished = snapshot["registries"][f"{PACKAGE}.utils.constants.MODEL_TYPES"]
    types = nxdi("utils.constants").MODEL_TYPES
    assert {
        arch: {task: model_class.__name__ for task, model_class in tasks.items()} for arch, tasks in types.items()
    } == wished
    options = contract("nxd-inference").options(f"{PACKAGE}.models.config.NeuronConfig", version)
    defaults = vars(nxdi("models.config").NeuronConfig())
    assert set(options) <= set(defaults) | {"torch_dtype", "logical_neuron_cores", "overrides_torch_dtype"}
    assert defaults["save_sharded_checkpoint"] is (version == "0.2")
    assert nxdi("models.config").OnDeviceSamplingConfig().do_sample is False
    installed = importlib.metadata.version("neuronx-distributed-inference")
    assert installed.startswith(snapshot["version"])


def test_mistral_is_missing_before_0_9(machine: Neuron, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module cannot be imported in 0.8, and can in 0.9."""
    with pytest.raises(ModuleNotFoundError):
        nxdi("models.mistral.modeling_mistral")
    monkeypatch.setenv("NEURON_DOUBLE_NXDI_VERSION", "0.9")
    for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
        monkeypatch.delitem(sys.modules, name)
    assert nxdi("models.mistral.modeling_mistral").NeuronMistralForCausalLM


def test_an_unknown_option_is_only_logged(machine: Neuron, caplog: pytest.LogCaptureFixture) -> None:
    """A misspelt name is no error, which is why options are checked before."""
    with caplog.at_level(logging.WARNING):
        config = nxdi("models.config").NeuronConfig(seq_length=4096)
    assert "seq_length" in caplog.text
    assert config.seq_len == 128


def test_a_call_that_the_version_does_not_take_is_refused(machine: Neuron, source: Path, tmp_path: Path) -> None:
    """``dry_run`` is none of load's parameters."""
    with pytest.raises(TypeError, match="dry_run"):
        loaded(source, tmp_path / "out").load(str(tmp_path / "out"), dry_run=True)


def test_the_environment_overrides_the_lnc_option(machine: Neuron, monkeypatch: pytest.MonkeyPatch) -> None:
    """NEURON_LOGICAL_NC_CONFIG before the keyword before the platform."""
    config = nxdi("models.config").NeuronConfig
    monkeypatch.setenv("NEURON_DOUBLE_INSTANCE", "trn2.48xlarge")
    lncs = [config().logical_nc_config, config(logical_nc_config=1).logical_nc_config]
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    assert [*lncs, config(logical_nc_config=1).logical_nc_config] == [2, 1, 2]


def test_a_missing_attribute_of_the_model_is_refused(machine: Neuron) -> None:
    """An InferenceConfig without the checkpoint's attributes does not validate."""
    with pytest.raises(AssertionError, match="hidden_size"):
        llama().LlamaInferenceConfig(nxdi("models.config").NeuronConfig())


# -- Compile and load


def test_a_compiled_folder_holds_weights_only_with_save_sharded_checkpoint(
    machine: Neuron, source: Path, tmp_path: Path
) -> None:
    """neuron_config.json and model.pt always, one file for each rank with save_sharded_checkpoint."""
    for name, sharded in (("plain", False), ("sharded", True)):
        config = configured(source, save_sharded_checkpoint=sharded)
        llama().NeuronLlamaForCausalLM(str(source), config).compile(str(tmp_path / name))
    assert sorted(file.name for file in (tmp_path / "plain").iterdir()) == ["model.pt", "neuron_config.json"]
    assert sorted(file.name for file in (tmp_path / "sharded" / "weights").iterdir()) == [
        "tp0_sharded_checkpoint.safetensors",
        "tp1_sharded_checkpoint.safetensors",
    ]
    assert machine.held() == {}


def test_is_compiled_joins_strings(machine: Neuron, source: Path, tmp_path: Path) -> None:
    """Without a slash at its end no path is compiled."""
    out = tmp_path / "out"
    llama().NeuronLlamaForCausalLM(str(source), configured(source)).compile(str(out))
    is_compiled = nxdi("models.application_base").is_compiled
    assert (is_compiled(f"{out}/"), is_compiled(str(out))) == (True, False)


def test_a_model_is_not_loaded_before_it_is_compiled(machine: Neuron, source: Path, tmp_path: Path) -> None:
    """FileNotFoundError, and no core is held; nor does an unloaded model run."""
    model = llama().NeuronLlamaForCausalLM(str(source), configured(source))
    with pytest.raises(FileNotFoundError):
        model.load(str(tmp_path / "out"))
    with pytest.raises(RuntimeError, match="Forward called before load"):
        prefill(model, [0], [PROMPT])
    assert machine.held() == {}


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_another_process_loads_what_was_compiled(machine: Neuron, source: Path, tmp_path: Path, sharded: bool) -> None:
    """The folder is enough; without sharded weights, the original checkpoint must be where it was."""
    moved = shutil.copytree(source, tmp_path / "model")
    out = tmp_path / "out"
    llama().NeuronLlamaForCausalLM(str(moved), configured(moved, save_sharded_checkpoint=sharded)).compile(str(out))
    program = (
        "import sys, torch\n"
        f"from {PACKAGE}.models.llama.modeling_llama import NeuronLlamaForCausalLM as M\n"
        "m = M(sys.argv[2], M.get_config_cls().load(sys.argv[1])); m.load(sys.argv[1])\n"
        f"o = m.forward(input_ids=torch.tensor([{PROMPT}]), position_ids=torch.arange({len(PROMPT)})[None],"
        " seq_ids=torch.tensor([1]))\n"
        "print(int(o.logits[0, -1].argmax()))\n"
    )
    if sharded:
        shutil.rmtree(moved)
    env = os.environ | machine.env
    run = subprocess.run(
        [sys.executable, "-c", program, str(out), str(out if sharded else moved)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) == int(expected(source, PROMPT).argmax())


def test_weights_are_read_again_from_the_original(machine: Neuron, source: Path, tmp_path: Path) -> None:
    """Without sharded weights a checkpoint that is gone ends the load."""
    moved = shutil.copytree(source, tmp_path / "model")
    config = configured(moved)
    llama().NeuronLlamaForCausalLM(str(moved), config).compile(str(tmp_path / "out"))
    shutil.rmtree(moved)
    with pytest.raises(OSError):
        llama().NeuronLlamaForCausalLM(str(tmp_path / "out")).load(str(tmp_path / "out"))


def test_two_compiles_in_one_work_folder_collide(
    machine: Neuron, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ends up with the graphs of the second, or with none, and says so at the latest when it is loaded."""
    base = nxdi("models.application_base")
    cached_compile = base.cached_compile

    def meanwhile(*args: Any, **kwargs: Any) -> bytes:
        monkeypatch.setattr(base, "cached_compile", cached_compile)
        llama().NeuronLlamaForCausalLM(str(source), configured(source, tkg_batch_size=2)).compile(str(tmp_path / "b"))
        result: bytes = cached_compile(*args, **kwargs)
        return result

    monkeypatch.setattr(base, "cached_compile", meanwhile)
    llama().NeuronLlamaForCausalLM(str(source), configured(source)).compile(str(tmp_path / "a"))
    with pytest.raises(RuntimeError, match="other shapes"):
        llama().NeuronLlamaForCausalLM(str(tmp_path / "a")).load(str(tmp_path / "a"))


def test_a_neff_of_another_lnc_or_version_is_not_loaded(
    machine: Neuron, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime says so, when cores are held already."""
    monkeypatch.setenv("NEURON_DOUBLE_NEFF_VERSION", "3")
    with pytest.raises(RuntimeError, match="NEFF version mismatch"):
        loaded(source, tmp_path / "new")
    monkeypatch.delenv("NEURON_DOUBLE_NEFF_VERSION")
    importlib.import_module("neuron_double.runtime").reset_for_tests()
    monkeypatch.setenv("NEURON_DOUBLE_INSTANCE", "trn2.48xlarge")
    monkeypatch.setenv("BASE_COMPILE_WORK_DIR", str(tmp_path / "other"))  # else the persistent cache has the graphs
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    llama().NeuronLlamaForCausalLM(str(source), configured(source)).compile(str(tmp_path / "one"))
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    with pytest.raises(RuntimeError, match="lnc 1"):
        llama().NeuronLlamaForCausalLM(str(tmp_path / "one")).load(str(tmp_path / "one"))


def test_a_degree_beyond_the_visible_cores_is_refused(machine: Neuron, source: Path, tmp_path: Path) -> None:
    """A degree of 4 on two cores."""
    with pytest.raises(RuntimeError, match="Could not find VNC id 2"):
        loaded(source, tmp_path / "out", tp_degree=4)


def test_weights_and_kv_cache_take_memory_of_the_device(machine: Neuron, source: Path, tmp_path: Path) -> None:
    """A KV cache of 60 GB does not fit into two cores of 16."""
    with pytest.raises(RuntimeError, match="nrt_tensor_allocate status=4"):
        loaded(source, tmp_path / "out", seq_len=40_000_000)


def test_warm_up_can_be_skipped(machine: Neuron, source: Path, tmp_path: Path) -> None:
    """A fault of the first execution comes in ``load``, or later with skip_warmup."""
    machine.plan({"at": "execute", "count": 1, "status": 5})
    model = loaded(source, tmp_path / "out", skip_warmup=True)
    with pytest.raises(RuntimeError, match="status=5"):
        prefill(model, [0], [PROMPT])


# -- Prefill and decode


@pytest.mark.parametrize("version", VERSIONS)
def test_rows_decode_as_the_model_itself_would(
    machine: Neuron, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """Ragged prompts in unsorted slots, then all slots sorted, each at its own position; in every version."""
    monkeypatch.setenv("NEURON_DOUBLE_NXDI_VERSION", version)
    model = loaded(source, tmp_path / "out")
    prompts = {2: PROMPT, 0: [9, 8], 1: [44] * 11}
    first = prefill(model, list(prompts), list(prompts.values())).logits[:, -1]
    tokens = dict(zip(prompts, first.argmax(dim=-1).tolist(), strict=True))
    assert tokens == {slot: int(expected(source, prompt).argmax()) for slot, prompt in prompts.items()}
    slots = [0, 1, 2]
    logits = decode(model, slots, [tokens[s] for s in slots], [len(prompts[s]) for s in slots]).logits[:, -1]
    for slot in slots:
        assert torch.allclose(logits[slot], expected(source, [*prompts[slot], tokens[slot]]), atol=1e-4)


def test_a_length_that_equals_a_bucket_goes_to_the_next(machine: Neuron) -> None:
    """Only the largest bucket takes its own length, and nothing is longer, unless input is cut."""
    target = nxdi("models.model_wrapper").target_bucket
    chosen = [target([8, 16, 32], length, 0, False, "x") for length in (7, 8, 16, 32)]
    assert chosen == [8, 16, 32, 32]
    assert target([8, 16, 32], 40, 0, True, "x") == 32
    with pytest.raises(ValueError, match="exceeds largest bucket"):
        target([8, 16, 32], 33, 0, False, "x")


def test_a_prompt_beyond_the_largest_bucket_is_refused(machine: Neuron, source: Path, tmp_path: Path) -> None:
    """So it is in ``forward``: the context length is the limit, and not the sequence length."""
    model = loaded(source, tmp_path / "out", max_context_length=16)
    with pytest.raises(ValueError, match="exceeds largest bucket"):
        prefill(model, [0], [[5] * 17])


def test_buckets_double_and_end_with_the_longest(machine: Neuron) -> None:
    """The last power of two below it is left to rounding."""
    generate = nxdi("modules.autobucketing").generate_buckets
    ladders = [generate(128, 128), generate(128, 1024), generate(128, 1500), generate(128, 1400)]
    assert ladders == [[128], [128, 256, 512, 1024], [128, 256, 512, 1024, 1500], [128, 256, 512, 1400]]


def test_the_length_of_a_prompt_is_its_largest_position(machine: Neuron, source: Path, tmp_path: Path) -> None:
    """Positions that go on into the padding make the padding part of the prompt."""
    model = loaded(source, tmp_path / "out")
    row = torch.tensor([[*PROMPT, 0, 0, 0]])
    wrong = model.forward(input_ids=row, position_ids=torch.arange(8)[None], seq_ids=torch.tensor([0]))
    assert torch.allclose(wrong.logits[0, -1], expected(source, [*PROMPT, 0, 0, 0]), atol=1e-4)


def test_a_mask_of_another_length_changes_the_answer(machine: Neuron, source: Path, tmp_path: Path) -> None:
    """Left padding is one of the ways to get there."""
    model = loaded(source, tmp_path / "out")
    mask = torch.ones(1, len(PROMPT), dtype=torch.long)
    right = prefill(model, [0], [PROMPT], attention_mask=mask).logits
    mask[0, :3] = 0
    assert not torch.equal(right, prefill(model, [0], [PROMPT], attention_mask=mask).logits)


def test_a_full_batch_is_taken_in_the_order_of_its_rows(machine: Neuron, source: Path, tmp_path: Path) -> None:
    """Row i is cache line i, so unsorted seq_ids give the answers of other slots; a smaller batch is scattered."""
    model = loaded(source, tmp_path / "out")
    prompts = [PROMPT, [9, 8, 7, 6, 5], [44] * 5]
    prefill(model, [0, 1, 2], prompts)
    rows = [2, 0, 1]
    wrong = decode(model, rows, [50] * 3, [5] * 3).logits[0, -1]
    prefill(model, [0, 1, 2], prompts)
    right = decode(model, rows[:2], [50] * 2, [5] * 2).logits[0, -1]
    assert torch.allclose(right, expected(source, [*prompts[2], 50]), atol=1e-4)
    assert not torch.allclose(wrong, right, atol=1e-2)


@pytest.mark.parametrize("masks", [False, True])
def test_a_slot_that_is_left_out_is_overwritten(machine: Neuron, source: Path, tmp_path: Path, masks: bool) -> None:
    """With row 0's token at row 0's position, unless apply_seq_ids_mask is on."""
    model = loaded(source, tmp_path / "out", apply_seq_ids_mask=masks)
    prefill(model, [0, 2], [PROMPT, [44] * 9])
    decode(model, [0], [50], [len(PROMPT)])
    logits = decode(model, [2], [50], [9]).logits[0, -1]
    assert torch.allclose(logits, expected(source, [*[44] * 9, 50]), atol=1e-4) is masks


def test_a_prefill_of_fewer_rows_than_its_graph_fills_the_other_lines(
    machine: Neuron, source: Path, tmp_path: Path
) -> None:
    """With row 0's prompt; which is why the context graph is compiled for one row."""
    model = loaded(source, tmp_path / "out", ctx_batch_size=3)
    prefill(model, [2], [[44] * 9])
    prefill(model, [0], [PROMPT])
    logits = decode(model, [2], [50], [9]).logits[0, -1]
    assert not torch.allclose(logits, expected(source, [*[44] * 9, 50]), atol=1e-2)


def test_a_prompt_of_one_token_is_a_decode(machine: Neuron, source: Path, tmp_path: Path) -> None:
    """At position 0, of all other slots too."""
    model = loaded(source, tmp_path / "out")
    prefill(model, [2], [[44] * 9])
    decode(model, [0], [50], [0])
    logits = decode(model, [2], [50], [9]).logits[0, -1]
    assert not torch.allclose(logits, expected(source, [*[44] * 9, 50]), atol=1e-2)


def test_more_rows_than_compiled_are_refused(machine: Neuron, source: Path, tmp_path: Path) -> None:
    """Four rows of three."""
    with pytest.raises(ValueError, match="compiled batch size 3"):
        decode(loaded(source, tmp_path / "out"), [0, 1, 2, 3], [5] * 4, [0] * 4)


def test_chunked_prefill_is_not_implemented(machine: Neuron, source: Path, tmp_path: Path) -> None:
    """It can be configured all the same."""
    chunks = nxdi("models.config").ChunkedPrefillConfig(max_num_seqs=2)
    model = loaded(source, tmp_path / "out", chunked_prefill_config=chunks)
    with pytest.raises(NotImplementedError):
        prefill(model, [0], [PROMPT])


# -- Sampling on the device


def sampled(source: Path, out: Path, **how: Any) -> Any:
    how = {"do_sample": True, "dynamic": True, **how}
    return loaded(source, out, on_device_sampling_config=nxdi("models.config").OnDeviceSamplingConfig(**how))


def params(rows: list[tuple[float, float, float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def test_the_device_gives_tokens_and_no_logits(machine: Neuron, source: Path, tmp_path: Path) -> None:
    """In ``tokens`` and ``hidden_states``; with top_k 1 it is the largest logit."""
    output = prefill(sampled(source, tmp_path / "out"), [1], [PROMPT], sampling_params=params([(1, 1.0, 1.0)]))
    token = int(expected(source, PROMPT).argmax())
    assert (output.tokens.tolist(), output.hidden_states.tolist(), output.logits) == ([token], [token], None)


def test_without_do_sample_every_request_is_greedy(machine: Neuron, source: Path, tmp_path: Path) -> None:
    """Which is the default, also where the parameters are dynamic."""
    model = sampled(source, tmp_path / "out", do_sample=False)
    output = prefill(model, [1], [PROMPT], sampling_params=params([(0, 1.0, 5.0)]))
    assert output.tokens.tolist() == [int(expected(source, PROMPT).argmax())]


@pytest.mark.parametrize("top_k", [0, -1])
def test_top_k_0_draws_uniformly_from_the_vocabulary(machine: Neuron, source: Path, tmp_path: Path, top_k: int) -> None:
    """Uniformly from the vocabulary, however cold: it does not switch the cut off."""
    torch.manual_seed(0)
    model = sampled(source, tmp_path / "out")
    tokens = {
        int(prefill(model, [1], [PROMPT], sampling_params=params([(top_k, 1.0, 0.01)])).tokens) for _ in range(12)
    }
    assert len(tokens) > 6


def test_top_k_and_top_p_cut_on_the_device(machine: Neuron) -> None:
    """Every token that comes is among the two largest, or within top_p."""
    sampling = nxdi("modules.generation.sampling")
    how = SimpleNamespace(on_device_sampling_config=SimpleNamespace(do_sample=True, dynamic=True, deterministic=False))
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    sampler, best = sampling.Sampler(how), logits.topk(2).indices[0].tolist()
    largest = {int(sampler(logits, params([(2, 1.0, 9.0)]))) for _ in range(50)}
    nucleus = {int(sampler(logits, params([(256, 1e-6, 9.0)]))) for _ in range(20)}
    assert (largest, nucleus) == (set(best), {best[0]})


@pytest.mark.parametrize(
    "row", [(257, 1.0, 1.0), (-2, 1.0, 1.0), (1.5, 1.0, 1.0), (1, 0.0, 1.0), (1, 1.1, 1.0), (1, 1.0, 0.0)]
)
def test_sampling_parameters_out_of_range_are_refused(
    machine: Neuron, source: Path, tmp_path: Path, row: tuple[float, float, float]
) -> None:
    """top_k beyond global_topk, top_p of 0, a temperature of 0."""
    with pytest.raises(ValueError, match="Invalid"):
        prefill(sampled(source, tmp_path / "out"), [0], [PROMPT], sampling_params=params([row]))


# -- Quantization and speculation


def test_quantized_weights_need_their_own_file(machine: Neuron, source: Path, tmp_path: Path) -> None:
    """quantized without a path is refused at once; a path with nothing there when it is loaded."""
    with pytest.raises(AssertionError, match="quantized_checkpoints_path"):
        configured(source, quantized=True)
    with pytest.raises(FileNotFoundError):
        loaded(source, tmp_path / "out", quantized=True, quantized_checkpoints_path=str(tmp_path / "none"))


def test_saved_quantized_weights_are_int8_and_near(machine: Neuron, source: Path, tmp_path: Path) -> None:
    """int8 with scales, and logits that are near the model's own without being them."""
    from safetensors.torch import load_file

    options = {"quantized": True, "quantized_checkpoints_path": str(tmp_path / "q")}
    config = configured(source, quantization_type="per_channel_symmetric", **options)
    llama().NeuronLlamaForCausalLM.save_quantized_state_dict(str(source), config)
    stored = load_file(tmp_path / "q" / "model.safetensors")
    assert stored["model.layers.0.mlp.up_proj.weight"].dtype == torch.int8
    logits = prefill(loaded(source, tmp_path / "out", config), [0], [PROMPT]).logits[0, -1]
    away = (logits - expected(source, PROMPT)).abs().mean() / expected(source, PROMPT).abs().mean()
    assert 0 < away < 0.2


def test_fp8_needs_two_variables(
    machine: Neuron, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA_HANDLE_SPECIAL_SCALAR and UNSAFE_FP8FNCAST, also for a quantized KV cache."""
    with pytest.raises(RuntimeError, match="UNSAFE_FP8FNCAST"):
        loaded(source, tmp_path / "out", kv_cache_quant=True)
    allow_fp8(monkeypatch)
    assert loaded(source, tmp_path / "out", kv_cache_quant=True).is_loaded_to_neuron


def allow_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_HANDLE_SPECIAL_SCALAR", "1")
    monkeypatch.setenv("UNSAFE_FP8FNCAST", "1")


@pytest.mark.parametrize(("version", "halved"), [("0.7", True), ("0.8", False), ("0.9", False)])
def test_kv_cache_quant_is_the_switch_up_to_0_7(
    machine: Neuron, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, halved: bool
) -> None:
    """From 0.8 on only kv_quant_config is, and kv_cache_quant changes nothing but the compiler's flags."""
    monkeypatch.setenv("NEURON_DOUBLE_NXDI_VERSION", version)
    allow_fp8(monkeypatch)
    plain, quantized = (loaded(source, tmp_path / str(on), kv_cache_quant=on) for on in (False, True))
    assert "fp8e4m3" in quantized.models[0].compiler_args
    assert quantized._kv_bytes(quantized.config) * (4 if halved else 1) == plain._kv_bytes(plain.config)


def test_a_kv_quant_config_is_written_but_not_read_back(machine: Neuron, source: Path, tmp_path: Path) -> None:
    """Its enumerations become mappings in neuron_config.json."""
    configured(source, kv_quant_config={"direct_cast": True}).save(str(tmp_path))
    with pytest.raises(AssertionError, match="per tensor"):
        llama().LlamaInferenceConfig.load(str(tmp_path))


@pytest.mark.parametrize(("version", "near"), [("0.6", False), ("0.7", True)])
def test_f8e5m2_is_converted_to_int8_before_0_7(
    machine: Neuron, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, near: bool
) -> None:
    """Without an error: the answers are another model's."""
    monkeypatch.setenv("NEURON_DOUBLE_NXDI_VERSION", version)
    allow_fp8(monkeypatch)
    options = {"quantized": True, "quantized_checkpoints_path": str(tmp_path / "q"), "quantization_dtype": "f8e5m2"}
    config = configured(source, quantization_type="per_channel_symmetric", **options)
    llama().NeuronLlamaForCausalLM.save_quantized_state_dict(str(source), config)
    logits = prefill(loaded(source, tmp_path / "out", config), [0], [PROMPT]).logits[0, -1]
    assert (torch.cosine_similarity(logits, expected(source, PROMPT), dim=0) > 0.9).item() is near


def test_the_compiler_gets_the_flags_of_each_kind_of_graph(
    machine: Neuron, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of ``compiler_args``. NEURON_CC_FLAGS is not read, and the key of the cache holds the work folder."""
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O3")
    for work in ("a", "a", "b"):
        monkeypatch.setenv("BASE_COMPILE_WORK_DIR", str(tmp_path / work))
        model = llama().NeuronLlamaForCausalLM(str(source), configured(source))
        model.models[0].compiler_args += "--my-flag "
        model.compile(str(tmp_path / "out"))
    flags = [str(line["flags"]) for line in importlib.import_module("neuron_double.compiler").compiles()]
    assert ["--my-flag" in graph_flags for graph_flags in flags] == [True, False] * 2
    assert not any("-O3" in graph_flags for graph_flags in flags)


@pytest.mark.parametrize(("version", "sticky"), [("0.2", False), ("0.3", True), ("0.9", True)])
def test_a_failed_compile_is_not_tried_again(
    machine: Neuron, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, sticky: bool
) -> None:
    """ModelBuilder compiles through the persistent cache since SDK 2.23, of NxD Inference 0.3."""
    monkeypatch.setenv("NEURON_DOUBLE_NXDI_VERSION", version)
    machine.plan({"at": "compile", "exit": 70, "times": 1})
    model = llama().NeuronLlamaForCausalLM(str(source), configured(source))
    with pytest.raises(RuntimeError, match="failed with 70"):
        model.compile(str(tmp_path / "out"))
    with pytest.raises(RuntimeError, match="cached failed neff") if sticky else contextlib.nullcontext():
        model.compile(str(tmp_path / "out"))


def fused(source: Path, draft: Path, out: Path, length: int = 4) -> Any:
    """Target and draft in one artifact."""
    package = nxdi("models.config")
    options = {"speculation_length": length, "enable_fused_speculation": True}
    config = configured(source, **options)
    config.fused_spec_config = package.FusedSpecNeuronConfig(
        llama().NeuronLlamaForCausalLM._model_cls,
        draft_config=configured(draft),
        draft_model_path=str(draft),
    )
    return loaded(source, out, config)


def greedy(source: Path, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(expected(source, ids).argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("own", [True, False])
def test_fused_speculation_returns_the_accepted_tokens(
    machine: Neuron, source: Path, tmp_path: Path, own: bool
) -> None:
    """Padded tokens first and the next positions last, for each row; they are the target's own greedy tokens."""
    stranger = make_checkpoint(tmp_path / "stranger", "llama", seed=9, layers=1, eos=None)
    model = fused(source, source if own else stranger, tmp_path / "out")
    begun = prefill(model, [0, 1], [PROMPT, [44] * 9])
    first = begun.fused_outputs[0][:, 0].tolist()
    step = decode(model, [0, 1], first, [len(PROMPT), 9])
    accepted, ends = step.fused_outputs[0], step.fused_outputs[-1].squeeze(-1)
    counts = (ends - torch.tensor([len(PROMPT), 9])).tolist()
    runs = [accepted[row, :count].tolist() for row, count in enumerate(counts)]
    wished = [greedy(source, prompt, 1 + count) for prompt, count in zip((PROMPT, [44] * 9), counts, strict=True)]
    assert [[token, *row] for token, row in zip(first, runs, strict=True)] == wished
    assert (min(counts) == 4) if own else (min(counts) < 4)
    assert step.logits is None


def test_a_fused_step_needs_room_for_all_its_tokens(machine: Neuron, source: Path, tmp_path: Path) -> None:
    """Four tokens from position 61 on do not fit into 64."""
    model = fused(source, source, tmp_path / "out")
    prefill(model, [0], [[44] * 61])
    with pytest.raises(ValueError, match="exceeds largest bucket"):
        decode(model, [0], [5], [61])


@pytest.mark.parametrize(("version", "inferred"), [("0.2", 64), ("0.4", 32), ("0.8", 32)])
def test_a_step_takes_its_graph_by_the_width_of_the_mask(
    machine: Neuron, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, inferred: int
) -> None:
    """Given or inferred: in 0.2 an inferred one is as wide as a slot."""
    monkeypatch.setenv("NEURON_DOUBLE_NXDI_VERSION", version)
    model = loaded(source, tmp_path / "out", enable_bucketing=True, token_generation_buckets=[16, 32, 64])
    prefill(model, [0], [[44] * 20])
    model.taken.clear()
    right = decode(model, [0], [5], [20]).logits
    decode(model, [0], [5], [20], attention_mask=torch.ones(1, 20, dtype=torch.long))
    wide = decode(model, [0], [5], [20], attention_mask=torch.ones(1, 40, dtype=torch.long)).logits
    assert [bucket for _, bucket in model.taken] == [inferred, 32, 64]
    assert not torch.equal(wide, right)


def test_the_mask_of_a_step_does_not_count_its_own_token(machine: Neuron, source: Path, tmp_path: Path) -> None:
    """Its place in the cache would be read before it is written."""
    model = loaded(source, tmp_path / "out")
    prefill(model, [0], [PROMPT])
    right = decode(model, [0], [5], [len(PROMPT)]).logits
    for count, same in ((len(PROMPT), True), (len(PROMPT) + 1, False), (len(PROMPT) - 1, False)):
        mask = torch.ones(1, count, dtype=torch.long)
        assert torch.equal(decode(model, [0], [5], [len(PROMPT)], attention_mask=mask).logits, right) is same


def test_speculation_without_fusion_gives_logits_of_every_token(machine: Neuron, source: Path, tmp_path: Path) -> None:
    """As many tokens as speculation_length, from a position that is not 0."""
    model = loaded(source, tmp_path / "out", speculation_length=3)
    prefill(model, [0], [PROMPT])
    output = model.forward(
        input_ids=torch.tensor([[4, 5, 6]]), position_ids=torch.tensor([[5, 6, 7]]), seq_ids=torch.tensor([0])
    )
    assert torch.allclose(output.logits[0, 1], expected(source, [*PROMPT, 4, 5]), atol=1e-4)


# -- generate


def generates(source: Path, out: Path, **options: Any) -> Any:
    """The package's adapter of a model with one row."""
    model = loaded(source, out, **{"batch_size": 1, "tkg_batch_size": 1, **options})
    return nxdi("utils.hf_adapter").HuggingFaceGenerationAdapter(model)


@pytest.mark.parametrize("version", ["0.7", "0.8"])
def test_generate_fails_at_every_call_in_0_7_and_0_8(
    machine: Neuron, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """``prepare_inputs_for_generation`` reads a name that it never assigns."""
    monkeypatch.setenv("NEURON_DOUBLE_NXDI_VERSION", version)
    with pytest.raises(NameError, match="tensor_capture_hook"):
        generates(source, tmp_path / "out").generate(torch.tensor([PROMPT]), max_new_tokens=3)


def test_generate_needs_the_compiled_batch(
    machine: Neuron, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One prompt of three is refused, and so are beams."""
    monkeypatch.setenv("NEURON_DOUBLE_NXDI_VERSION", "0.9")
    adapter = nxdi("utils.hf_adapter").HuggingFaceGenerationAdapter(loaded(source, tmp_path / "out"))
    with pytest.raises(ValueError, match="compiled batch size is 3"):
        adapter.generate(torch.tensor([PROMPT]), max_new_tokens=3)
    with pytest.raises(NotImplementedError):
        adapter.generate(torch.tensor([PROMPT] * 3), max_new_tokens=3, num_beams=2)


@pytest.mark.parametrize(("version", "kept"), [("0.2", True), ("0.3", False), ("0.9", False)])
def test_generate_replaces_sampling_params_from_0_3_on(
    machine: Neuron, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, kept: bool
) -> None:
    """By what the GenerationConfig says, or has by default: a greedy request is sampled from 50 tokens."""
    monkeypatch.setenv("NEURON_DOUBLE_NXDI_VERSION", version)
    torch.manual_seed(0)
    how = {"do_sample": True, "dynamic": True}
    adapter = generates(
        source, tmp_path / "out", on_device_sampling_config=nxdi("models.config").OnDeviceSamplingConfig(**how)
    )
    prompt, greedy_params = torch.tensor([PROMPT]), params([(1, 1.0, 1.0)])
    first = {adapter.generate(prompt, max_new_tokens=1, sampling_params=greedy_params)[0, -1].item() for _ in range(8)}
    assert (first == {int(expected(source, PROMPT).argmax())}) is kept


@pytest.mark.parametrize("speculates", [False, True])
def test_generate_answers_as_the_model_would(
    machine: Neuron, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speculates: bool
) -> None:
    """Greedily on the host, and the streamer sees the prompt first and then each token."""
    monkeypatch.setenv("NEURON_DOUBLE_NXDI_VERSION", "0.9")
    put: list[list[int]] = []
    streamer = SimpleNamespace(put=lambda value: put.append(value.flatten().tolist()), end=lambda: put.append([]))
    single = {"batch_size": 1, "tkg_batch_size": 1}
    if speculates:
        config = configured(source, speculation_length=3, enable_fused_speculation=True, **single)
        config.fused_spec_config = nxdi("models.config").FusedSpecNeuronConfig(
            None, draft_config=configured(source, **single), draft_model_path=str(source)
        )
        model = loaded(source, tmp_path / "out", config)
    else:
        model = loaded(source, tmp_path / "out", **single)
    adapter = nxdi("utils.hf_adapter").HuggingFaceGenerationAdapter(model)
    answer = adapter.generate(torch.tensor([PROMPT]), max_new_tokens=7, streamer=streamer)[0].tolist()
    wished = greedy(source, PROMPT, 7)
    assert answer == [*PROMPT, *wished]
    assert put == [PROMPT, *([token] for token in wished), []]


def test_the_saved_configuration_is_the_one_that_was_compiled(machine: Neuron, source: Path, tmp_path: Path) -> None:
    """neuron_config.json tells it all, and loads into an equal one."""
    config = configured(source, enable_bucketing=True, context_encoding_buckets=[16, 64])
    config.save(str(tmp_path))
    again = llama().LlamaInferenceConfig.load(str(tmp_path))
    assert json.loads(again.to_json_string()) == json.loads(config.to_json_string())
    assert again.neuron_config.torch_dtype is torch.float32
