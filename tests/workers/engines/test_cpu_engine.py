"""The CPU engine against transformers' own ``generate``, and its errors for broken checkpoints."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Any

import pytest

from placements.engines.cpu.capabilities import CPU_ROPES
from placements.facts.checkpoints import Checkpoint
from tests.checkpoints import EOS_ID, FAMILIES, MAX_POSITIONS, VOCAB_SIZE, WINDOW, byte_level_tokenizer, set_eos
from tests.tiers import everyday
from workers.batching.batcher import Batcher
from workers.engines.cpu.checkpoint import load_model, prepare_forks
from workers.engines.cpu.engine import CpuEngine
from workers.engines.engine_setup import TORCH_DTYPES
from workers.engines.speculative import SpeculativeEngine
from workers.messages.engine_protocol import EngineLoadError, VerifyingEngine
from workers.messages.requests import FinishReason, GenerateRequest, TokenEvent
from workers.text.tokenizer import load_tokenizer

Checkpoints = Callable[[str], Path]
MAX_LEN = 128
ROUNDINGS = 8  # of the last bit, that two orders of summation may differ by in a logit, relative to the largest one


def ragged(count: int, seed: int = 1) -> list[tuple[list[int], int]]:
    """Prompts of 1 to 60 ids, each with its number of tokens to generate."""
    rng = random.Random(seed)
    return [
        ([rng.randrange(6, VOCAB_SIZE) for _ in range(rng.choice([1, 2, rng.randrange(3, 61)]))], rng.randrange(8, 41))
        for _ in range(count)
    ]


class Reference:
    """Each request alone through transformers."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(str(path)).eval()

    def __call__(self, prompt: Sequence[int], n: int, eos: list[int] | None = None, **how: Any) -> list[int]:
        import torch
        from transformers import GenerationConfig

        # generate inherits what is None from the model's own generation config.
        self.model.generation_config.eos_token_id = eos
        config = GenerationConfig(**({"do_sample": False} | how), max_new_tokens=n, eos_token_id=eos, pad_token_id=0)
        ids = torch.tensor([list(prompt)])
        answer = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        tokens: list[int] = answer[0, len(prompt) :].tolist()
        return tokens


class Served:
    """A loaded engine behind a batcher, and the events that came."""

    def __init__(self, path: Path, slots: int = 4, draft: VerifyingEngine | None = None, **engine: Any) -> None:
        self.engine = CpuEngine(path, slots=slots, max_len=MAX_LEN, threads=1, **engine)
        driven = self.engine if draft is None else SpeculativeEngine(self.engine, draft, 3)
        driven.load()
        self.events: defaultdict[str, list[TokenEvent]] = defaultdict(list)
        self.batcher = Batcher(driven, load_tokenizer("cpu", str(path)), self._receive)

    def _receive(self, events: list[TokenEvent]) -> None:
        for event in events:
            self.events[event.id].append(event)

    def submit(self, id: str, prompt: Sequence[int], n: int, ignore_eos: bool = False, **fields: Any) -> None:
        fields = {"temperature": 0.0} | fields
        request = GenerateRequest(id=id, prompt_ids=list(prompt), max_tokens=n, ignore_eos=ignore_eos, **fields)
        self.batcher.submit(request)

    def run_out(self) -> None:
        while self.batcher.step():
            pass

    def ids(self, id: str) -> list[int]:
        return [token for event in self.events[id] for token in event.token_ids]

    def text(self, id: str) -> str:
        return "".join(event.text for event in self.events[id])

    def finish(self, id: str) -> FinishReason | None:
        return self.events[id][-1].finish


def with_families(*fast: str) -> Any:
    """Parametrizes with every family; those outside ``fast`` are slow tests."""
    return pytest.mark.parametrize("family", everyday(FAMILIES, fast), indirect=True, scope="module")


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, checkpoint: Checkpoints) -> tuple[Path, Reference]:
    path = checkpoint(request.param)
    return path, Reference(path)


