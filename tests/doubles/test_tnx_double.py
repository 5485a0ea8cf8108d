"""The stand-in of transformers-neuronx behaves as the package is described to behave, right and wrong."""

from __future__ import annotations

import importlib
import inspect
import json
import operator
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import EOS_ID
from tests.contracts import contract
from tests.doubles import Neuron
from tests.workers.conftest import checkpoint as checkpoint

Checkpoints = Callable[[str], Path]
CONTRACT = contract("transformers-neuronx")
PROMPTS = [[7, 8, 9, 10, 11], [20, 21, 22]]


@pytest.fixture
def tnx(neuron: Neuron) -> Any:
    import transformers_neuronx

    return transformers_neuronx


def reference(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(path)).eval()


def after(model: Any, tokens: list[int]) -> torch.Tensor:
    """The logits of stock transformers after ``tokens``."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0, -1]
    return logits


def lines(tnx: Any, path: Path, slots: int = 3, kind: str = "LlamaForSampling", **more: Any) -> Any:
    """A model under continuous batching, on the device."""
    batching = tnx.ContinuousBatchingConfig(batch_size_for_shared_caches=slots)
    config = tnx.NeuronConfig(continuous_batching=batching, **more)
    model = getattr(tnx, kind).from_pretrained(
        str(path),
        batch_size=slots,
        n_positions=[64],
        context_length_estimate=[16, 32],
        tp_degree=2,
        amp="f32",
        neuron_config=config,
    )
    model.to_neuron()
    return model


def static(tnx: Any, path: Path, batch: int = 1, **more: Any) -> Any:
    """A model with static batches, on the device. GPT-2's class has a batch of prompts beside."""
    kind = json.loads((path / "config.json").read_text())["model_type"]
    if kind == "gpt2":
        more = {"prompt_batch_size": batch} | more
    arguments = {"batch_size": batch, "n_positions": 64, "tp_degree": 2, "amp": "f32", **more}
    model = tnx.NeuronAutoModelForCausalLM.from_pretrained(str(path), **arguments)
    model.to_neuron()
    return model


def fill(model: Any, prompts: list[list[int]], slots: list[int]) -> torch.Tensor:
    """Prompts padded on the right into ``slots``."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts])
    cache = torch.tensor([[*range(len(prompt)), *[0] * (width - len(prompt))] for prompt in prompts])
    logits: torch.Tensor = model(ids, cache, torch.tensor(slots))
    return logits


def step(model: Any, tokens: list[int], positions: list[int], slots: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor(tokens)[:, None], torch.tensor(positions)[:, None], torch.tensor(slots))
    return logits


# construction


def test_its_signatures_are_the_recorded_ones(tnx: Any) -> None:
    """Parameters by name, kind and default; a list or object as a default may stand for None."""
    checked = 0
    for module, content in CONTRACT.data["snapshots"][CONTRACT.primary]["modules"].items():
        if module not in sys.modules:
            continue
        loaded = sys.modules[module]
        for name, record in content.get("classes", {}).items():
            for method in record.get("methods", {}):
                own = inspect.getattr_static(vars(loaded).get(name), method, None)
                own = getattr(own, "__func__", own)
                if not inspect.isfunction(own) or not own.__module__.startswith("transformers_neuronx"):
                    continue
                if (name, method) == ("NeuronConfig", "__init__"):
                    continue  # takes the recorded names from the contract itself
                expected = CONTRACT.signature(f"{module}.{name}.{method}")
                assert parameters(own) == parameters(expected), f"{module}.{name}.{method}"
                checked += 1
        for name in content.get("functions", {}):
            own = vars(loaded).get(name)
            if own is not None and module not in ("transformers_neuronx.sampling",):
                assert parameters(own) == parameters(CONTRACT.signature(f"{module}.{name}")), f"{module}.{name}"
                checked += 1
    assert checked > 50


def test_every_name_of_the_surface_exists(tnx: Any) -> None:
    """By the dotted names of the contract, inherited methods included."""
    modules = CONTRACT.data["snapshots"][CONTRACT.primary]["modules"]
    missing = []
    for dotted in CONTRACT.surface:
        module = max((name for name in modules if dotted.startswith(f"{name}.")), key=len)
        try:
            operator.attrgetter(dotted.removeprefix(f"{module}."))(importlib.import_module(module))
        except AttributeError:
            missing.append(dotted)
    assert (missing, len(CONTRACT.surface)) == ([], 28)


def parameters(of: Any) -> list[tuple[str, str, str]]:
    signature = of if isinstance(of, inspect.Signature) else inspect.signature(of)
    return [
        (parameter.name, parameter.kind.name, _default(parameter.default))
        for parameter in signature.parameters.values()
    ]


def _default(value: Any) -> str:
    text = repr(value)
    return "None" if text in ("[]", "dict()", "{}") or "NeuronConfig" in text else text


def test_a_call_that_the_recorded_signature_does_not_take_is_a_type_error(tnx: Any, checkpoint: Checkpoints) -> None:
    """As with the package itself; llama's class alone swallows what it does not know."""
    model = lines(tnx, checkpoint("mistral"), kind="MistralForSampling")
    with pytest.raises(TypeError):
        model(torch.tensor([[1]]), cache_offset=torch.tensor([0]))


def test_the_tp_degree_is_2_where_none_is_given(tnx: Any, checkpoint: Checkpoints) -> None:
    """Of every class."""
    kinds = ("llama", "mistral", "mixtral", "gpt2", "opt", "bloom", "gptj", "gpt_neox")
    degrees = [tnx.NeuronAutoModelForCausalLM.from_pretrained(str(checkpoint(kind))).tp_degree for kind in kinds]
    assert degrees == [2] * len(kinds)


def test_an_unknown_option_is_an_assertion(tnx: Any) -> None:
    """And no TypeError."""
    with pytest.raises(AssertionError, match="fuse_kqv"):
        tnx.NeuronConfig(fuse_kqv=True)


def test_an_older_version_has_its_own_options(tnx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16_rms_norm came after the release of SDK 2.21."""
    tnx.NeuronConfig(bf16_rms_norm=True)
    monkeypatch.setenv("NEURON_DOUBLE_TNX_VERSION", "0.13-release-2.21")
    with pytest.raises(AssertionError):
        tnx.NeuronConfig(bf16_rms_norm=True)


def test_a_context_longer_than_the_positions_is_refused(tnx: Any, checkpoint: Checkpoints) -> None:
    """max(n_positions) must be at least max(context_length_estimate)."""
    with pytest.raises(AssertionError, match="n_positions"):
        tnx.LlamaForSampling.from_pretrained(
            str(checkpoint("llama")), n_positions=[64], context_length_estimate=[32, 128]
        )


def test_the_batch_size_is_that_of_the_shared_caches(tnx: Any, checkpoint: Checkpoints) -> None:
    """Under continuous batching."""
    config = tnx.NeuronConfig(continuous_batching=tnx.ContinuousBatchingConfig(batch_size_for_shared_caches=4))
    with pytest.raises(AssertionError, match="batch_size"):
        tnx.LlamaForSampling.from_pretrained(str(checkpoint("llama")), batch_size=2, neuron_config=config)


def test_gpt2_refuses_unknown_keywords_and_a_context_of_0(tnx: Any, checkpoint: Checkpoints) -> None:
    """A KeyError from its configuration."""
    path = str(checkpoint("gpt2"))
    with pytest.raises(KeyError):
        tnx.GPT2ForSamplingWithContextBroadcasting.from_pretrained(path, nonsense=1)
    with pytest.raises(AssertionError):
        tnx.GPT2ForSamplingWithContextBroadcasting.from_pretrained(path, context_length_estimate=0)


def test_gptj_and_gpt_neox_take_no_context_length_and_one_n_positions(tnx: Any, checkpoint: Checkpoints) -> None:
    """Nor can they be saved or loaded."""
    for kind, name in ((tnx.GPTJForSampling, "gptj"), (tnx.GPTNeoXForSampling, "gpt_neox")):
        with pytest.raises(KeyError):
            kind.from_pretrained(str(checkpoint(name)), context_length_estimate=32)
        with pytest.raises(AssertionError):
            kind.from_pretrained(str(checkpoint(name)), n_positions=[64])
        assert not hasattr(kind, "save")
        assert not hasattr(kind, "load")


def test_a_model_type_outside_of_the_registry_is_refused(tnx: Any, checkpoint: Checkpoints) -> None:
    """There is no gpt_bigcode and no qwen2."""
    with pytest.raises(KeyError):
        tnx.NeuronAutoModelForCausalLM.from_pretrained(str(checkpoint("qwen2")))


# continuous batching


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "LlamaForSampling"), ("mistral", "MistralForSampling"), ("mixtral", "MixtralForSampling")],
)
def test_prompts_and_steps_of_lines_equal_transformers(
    family: str, kind: str, tnx: Any, checkpoint: Checkpoints
) -> None:
    """Ragged prompts in one call, in lines out of order; then a step for both."""
    stock, model = reference(checkpoint(family)), lines(tnx, checkpoint(family), kind=kind)
    first = fill(model, PROMPTS, [2, 0])
    assert torch.allclose(first, torch.stack([after(stock, prompt) for prompt in PROMPTS]), atol=1e-4)
    second = step(model, [31, 30], [3, 5], [0, 2])
    assert torch.allclose(
        second, torch.stack([after(stock, [*PROMPTS[1], 31]), after(stock, [*PROMPTS[0], 30])]), atol=1e-4
    )


def test_a_line_without_a_row_loses_its_position_0(tnx: Any, checkpoint: Checkpoints) -> None:
    """It runs token 0 at position 0, and nothing is said."""
    stock, model = reference(checkpoint("llama")), lines(tnx, checkpoint("llama"))
    fill(model, PROMPTS, [0, 1])
    step(model, [30], [5], [0])  # line 1 is left out
    logits = step(model, [31, 32], [6, 3], [0, 1])
    assert torch.allclose(logits[0], after(stock, [*PROMPTS[0], 30, 31]), atol=1e-4)
    assert not torch.allclose(logits[1], after(stock, [*PROMPTS[1], 32]), atol=1e-2)


def test_a_prompt_of_one_token_is_a_step(tnx: Any, checkpoint: Checkpoints) -> None:
    """At position 0, so that the other lines lose theirs."""
    stock, model = reference(checkpoint("llama")), lines(tnx, checkpoint("llama"))
    fill(model, [PROMPTS[0]], [0])
    logits = fill(model, [[42]], [1])
    assert torch.allclose(logits[0], after(stock, [42]), atol=1e-4)
    assert not torch.allclose(step(model, [30, 31], [5, 1], [0, 1])[0], after(stock, [*PROMPTS[0], 30]), atol=1e-2)


def test_a_prompt_beyond_the_largest_bucket_is_an_assertion(tnx: Any, checkpoint: Checkpoints) -> None:
    """Under continuous batching."""
    model = lines(tnx, checkpoint("llama"))
    with pytest.raises(AssertionError, match="invalid input prompt length"):
        fill(model, [list(range(6, 6 + 33))], [0])


def test_positions_of_a_step_have_the_dtype_of_its_tokens(tnx: Any, checkpoint: Checkpoints) -> None:
    """0.13 scatters them into a tensor of that dtype; those of a prompt may be int32."""
    model = lines(tnx, checkpoint("llama"))
    model(torch.tensor([[7, 8]]), torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([0]))
    with pytest.raises(RuntimeError, match=r"self\.dtype to be equal to src\.dtype"):
        model(torch.tensor([[9]]), torch.tensor([[2]], dtype=torch.int32), torch.tensor([0]))


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_position_beyond_the_token_buckets_is_a_stop_iteration(
    family: str, tnx: Any, checkpoint: Checkpoints
) -> None:
    """The package looks for a bucket with a bare ``next``."""
    if family == "llama":
        model, position = lines(tnx, checkpoint("llama")), torch.tensor([[64]])
        with pytest.raises(StopIteration):
            model(torch.tensor([[9]]), position, torch.tensor([0]))
        return
    with pytest.raises(StopIteration):
        static(tnx, checkpoint("opt"))(torch.tensor([[9]]), torch.tensor([64], dtype=torch.int32))


def test_unsorted_rows_of_a_step_are_refused(tnx: Any, checkpoint: Checkpoints) -> None:
    """Stricter than the package, which only asks for it."""
    model = lines(tnx, checkpoint("llama"))
    fill(model, PROMPTS, [0, 1])
    with pytest.raises(AssertionError, match="not sorted"):
        step(model, [31, 30], [3, 5], [1, 0])


def test_several_tokens_behind_a_prompt_are_speculation(tnx: Any, checkpoint: Checkpoints) -> None:
    """[tokens, vocab, rows]; of batches that were enabled before, and of no others."""
    stock = reference(checkpoint("llama"))
    batching = tnx.ContinuousBatchingConfig(batch_size_for_shared_caches=2)
    model = tnx.LlamaForSampling.from_pretrained(
        str(checkpoint("llama")),
        batch_size=2,
        n_positions=[64],
        neuron_config=tnx.NeuronConfig(continuous_batching=batching),
    )
    model.enable_speculative_decoder(3)
    model.to_neuron()
    fill(model, PROMPTS, [0, 1])
    ids, cache = torch.tensor([[30, 31, 32], [40, 41, 42]]), torch.tensor([[5, 6, 7], [3, 4, 5]])
    logits = model.speculative_forward(ids, cache, torch.tensor([0, 1]), 3)
    assert list(logits.shape[::2]) == [3, 2]
    assert torch.allclose(logits[1, :, 1], after(stock, [*PROMPTS[1], 40, 41]), atol=1e-4)
    with pytest.raises(AssertionError, match="invalid batch size"):
        model.speculative_forward(ids[:1], cache[:1], torch.tensor([0]), 3)


def test_runs_shorter_than_the_slots_fail(tnx: Any, checkpoint: Checkpoints) -> None:
    """Of a continuous batch: a number for each slot is cut to the tokens of a run."""
    batching = tnx.ContinuousBatchingConfig(batch_size_for_shared_caches=3)
    config = tnx.NeuronConfig(continuous_batching=batching)
    model = tnx.LlamaForSampling.from_pretrained(
        str(checkpoint("llama")), batch_size=3, n_positions=[64], neuron_config=config
    )
    model.enable_speculative_decoder([2, 3])
    model.to_neuron()
    fill(model, [PROMPTS[0]] * 3, [0, 1, 2])
    ids, cells = torch.tensor([[30, 31, 32]] * 3), torch.tensor([[5, 6, 7]] * 3)
    model.speculative_forward(ids, cells, torch.arange(3), 3)
    with pytest.raises(AssertionError, match="different shapes"):
        model.speculative_forward(ids[:, :2], cells[:, :2], torch.arange(3), 2)


def test_other_classes_do_not_batch_continuously(tnx: Any, checkpoint: Checkpoints) -> None:
    """It shows with the first prompt."""
    config = tnx.NeuronConfig(continuous_batching=tnx.ContinuousBatchingConfig(batch_size_for_shared_caches=2))
    model = static(tnx, checkpoint("opt"), batch=2, neuron_config=config)
    with pytest.raises(AssertionError, match="dynamic batching"):
        model(torch.tensor([[7, 8], [9, 10]]))


# static batches


@pytest.mark.parametrize("family", ["gpt2", "opt", "bloom", "gpt_neox", "mistral"])
def test_static_batches_are_padded_on_the_left(family: str, tnx: Any, checkpoint: Checkpoints) -> None:
    """start_ids is the padding of each row, cache_ids one position for all. GPT-NeoX has gelu_new for gelu."""
    stock, model = reference(checkpoint(family)), static(tnx, checkpoint(family), batch=2)
    starts = torch.tensor([0, 2], dtype=torch.int32)
    ids = torch.tensor([PROMPTS[0], [0, 0, *PROMPTS[1]]])
    arguments = [ids, torch.arange(5, dtype=torch.int32)] if family == "gpt_neox" else [ids, None]
    first = model(*arguments, starts)
    assert torch.allclose(first, torch.stack([after(stock, prompt) for prompt in PROMPTS]), atol=5e-3)
    second = model(torch.tensor([[30], [31]]), torch.tensor([5], dtype=torch.int32), starts)
    assert torch.allclose(second[1], after(stock, [*PROMPTS[1], 31]), atol=5e-3)


def test_llama_answers_nan_to_padding(tnx: Any, checkpoint: Checkpoints) -> None:
    """Static batches of different lengths are nothing for it."""
    model = static(tnx, checkpoint("llama"), batch=2)
    ids = torch.tensor([PROMPTS[0], [0, 0, *PROMPTS[1]]])
    assert model(ids, None, torch.tensor([0, 2])).isnan().any(dim=1).tolist() == [False, True]


def test_gptj_attends_to_position_0_alone(tnx: Any, checkpoint: Checkpoints) -> None:
    """Right for one token, wrong from the second on; and start_ids change nothing."""
    stock, model = reference(checkpoint("gptj")), static(tnx, checkpoint("gptj"))
    assert torch.allclose(model(torch.tensor([[7]]), torch.arange(1))[0], after(stock, [7]), atol=1e-4)
    logits = model(torch.tensor([[7, 8, 9]]), torch.arange(3))
    assert not torch.allclose(logits[0], after(stock, [7, 8, 9]), atol=1e-1)
    assert torch.equal(logits, model(torch.tensor([[7, 8, 9]]), torch.arange(3), torch.tensor([1])))


def test_gpt_neox_and_gpt2_compute_gelu_new(tnx: Any, checkpoint: Checkpoints) -> None:
    """In place of gelu, without a word."""
    for family, key in (("gpt_neox", "hidden_act"), ("gpt2", "activation_function")):
        model = static(tnx, checkpoint(family))
        assert getattr((model._life if family == "gpt_neox" else model)._device.config, key) == "gelu_new"


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_log_softmax_scores_is_no_mere_addition(family: str, tnx: Any, checkpoint: Checkpoints) -> None:
    """GPT-2 returns a pair, and the graphs of the others do not build."""
    config = tnx.NeuronConfig(log_softmax_scores=True)
    if family == "llama":
        with pytest.raises(AttributeError, match="post_layer_builder"):
            static(tnx, checkpoint("llama"), neuron_config=config)
        return
    logits, scores = static(tnx, checkpoint("gpt2"), neuron_config=config)(torch.tensor([[7, 8]]))
    assert torch.allclose(logits.log_softmax(-1), scores, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "opt", "bloom"])
def test_static_classes_have_no_kv_cache_of_one_byte(family: str, tnx: Any, checkpoint: Checkpoints) -> None:
    """Their graphs do not build."""
    from transformers_neuronx.config import KVCacheQuantizationConfig

    config = tnx.NeuronConfig(kv_cache_quant=KVCacheQuantizationConfig("f8e4m3fn", "f32"))
    with pytest.raises(AssertionError, match="inconsistent dtype"):
        static(tnx, checkpoint(family), neuron_config=config)


def test_an_int8_kv_cache_loses_fractions(tnx: Any, checkpoint: Checkpoints) -> None:
    """No scale: the step after a prompt is nothing like the exact one."""
    from transformers_neuronx.config import KVCacheQuantizationConfig

    def error(model: Any) -> float:
        fill(model, [PROMPTS[0]], [0])
        return float((step(model, [30], [5], [0]) - expected).abs().max())

    expected = after(reference(checkpoint("llama")), [*PROMPTS[0], 30])
    fp8, int8 = (
        error(lines(tnx, checkpoint("llama"), kv_cache_quant=KVCacheQuantizationConfig(kind, "f32")))
        for kind in ("f8e4m3fn", "s8")
    )
    assert int8 > 5 * fp8


def test_a_batch_that_was_not_compiled_is_refused(tnx: Any, checkpoint: Checkpoints) -> None:
    """Of static batches."""
    with pytest.raises(ValueError, match="not compiled for batch_size"):
        static(tnx, checkpoint("opt"), batch=2)(torch.tensor([[7, 8]]))


def test_what_exceeds_the_largest_bucket_goes_token_by_token(
    tnx: Any, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call of the device for 8 tokens, and one for each of the 3 others; GPT-J's for all."""
    from neuron_double.runtime import Runtime

    steps: list[None] = []
    monkeypatch.setattr(Runtime, "execute", lambda self: steps.append(None))
    static(tnx, checkpoint("opt"), context_length_estimate=8)(torch.tensor([list(range(10, 21))]))
    assert len(steps) == 4
    steps.clear()
    static(tnx, checkpoint("gptj"))(torch.tensor([list(range(10, 21))]), torch.arange(11))
    assert len(steps) == 11


def test_one_prompt_of_gpt2_becomes_a_batch(tnx: Any, checkpoint: Checkpoints) -> None:
    """prompt_batch_size 1: the rows go on apart."""
    stock, model = reference(checkpoint("gpt2")), static(tnx, checkpoint("gpt2"), batch=2, prompt_batch_size=1)
    model(torch.tensor([PROMPTS[0]]))
    logits = model(torch.tensor([[30], [31]]), torch.tensor([5], dtype=torch.int32))
    assert torch.allclose(logits, torch.stack([after(stock, [*PROMPTS[0], token]) for token in (30, 31)]), atol=1e-4)
    with pytest.raises(RuntimeError, match="takes 1 rows"):
        model(torch.tensor([PROMPTS[0], PROMPTS[0]]))


def test_forward_before_to_neuron_is_refused(tnx: Any, checkpoint: Checkpoints) -> None:
    """Nothing is on the device yet."""
    model = tnx.LlamaForSampling.from_pretrained(str(checkpoint("llama")))
    with pytest.raises(RuntimeError, match="before to_neuron"):
        model(torch.tensor([[7, 8]]))


# buckets


def test_buckets_are_as_the_package_makes_them(tnx: Any) -> None:
    """``find`` takes the largest where none is large enough."""
    from transformers_neuronx import bucket

    assert bucket.token_sizes(600) == [128, 256, 512, 600]
    assert bucket.token_sizes([256, 64]) == [64, 256]
    assert bucket.context_sizes(None, [128, 256]) == [64, 128]
    assert bucket.context_sizes(0) == []
    assert bucket.context_sizes(32) == [32]
    assert bucket.find([64, 128], 65) == 128
    assert bucket.find([64, 128], 129) == 128


# sampling on the device


def test_the_device_samples_each_line_by_its_own_parameters(tnx: Any, checkpoint: Checkpoints) -> None:
    """Lists by line, after update_generation_config; ids of [rows, 1]."""
    how = {"do_sample": True, "dynamic": True, "per_batch_line": True, "top_p": [1.0] * 3, "temperature": [1.0] * 3}
    model = lines(tnx, checkpoint("llama"), on_device_generation=tnx.GenerationConfig(top_k=[1] * 3, **how))
    stock = reference(checkpoint("llama"))
    greedy = int(after(stock, PROMPTS[0]).argmax())
    assert fill(model, [PROMPTS[0]], [1]).tolist() == [[greedy]]
    torch.manual_seed(0)
    model.update_generation_config(tnx.GenerationConfig(top_k=[1, 200, 1], **(how | {"temperature": [1.0, 8.0, 1.0]})))
    drawn = [fill(model, [PROMPTS[0]] * 3, [0, 1, 2]).flatten().tolist() for _ in range(20)]
    assert {row[0] for row in drawn} == {row[2] for row in drawn} == {greedy}
    assert len({row[1] for row in drawn}) > 5


def test_the_device_samples_from_256_ids_at_most(tnx: Any, checkpoint: Checkpoints) -> None:
    """And not at 0."""
    for top_k in (0, 257):
        how = tnx.GenerationConfig(do_sample=True, dynamic=True, top_k=top_k)
        with pytest.raises(AssertionError, match="top_k"):
            fill(lines(tnx, checkpoint("llama"), on_device_generation=how), [PROMPTS[0]], [0])


def test_only_a_dynamic_configuration_is_updated(tnx: Any, checkpoint: Checkpoints) -> None:
    """What is not dynamic is part of the graph."""
    model = lines(tnx, checkpoint("llama"), on_device_generation=tnx.GenerationConfig())
    with pytest.raises(AssertionError, match="dynamic"):
        model.update_generation_config(tnx.GenerationConfig(top_k=4))


# quantization, grouped-query attention, heads


def test_quantization_changes_the_numbers_a_little(tnx: Any, checkpoint: Checkpoints) -> None:
    """int8 and fp8 weights."""
    exact = fill(lines(tnx, checkpoint("llama")), [PROMPTS[0]], [0])
    for dtype in ("s8", "f8e4m3fn"):
        quant = tnx.QuantizationConfig(quant_dtype=dtype, dequant_dtype="f32")
        rounded = fill(lines(tnx, checkpoint("llama"), quant=quant), [PROMPTS[0]], [0])
        difference = (rounded - exact).abs().max() / exact.abs().max()
        assert 0 < difference < 0.3, dtype


def test_a_quantized_kv_cache_shows_in_the_next_step_only(tnx: Any, checkpoint: Checkpoints) -> None:
    """A prompt does not read it."""
    from transformers_neuronx.config import KVCacheQuantizationConfig

    quantized = lines(tnx, checkpoint("llama"), kv_cache_quant=KVCacheQuantizationConfig("f8e4m3fn"))
    exact = lines(tnx, checkpoint("llama"))
    assert torch.allclose(fill(quantized, [PROMPTS[0]], [0]), fill(exact, [PROMPTS[0]], [0]))
    assert not torch.allclose(step(quantized, [30], [5], [0]), step(exact, [30], [5], [0]))


def test_a_strategy_that_does_not_fit_falls_back_with_a_warning(tnx: Any, checkpoint: Checkpoints) -> None:
    """2 KV heads on 4 cores cannot be sharded over heads."""
    config = tnx.NeuronConfig(group_query_attention=tnx.GQA.SHARD_OVER_HEADS)
    with pytest.warns(UserWarning, match="falling back to replicated-heads"):
        tnx.LlamaForSampling.from_pretrained(str(checkpoint("llama")), tp_degree=4, neuron_config=config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = tnx.NeuronConfig(group_query_attention=tnx.GQA.SHARD_OVER_HEADS)
        tnx.LlamaForSampling.from_pretrained(str(checkpoint("llama")), tp_degree=2, neuron_config=config)


def test_heads_that_do_not_divide_are_padded_but_not_by_gptj(tnx: Any, checkpoint: Checkpoints) -> None:
    """4 heads on 8 cores."""
    static(tnx, checkpoint("gpt2"), tp_degree=8)
    for family in ("gptj", "gpt_neox"):
        with pytest.raises(ValueError, match="cannot shard"):
            static(tnx, checkpoint(family), tp_degree=8)


# artifacts and the device


def test_a_saved_model_loads_without_compiling(tnx: Any, checkpoint: Checkpoints, tmp_path: Path) -> None:
    """One NEFF for each graph, named by a hash of its text."""
    from neuron_double.compiler import compiles

    model = lines(tnx, checkpoint("llama"))
    model.save(str(tmp_path / "neffs"))
    before = len(compiles())
    assert sorted(path.suffix for path in (tmp_path / "neffs").iterdir()) == [".neff"] * 3
    again = tnx.LlamaForSampling.from_pretrained(
        str(checkpoint("llama")),
        batch_size=3,
        n_positions=[64],
        context_length_estimate=[16, 32],
        tp_degree=2,
        neuron_config=tnx.NeuronConfig(
            continuous_batching=tnx.ContinuousBatchingConfig(batch_size_for_shared_caches=3), compilation_worker_count=1
        ),
    )
    again.load(str(tmp_path / "neffs"))
    again.to_neuron()
    assert len(compiles()) == before
    assert torch.equal(fill(again, PROMPTS, [0, 1]), fill(model, PROMPTS, [0, 1]))


def test_a_neff_that_does_not_match_shows_after_the_cores_are_claimed(
    tnx: Any, checkpoint: Checkpoints, tmp_path: Path, neuron: Neuron
) -> None:
    """``load`` itself only remembers the folder."""
    model = tnx.LlamaForSampling.from_pretrained(str(checkpoint("llama")), n_positions=64)
    model.load(str(tmp_path / "nothing"))
    assert neuron.held() == {}
    with pytest.raises(FileNotFoundError, match="matching NEFF"):
        model.to_neuron()
    assert set(neuron.held().values()) == {os.getpid()}


def test_what_was_compiled_once_comes_from_the_persistent_cache(
    tnx: Any, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At NEURON_COMPILE_CACHE_URL; other flags are another entry."""
    from neuron_double.compiler import compiles

    static(tnx, checkpoint("opt"))
    count = len(compiles())
    assert list((tmp_path / "neuron-compile-cache").glob("neuronxcc-*/MODULE_*/model.done"))
    static(tnx, checkpoint("opt"))
    assert len(compiles()) == count
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O1")
    static(tnx, checkpoint("opt"))
    assert len(compiles()) == 2 * count
    assert compiles()[-1]["flags"] == "-O1 --model-type=transformer --auto-cast=none --execute-repetition=1"


def test_compiling_on_the_host_claims_no_cores(
    tnx: Any, checkpoint: Checkpoints, neuron: Neuron, tmp_path: Path
) -> None:
    """``cpu_compile``, after which the model can be saved; before it cannot."""
    model = tnx.LlamaForSampling.from_pretrained(str(checkpoint("llama")), n_positions=64)
    with pytest.raises(AssertionError, match="successfully compiled"):
        model.save(str(tmp_path / "neffs"))
    model.cpu_compile()
    model.save(str(tmp_path / "neffs"))
    assert neuron.held() == {}


def test_more_cache_than_memory_is_refused(tnx: Any, checkpoint: Checkpoints) -> None:
    """By real sizes: 2 layers of 2 heads of 16 numbers, for 2**28 positions, on 2 cores."""
    with pytest.raises(RuntimeError, match="status=4"):
        static(tnx, checkpoint("llama"), n_positions=2**28)


def test_a_degree_beyond_the_own_cores_is_refused(
    tnx: Any, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cores are numbered from 0 within the process."""
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "4-5")
    static(tnx, checkpoint("llama"), tp_degree=2)
    with pytest.raises(RuntimeError, match="Could not find VNC id 2"):
        static(tnx, checkpoint("llama"), tp_degree=4)


def test_a_fault_of_the_device_comes_out_of_forward(tnx: Any, checkpoint: Checkpoints, neuron: Neuron) -> None:
    """As the runtime words it."""
    model = lines(tnx, checkpoint("llama"))
    neuron.plan({"at": "execute", "count": 2, "status": 1201})
    fill(model, [PROMPTS[0]], [0])
    with pytest.raises(RuntimeError, match="status=1201"):
        step(model, [30], [5], [0])


def test_split_checkpoints_are_read(tnx: Any, checkpoint: Checkpoints, tmp_path: Path) -> None:
    """What save_pretrained_split writes."""
    from transformers_neuronx.module import save_pretrained_split

    stock = reference(checkpoint("llama"))
    save_pretrained_split(stock, str(tmp_path / "split"))
    assert (tmp_path / "split" / "pytorch_model.bin" / "key_to_filename.json").exists()
    logits = fill(lines(tnx, tmp_path / "split"), [PROMPTS[0]], [0])
    assert torch.allclose(logits[0], after(stock, PROMPTS[0]), atol=1e-4)


# speculation


def test_speculation_that_was_not_enabled_is_a_key_error(tnx: Any, checkpoint: Checkpoints) -> None:
    """enable_speculative_decoder comes before to_neuron."""
    model = static(tnx, checkpoint("llama"))
    with pytest.raises((KeyError, AssertionError)):
        model.speculative_forward(torch.tensor([[7, 8]]), torch.tensor([1, 2]), None, 2)


def test_importlib_finds_it_as_a_distribution(tnx: Any) -> None:
    """importlib.metadata has its version."""
    from importlib.metadata import version

    assert version("transformers-neuronx").startswith("0.13")
    assert EOS_ID not in (PROMPTS[0] + PROMPTS[1])