@with_families("llama", "bloom")
def test_16_ragged_requests_through_4_slots_equal_generate(family: tuple[Path, Reference], tmp_path: Path) -> None:
    """Token for token, with an EOS that ends some of them early, while requests arrive and others are cancelled."""
    path, generate = family
    requests = ragged(16)
    free = [generate(prompt, n) for prompt, n in requests]
    # An EOS that ends several answers before their length, but not all of them.
    inner = Counter(token for answer in free for token in set(answer[:-1]))
    eos = [token for token, answers in inner.most_common() if answers < 8][:2]
    expected = [generate(prompt, n, eos=eos) for prompt, n in requests]
    assert 2 <= sum(answer[-1] in eos for answer in expected) <= 14

    copy = shutil.copytree(path, tmp_path / "model")
    set_eos(copy, eos)
    served = Served(copy)
    # Six requests at once, then one before every step; every third is followed by one that leaves in the middle.
    arrivals = deque[tuple[str, list[int], int, bool]]()
    for number, (prompt, n) in enumerate(requests):
        arrivals.append((str(number), prompt, n, False))
        if number % 3 == 0:
            arrivals.append((f"leaves{number}", [7, 8, 9], 60, True))
    cancelled = set()
    for _ in range(6):
        served.submit(*arrivals.popleft())
    while served.batcher.step() or arrivals:
        if arrivals:
            served.submit(*arrivals.popleft())
        for id in [id for id in served.events if id.startswith("leaves") and len(served.ids(id)) >= 3]:
            served.batcher.cancel(id)
            cancelled.add(id)

    assert [served.ids(str(number)) for number in range(16)] == expected
    assert [served.finish(str(number)) for number in range(16)] == [
        FinishReason.STOP if answer[-1] in eos else FinishReason.LENGTH for answer in expected
    ]
    assert {id: (len(served.ids(id)), served.finish(id)) for id in cancelled} == {
        f"leaves{number}": (3, FinishReason.CANCELLED) for number in range(0, 16, 3)
    }
    decode = byte_level_tokenizer().decode
    for number, (prompt, _) in enumerate(requests):
        answer = expected[number]
        shown = answer[:-1] if answer[-1] in eos else answer
        text = decode(prompt + shown)
        # A prompt of random ids may end inside a character, which the answer then completes.
        shared = len(commonprefix([decode(prompt), text]))  # noqa: RUF071 - characters are what is compared
        assert served.text(str(number)) == text[shared:]


@with_families("llama")  # what is drawn from is compared of all families by the test above
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.8, 0.9), (1.4, 0.5)])
def test_a_seeded_request_equals_generate_under_that_seed(
    family: tuple[Path, Reference], temperature: float, top_p: float
) -> None:
    """Each of eight requests in one batch draws the tokens that generate draws alone after torch.manual_seed."""
    import torch

    path, generate = family
    requests = ragged(8, seed=2)
    expected = []
    for seed, (prompt, n) in enumerate(requests):
        torch.manual_seed(seed)
        expected.append(generate(prompt, n, do_sample=True, temperature=temperature, top_p=top_p, top_k=0))
    served = Served(path)
    for seed, (prompt, n) in enumerate(requests):
        served.submit(str(seed), prompt, n, seed=seed, temperature=temperature, top_p=top_p)
    served.run_out()
    assert [served.ids(str(seed)) for seed in range(8)] == expected


def test_a_seed_gives_the_same_answer_alone_and_in_a_batch(checkpoint: Checkpoints) -> None:
    """What else is in the batch, and in which slot a request lands, changes nothing."""
    served = Served(checkpoint("llama"))
    sampled: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 5}
    served.submit("alone", [10, 11, 12], 30, **sampled)
    served.run_out()
    for number, (prompt, n) in enumerate(ragged(3)):
        served.submit(f"other{number}", prompt, n, temperature=1.0)
    served.submit("among others", [10, 11, 12], 30, **sampled)
    served.run_out()
    assert served.ids("among others") == served.ids("alone")


@with_families("llama")
def test_a_stop_string_cuts_the_text_of_a_model(family: tuple[Path, Reference]) -> None:
    """The text ends before the first occurrence, also when it begins in the middle of a token."""
    path, generate = family
    prompt, n = [20, 21, 22], 30
    text = byte_level_tokenizer().decode(generate(prompt, n))
    stop = text[len(text) // 2 :][:3]
    served = Served(path)
    served.submit("a", prompt, n, stop=[stop], skip_special_tokens=True)
    served.run_out()
    assert served.text("a") == text[: text.index(stop)]
    assert served.finish("a") is FinishReason.STOP


@pytest.mark.parametrize("family_name", everyday(FAMILIES, ("llama", "gpt2", "bloom", "qwen3")))
def test_gaps_between_live_slots_change_nothing(checkpoint: Checkpoints, family_name: str) -> None:
    """Slots 1 and 4 of 6 give bit for bit what the same rows give in slots 0 and 1."""
    import torch

    engine = CpuEngine(checkpoint(family_name), slots=6, max_len=MAX_LEN, threads=1)
    engine.load()
    answers = []
    for slots in ([0, 1], [1, 4]):
        first = engine.prefill(slots, [[5, 6, 7], [8] * 30])
        second = engine.decode(slots, [9, 10], [3, 30])
        answers.append(torch.cat([first, second]))
    assert torch.equal(*answers)


def test_prompts_may_come_in_any_order_of_slots(checkpoint: Checkpoints) -> None:
    """Row i of a prefill is slot ``slots[i]``, sorted or not."""
    import torch

    engine = CpuEngine(checkpoint("gpt2"), slots=4, max_len=MAX_LEN, threads=1)
    engine.load()
    prompts = [[5, 6], [7, 8], [9, 10], [11, 12]]
    answers = []
    for order in ([0, 1, 2, 3], [0, 2, 1, 3]):
        engine.prefill(order, [prompts[slot] for slot in order])
        answers.append(engine.decode([0, 1, 2, 3], [1, 1, 1, 1], [2, 2, 2, 2]))
    assert torch.allclose(answers[0], answers[1], atol=1e-5)


def test_a_decode_keeps_slots_that_are_not_listed(checkpoint: Checkpoints) -> None:
    """keeps_idle_slots is true for this engine: a slot may pause."""
    import torch

    engine = CpuEngine(checkpoint("gpt2"), slots=3, max_len=MAX_LEN, threads=1)
    engine.load()
    engine.prefill([0, 1, 2], [[5, 6, 7], [8, 9], [10]])
    before = engine.decode([1], [11], [2])
    for position in range(1, 20):
        engine.decode([0, 2], [12, 13], [position + 2, position])
    assert torch.equal(engine.decode([1], [11], [2]), before)


def test_a_reused_slot_shows_nothing_of_its_last_request(checkpoint: Checkpoints) -> None:
    """Even NaN, which a mask does not keep out, is gone once it has shown in the logits."""
    import torch

    engine = CpuEngine(checkpoint("llama"), slots=1, max_len=MAX_LEN, threads=1)
    engine.load()
    clean = engine.prefill([0], [[5, 6]]), engine.decode([0], [7], [2])
    with torch.inference_mode():
        for layer in engine._cache.layers:
            layer.values[0, :, 1:] = float("nan")
    assert engine.decode([0], [7], [3]).isnan().any()
    again = engine.prefill([0], [[5, 6]]), engine.decode([0], [7], [2])
    assert all(torch.equal(a, b) for a, b in zip(clean, again, strict=True))


def test_nan_logits_end_only_their_request(checkpoint: Checkpoints, monkeypatch: Any) -> None:
    """The client gets an ERROR with the cause; the neighbour's answer does not change."""
    served = Served(checkpoint("gpt2"))
    served.submit("alone", [8, 9], 10)
    served.run_out()
    decode = served.engine.decode

    def broken(slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> Any:
        logits = decode(slots, tokens, positions).clone()
        logits[[row for row, slot in enumerate(slots) if slot == 0]] = float("nan")
        return logits

    monkeypatch.setattr(served.engine, "decode", broken)
    served.submit("broken", [5, 6], 10)
    served.submit("neighbour", [8, 9], 10)
    served.run_out()
    assert served.finish("broken") is FinishReason.ERROR
    assert "finite" in str(served.events["broken"][-1].error)
    assert served.ids("neighbour") == served.ids("alone")


def test_a_load_without_graphs_runs_nothing(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request, which is that of the replica's trial, reads the mapped weights."""
    monkeypatch.setattr(CpuEngine, "_forward", None)
    engine = CpuEngine(checkpoint("llama"), slots=2, max_len=MAX_LEN)
    engine.load()

    assert engine.spec.max_len == MAX_LEN


def test_the_spec_describes_the_loaded_model(checkpoint: Checkpoints) -> None:
    """Slots, lengths, buckets, vocabulary and kind."""
    engine = CpuEngine(
        checkpoint("llama"), slots=3, max_len=100, prefill_buckets=[10, 50], decode_buckets=[50, 100], threads=1
    )
    with pytest.raises(RuntimeError, match="not loaded"):
        _ = engine.spec
    engine.load()
    spec = engine.spec
    assert (spec.slots, spec.max_len, spec.prefill_buckets, spec.decode_buckets) == (3, 100, (10, 50), (50, 100))
    assert (spec.vocab_size, spec.eos_token_ids, spec.continuous, spec.returns) == (VOCAB_SIZE, set(), True, "logits")
    engine.close()
    with pytest.raises(RuntimeError, match="not loaded"):
        _ = engine.spec


@pytest.mark.parametrize("family_name", ["mistral-window", "qwen3"])
def test_tokens_before_the_sliding_window_are_masked(checkpoint: Checkpoints, tmp_path: Path, family_name: str) -> None:
    """In prompts up to four windows long, and when the answer leaves the prompt's window; the window does matter."""
    path = checkpoint(family_name)
    generate = Reference(path)
    rng = random.Random(3)
    prompts = [[rng.randrange(6, VOCAB_SIZE) for _ in range(length)] for length in (WINDOW - 1, WINDOW, 60, 96)]
    served = Served(path)
    for number, prompt in enumerate(prompts):
        served.submit(str(number), prompt, 30)
    served.run_out()
    assert [served.ids(str(number)) for number in range(4)] == [generate(prompt, 30) for prompt in prompts]
    unlimited = shutil.copytree(path, tmp_path / "unlimited")
    layers = ["full_attention"] * generate.model.config.num_hidden_layers
    own = {"use_sliding_window": False, "layer_types": layers} if family_name == "qwen3" else {}
    edit(unlimited / "config.json", sliding_window=None, **own)
    assert Reference(unlimited)(prompts[3], 30) != served.ids("3")


@with_families("llama", "opt")  # rotary, and learned with an offset
@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_a_chunked_prefill_gives_the_logits_of_a_whole_one(family: tuple[Path, Reference], chunk: int) -> None:
    """Prompts of all lengths around a multiple of the chunk, together; then their answers, token for token."""
    path, generate = family
    rng = random.Random(5)
    lengths = (1, chunk, chunk + 1, 3 * chunk - 1, 90, 60)
    prompts = [[rng.randrange(6, VOCAB_SIZE) for _ in range(length)] for length in lengths]
    served = Served(path, slots=6, prefill_chunk=chunk)
    for number, prompt in enumerate(prompts):
        served.submit(str(number), prompt, 12)
    served.run_out()
    assert [served.ids(str(number)) for number in range(len(prompts))] == [generate(prompt, 12) for prompt in prompts]


@pytest.mark.parametrize(("dtype", "step"), [("bf16", 2.0**-8), ("fp16", 2.0**-11)])
@pytest.mark.parametrize("family_name", everyday(FAMILIES, ("llama", "gpt2", "bloom", "qwen3")))
def test_half_precision_equals_transformers_up_to_rounding(
    checkpoint: Checkpoints, family_name: str, dtype: str, step: float
) -> None:
    """Each greedy token is the best, or as good as that within the rounding, in transformers' own forward pass.

    Not always token for token what generate gives alone: the kernels round otherwise for another number of rows, and
    coarse numbers often tie.
    """
    import torch
    from transformers import AutoModelForCausalLM

    path = checkpoint(family_name)
    model = AutoModelForCausalLM.from_pretrained(str(path), dtype=getattr(torch, TORCH_DTYPES[dtype])).eval()
    served = Served(path, dtype=dtype)
    requests = ragged(6, seed=4)
    for number, (prompt, n) in enumerate(requests):
        served.submit(str(number), prompt, n)
    served.run_out()
    lost = []
    for number, (prompt, n) in enumerate(requests):
        answer = served.ids(str(number))
        assert len(answer) == n
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        lost.append(((logits.max(dim=1).values - chosen) / logits.abs().max()).max().item())
    assert max(lost) <= ROUNDINGS * step


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_answers_in_float32_logits(checkpoint: Checkpoints, dtype: str) -> None:
    """The dtype is that of weights and cache; sampling always sees float32."""
    import torch

    engine = CpuEngine(checkpoint("bloom"), slots=2, max_len=64, dtype=dtype, threads=1)
    engine.load()
    logits = engine.prefill([0, 1], [[5, 6], [7]])
    assert (logits.dtype, logits.shape) == (torch.float32, (2, VOCAB_SIZE))
    assert logits.isfinite().all()


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 7}, {"eos_token_id": 2}, {7}),
        ({"eos_token_id": [7, 9]}, {"eos_token_id": 2}, {7, 9}),
        ({}, {"eos_token_id": [3, 4]}, {3, 4}),
        (None, {"eos_token_id": 2}, {2}),
        (None, {}, set()),
    ],
)
def test_eos_ids_come_from_the_generation_config_else_the_config(
    checkpoint: Checkpoints,
    tmp_path: Path,
    generation: dict[str, Any] | None,
    config: dict[str, Any],
    expected: set[int],
) -> None:
    """An id, a list or none; never the tokenizer, whose EOS is another one here."""
    copy = shutil.copytree(checkpoint("gpt2"), tmp_path / "model")
    edit(copy / "config.json", **({"eos_token_id": None} | config))
    (copy / "generation_config.json").unlink()
    if generation is not None:
        (copy / "generation_config.json").write_text(json.dumps(generation))
    engine = CpuEngine(copy, slots=1, max_len=32, threads=1)
    engine.load()
    assert engine.spec.eos_token_ids == expected
    assert EOS_ID not in expected or 2 in config.values()


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def rewrite_weights(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def pickle_weights(path: Path, zipped: bool = True) -> Path:
    """Put pytorch_model.bin in the place of the safetensors. ``zipped``: in the format that torch has since 1.6."""
    import torch
    from safetensors.torch import load_file

    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    (path / "model.safetensors").unlink()
    return path


def shard_pickle(path: Path) -> None:
    """Split pytorch_model.bin into two files and their index."""
    import torch

    weights = torch.load(path / "pytorch_model.bin")
    (path / "pytorch_model.bin").unlink()
    places = {name: f"pytorch_model-{1 + number % 2}.bin" for number, name in enumerate(weights)}
    for shard in set(places.values()):
        torch.save({name: weights[name] for name, place in places.items() if place == shard}, path / shard)
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


class Runs:
    """What a pickle does that runs code: it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.file}",))


def truncate(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


LLAMA_NORM = "model.layers.1.input_layernorm.weight"
FAULTS: dict[str, tuple[str, str, Callable[[Path], Any]]] = {
    "no directory": ("model-not-found", "no directory", shutil.rmtree),
    "no config": ("config-missing", "config.json", lambda p: (p / "config.json").unlink()),
    "config cut off": ("config-unreadable", "config.json", lambda p: truncate(p / "config.json")),
    "config is a list": ("config-unreadable", "not a JSON object", lambda p: (p / "config.json").write_text("[]")),
    "config is no text": ("config-unreadable", "config.json", lambda p: (p / "config.json").write_bytes(b"\xff\xfe{")),
    "unknown family": ("unknown-family", "'t5'", lambda p: edit(p / "config.json", model_type="t5")),
    "no family": ("unknown-family", "None", lambda p: (p / "config.json").write_text("{}")),
    "bad generation config": (
        "config-unreadable",
        "generation_config.json",
        lambda p: (p / "generation_config.json").write_text("{"),
    ),
    "bad eos": ("config-unreadable", "eos_token_id", lambda p: edit(p / "generation_config.json", eos_token_id="</s>")),
    "no weights": ("weights-missing", "model.safetensors", lambda p: (p / "model.safetensors").unlink()),
    "weights that transformers does not read": (
        "weights-missing",
        "only consolidated.00.pth",
        lambda p: (p / "model.safetensors").rename(p / "consolidated.00.pth"),
    ),
    "pickled weights only": (
        "pickle-refused",
        "(pytorch_model.bin)",
        lambda p: pickle_weights(p),
    ),
    "pickled shards only": (
        "pickle-refused",
        "(pytorch_model.bin.index.json)",
        lambda p: shard_pickle(pickle_weights(p)),
    ),
    "a shard is missing": (
        "weights-missing",
        "model-2.safetensors",
        lambda p: (p / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}})
        ),
    ),
    "an index without a map": (
        "config-unreadable",
        "weight_map",
        lambda p: (p / "model.safetensors.index.json").write_text("{}"),
    ),
    "weights cut off": ("weights-broken", "model.safetensors", lambda p: truncate(p / "model.safetensors")),
    "weights are empty": ("weights-broken", "model.safetensors", lambda p: (p / "model.safetensors").write_bytes(b"")),
    "a git-lfs pointer": (
        "weights-broken",
        "model.safetensors",
        lambda p: (p / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
    ),
    "a weight is missing": (
        "weights-mismatch",
        LLAMA_NORM,
        lambda p: rewrite_weights(p, lambda weights: weights.pop(LLAMA_NORM)),
    ),
    "a weight has another shape": (
        "weights-mismatch",
        LLAMA_NORM,
        lambda p: rewrite_weights(p, lambda weights: weights.update({LLAMA_NORM: weights[LLAMA_NORM][:7].clone()})),
    ),
    "another model's config": ("weights-mismatch", "config.json", lambda p: edit(p / "config.json", hidden_size=32)),
    "an impossible config": ("weights-mismatch", "", lambda p: edit(p / "config.json", num_attention_heads="four")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_checkpoint_is_a_load_error_with_its_cause(
    checkpoint: Checkpoints, tmp_path: Path, fault: str
) -> None:
    """A stable id, and a cause that names the file, tensor or value: never a model with random weights."""
    id, cause, spoil = FAULTS[fault]
    copy = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    spoil(copy)
    with pytest.raises(EngineLoadError) as caught:
        CpuEngine(copy, slots=2, max_len=64, threads=1).load()
    assert caught.value.id == id
    assert cause in caught.value.what


def test_a_refused_pickle_names_the_field_that_allows_it(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """The hint also names the remedy without pickles."""
    copy = pickle_weights(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    with pytest.raises(EngineLoadError) as caught:
        CpuEngine(copy, slots=1, max_len=32).load()
    assert "allow_pickle: true" in caught.value.hint
    assert "save_pretrained" in caught.value.hint


@pytest.mark.parametrize("form", ["zip", "before 1.6", "shards"])
def test_an_allowed_pickle_gives_the_same_model(checkpoint: Checkpoints, tmp_path: Path, form: str) -> None:
    """In both formats of torch and in shards: bit for bit the weights of the safetensors, and their logits."""
    import torch

    copy = pickle_weights(shutil.copytree(checkpoint("llama"), tmp_path / "model"), zipped=form != "before 1.6")
    if form == "shards":
        shard_pickle(copy)
    logits, weights = [], []
    for path in (checkpoint("llama"), copy):
        engine = CpuEngine(path, slots=1, max_len=32, threads=1, allow_pickle=True)
        engine.load()
        logits.append(engine.prefill([0], [[5, 6, 7]]))
        _, pickled = engine.check()
        assert pickled is (path == copy)
        weights.append(load_model(path, torch.float32, pickled, trust_remote_code=False).state_dict())
    assert weights[0].keys() == weights[1].keys()
    assert [name for name, weight in weights[0].items() if not torch.equal(weight, weights[1][name])] == []
    # Where the file put a tensor in memory decides which kernel reads it, and so the last bit.
    assert torch.allclose(logits[0], logits[1], atol=1e-5)


def pickle_code(path: Path) -> None:
    import torch

    torch.save({"a": Runs(path / "ran")}, pickle_weights(path) / "pytorch_model.bin")


PICKLE_FAULTS: dict[str, tuple[str, str, Callable[[Path], Any]]] = {
    "cut off": ("weights-broken", "pytorch_model.bin", lambda p: truncate(pickle_weights(p) / "pytorch_model.bin")),
    "cut off, of before 1.6": (
        "weights-broken",
        "pytorch_model.bin",
        lambda p: truncate(pickle_weights(p, zipped=False) / "pytorch_model.bin"),
    ),
    "empty": (
        "weights-broken",
        "pytorch_model.bin",
        lambda p: (pickle_weights(p) / "pytorch_model.bin").write_text(""),
    ),
    "a shard is missing": (
        "weights-missing",
        "is missing pytorch_model-2.bin",
        lambda p: (shard_pickle(pickle_weights(p)), (p / "pytorch_model-2.bin").unlink()),
    ),
    "another model's": (
        "weights-mismatch",
        "config.json",
        lambda p: edit(pickle_weights(p) / "config.json", hidden_size=32),
    ),
    "it runs code": ("pickle-refused", "system", pickle_code),
    "safetensors whose index names a pickle": (
        "weights-broken",
        "pytorch_model.bin",
        lambda p: (pickle_weights(p) / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": "pytorch_model.bin"}})
        ),
    ),
}


@pytest.mark.parametrize("fault", PICKLE_FAULTS)
def test_a_broken_pickle_is_a_load_error_with_its_cause(checkpoint: Checkpoints, tmp_path: Path, fault: str) -> None:
    """As other weights do; and no code of it runs, allowed or not."""
    id, cause, spoil = PICKLE_FAULTS[fault]
    copy = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    spoil(copy)
    with pytest.raises(EngineLoadError) as caught:
        CpuEngine(copy, slots=1, max_len=32, threads=1, allow_pickle=True).load()
    assert caught.value.id == id
    assert cause in caught.value.what
    assert not (copy / "ran").exists()


@pytest.mark.parametrize(
    ("wrong", "id"),
    [
        ({"max_len": MAX_POSITIONS + 1}, "max-len-too-long"),
        ({"dtype": "int3"}, "bad-dtype"),
        ({"prefill_buckets": [32, 16]}, "bad-buckets"),
        ({"prefill_buckets": [256]}, "bad-buckets"),
        ({"decode_buckets": [32]}, "bad-buckets"),
    ],
)
def test_unsupported_sizes_are_load_errors(checkpoint: Checkpoints, wrong: dict[str, Any], id: str) -> None:
    """They end as every fault of a load does, with an id."""
    sizes: dict[str, Any] = {"slots": 2, "max_len": 64, "threads": 1} | wrong
    with pytest.raises(EngineLoadError) as caught:
        CpuEngine(checkpoint("llama"), **sizes).load()
    assert caught.value.id == id


def test_an_older_transformers_is_a_load_error(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its version: images of the Neuron SDK have releases without the caches that the engine extends."""
    monkeypatch.setattr("transformers.__version__", "4.48.3")
    with pytest.raises(EngineLoadError, match=r"engine-not-installed.*transformers 4.57 or later, not 4.48.3"):
        CpuEngine(checkpoint("llama"), slots=1, max_len=16).load()


def test_the_types_of_rotary_positions_are_those_of_transformers() -> None:
    """`validate` refuses others, which fail to load."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert CPU_ROPES.keys() == ROPE_INIT_FUNCTIONS.keys() - {"default"}


@pytest.mark.parametrize("method", ["awq", "gptq", "hqq", "compressed-tensors", None])
def test_weights_that_validate_refuses_do_not_load(checkpoint: Checkpoints, tmp_path: Path, method: str | None) -> None:
    """The quantizers of transformers need packages that corewright does not install."""
    copy = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method} if method else {"bits": 4}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineLoadError, match="weights-mismatch"):
        CpuEngine(copy, slots=1, max_len=32, threads=1).load()
    assert Checkpoint.from_config(config).quantized_by is not None


def test_bloom_has_no_maximum_position(checkpoint: Checkpoints) -> None:
    """Its bias is computed for any length, so only memory bounds max_len."""
    engine = CpuEngine(checkpoint("bloom"), slots=1, max_len=2 * MAX_POSITIONS, prefill_buckets=[16], threads=1)
    engine.load()
    assert engine.spec.max_len == 2 * MAX_POSITIONS


def test_forks_have_the_table_of_the_names_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each would compile a thousand regular expressions in its load."""
    conversions = pytest.importorskip("transformers.conversion_mapping", reason="new in transformers 5")
    monkeypatch.setattr(conversions, "_checkpoint_conversion_mapping_cache", None)
    prepare_forks()

    assert conversions._checkpoint_conversion_mapping_cache
