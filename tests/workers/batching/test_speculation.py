"""Speculative decoding: token for token what the model gives without a draft."""

from __future__ import annotations

import itertools
import random
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import FAMILIES, VOCAB_SIZE, make_checkpoint, set_eos
from tests.replica_configs import replica_config
from workers.batching.batcher import Batcher
from workers.batching.engine_steps import agreed
from workers.engines.cpu.engine import CpuEngine
from workers.engines.open_engine import open_engine
from workers.engines.speculative import SpeculativeEngine
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import ReplicaConfig
from workers.messages.requests import FinishReason, GenerateRequest, TokenEvent
from workers.text.tokenizer import load_tokenizer

Checkpoints = Callable[[str], Path]
MAX_LEN = 96
SLOTS = 4


@dataclass
class ScriptedRequest:
    """A request, and after how many of its tokens its client leaves."""

    prompt: list[int]
    n: int
    leaves_after: int | None = None
    rest: dict[str, Any] = field(default_factory=dict)


def requests(seed: int, count: int = 24) -> list[ScriptedRequest]:
    """Ragged ones: some fill their slot to the last position, some want one token, some leave, some are sampled."""
    rng = random.Random(seed)
    made_requests = []
    for number in range(count):
        prompt = [rng.randrange(6, VOCAB_SIZE) for _ in range(rng.choice([1, 2, 10, 40, 80]))]
        room = MAX_LEN - len(prompt)
        draft = ScriptedRequest(prompt, rng.choice([1, 2, 3, min(room, 30), room]))
        draft.rest = rng.choice(
            [
                {},
                {},
                {},
                {"ignore_eos": True},
                {"temperature": 0.9, "seed": number},
                {"presence_penalty": 1.0},
                {"min_tokens": 1},
                {"logprobs": 2},
                {"stop_token_ids": [rng.randrange(6, VOCAB_SIZE) for _ in range(20)]},
            ]
        )
        if number % 5 == 4 and draft.n > 4:
            draft.leaves_after = 3
        made_requests.append(draft)
    return made_requests


class Run:
    """Requests through an engine, six at once and then one before every other step."""

    def __init__(self, engine: Any, path: Path, script: Sequence[ScriptedRequest]) -> None:
        engine.load()
        self.events: defaultdict[str, list[TokenEvent]] = defaultdict(list)
        self.batcher = Batcher(engine, load_tokenizer("cpu", str(path)), self.receive)
        self.script = script
        arrivals = iter(enumerate(script))
        cancelled: set[str] = set()
        for number, request in itertools.islice(arrivals, 6):
            self.submit(number, request)
        for step in itertools.count():
            progressed = self.batcher.step()
            arrival = next(arrivals, None) if step % 2 or not progressed else None
            if arrival is not None:
                self.submit(*arrival)
            elif not progressed:
                break
            for id in list(self.events):
                after = script[int(id)].leaves_after
                if id not in cancelled and after is not None and len(self.ids(id)) >= after:
                    self.batcher.cancel(id)
                    cancelled.add(id)

    def submit(self, number: int, request: ScriptedRequest) -> None:
        options = {"temperature": 0.0, **request.rest}
        self.batcher.submit(GenerateRequest(id=str(number), prompt_ids=request.prompt, max_tokens=request.n, **options))

    def receive(self, events: list[TokenEvent]) -> None:
        for event in events:
            self.events[event.id].append(event)

    def ids(self, id: str) -> list[int]:
        return [token for event in self.events[id] for token in event.token_ids]

    def answers(self) -> list[tuple[list[int], str, FinishReason | None]]:
        """Of each request that stays: ids, text, finish."""
        return [
            (self.ids(id), "".join(event.text for event in self.events[id]), self.events[id][-1].finish)
            for id, request in ((str(number), request) for number, request in enumerate(self.script))
            if request.leaves_after is None
        ]

    def left(self) -> dict[str, list[int]]:
        return {str(n): self.ids(str(n)) for n, request in enumerate(self.script) if request.leaves_after is not None}


def engine(path: Path) -> CpuEngine:
    return CpuEngine(path, slots=SLOTS, max_len=MAX_LEN, threads=1)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model that knows nothing of the others."""
    return make_checkpoint(tmp_path_factory.mktemp("draft") / "llama", "llama", seed=7, layers=1, eos=None)


EVERYDAY = ("llama", "mistral-window")  # a draft passes through every family's engine alike


@pytest.mark.parametrize(
    ("family", "k"),
    [
        pytest.param("llama", 1, marks=pytest.mark.slow),
        *(pytest.param(family, 4, marks=[] if family in EVERYDAY else [pytest.mark.slow]) for family in FAMILIES),
    ],
)
def test_a_draft_changes_no_token_of_any_answer(
    checkpoint: Checkpoints, stranger: Path, tmp_path: Path, family: str, k: int
) -> None:
    """A stranger's draft and the model's own: ids, text and finish are those without a draft, and so few or many agree.

    With arrivals, clients that leave, EOS and stop ids inside runs, slots filled to the last position, and requests
    that are sampled, penalized or want logprobs among the greedy ones.
    """
    path = shutil.copytree(checkpoint(family), tmp_path / "model")
    script = requests(seed=k)
    endless = Run(engine(path), path, script).answers()
    inner = Counter(token for ids, _, _ in endless for token in set(ids[:-1]))
    set_eos(path, [token for token, answers in inner.most_common() if answers < len(endless) / 2][:2])
    plain = Run(engine(path), path, script)
    expected = plain.answers()
    assert {FinishReason.STOP, FinishReason.LENGTH} <= {finish for _, _, finish in expected}

    foreign = Run(SpeculativeEngine(engine(path), engine(stranger), k), path, script)
    own = Run(SpeculativeEngine(engine(path), engine(path), k), path, script)

    assert foreign.answers() == expected
    assert own.answers() == expected
    for run in (foreign, own):
        for id, ids in run.left().items():
            expected_ids = plain.left()[id]
            assert ids[: len(expected_ids)] == expected_ids[: len(ids)]
    few, all_of_them = foreign.batcher.stats, own.batcher.stats
    assert few.accepted < few.drafted / 2
    assert all_of_them.accepted == all_of_them.drafted > 0
    assert (plain.batcher.stats.drafted, plain.batcher.stats.accepted) == (0, 0)


def test_without_a_plainly_greedy_request_nothing_is_drafted(checkpoint: Checkpoints) -> None:
    """Sampled and penalized requests alone take ordinary steps."""
    path = checkpoint("llama")
    kinds: list[dict[str, Any]] = [{"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.3}, {"logprobs": 1}]
    script = [ScriptedRequest([7, 8, 9], 12, rest=rest) for rest in kinds]
    plain, run = (
        Run(runner, path, script) for runner in (engine(path), SpeculativeEngine(engine(path), engine(path), 3))
    )
    assert (run.answers(), run.batcher.stats.drafted) == (plain.answers(), 0)


def test_runs_come_as_one_event_with_their_text(checkpoint: Checkpoints) -> None:
    """A step gives a request one event, of up to k + 1 tokens; a stop string inside a run cuts it there."""
    path = checkpoint("llama")
    drafting = SpeculativeEngine(engine(path), engine(path), 4)
    full = Run(drafting, path, [ScriptedRequest([20, 21, 22], 31)])
    assert [len(event.token_ids) for event in full.events["0"]] == [1, 5, 5, 5, 5, 5, 5]
    text = full.answers()[0][1]
    stop = text[len(text) // 2 :][:3]
    cut = Run(drafting, path, [ScriptedRequest([20, 21, 22], 31, rest={"stop": [stop]})])
    assert cut.answers()[0][1:] == (text[: text.index(stop)], FinishReason.STOP)


@pytest.mark.parametrize("family", FAMILIES)
def test_verify_gives_the_logits_of_single_decodes(checkpoint: Checkpoints, family: str) -> None:
    """Four tokens at once in slots 0 and 2 of 3, over what a longer run left there before."""
    import torch

    cpu = CpuEngine(checkpoint(family), slots=3, max_len=MAX_LEN, threads=1)
    cpu.load()
    tokens = [[30, 31, 32, 33], [40, 41, 42, 43]]
    cpu.prefill([0, 2], [[5, 6, 7], [8] * 30])
    cpu.verify([0, 2], [[9] * 8, [9] * 8], [3, 30])
    together = cpu.verify([0, 2], tokens, [3, 30])
    cpu.prefill([0, 2], [[5, 6, 7], [8] * 30])
    steps = [cpu.decode([0, 2], [row[i] for row in tokens], [3 + i, 30 + i]) for i in range(4)]
    assert together.shape == (2, 4, VOCAB_SIZE)
    assert torch.allclose(together, torch.stack(steps, dim=1), atol=1e-3, rtol=1e-4)


def test_nan_logits_end_a_run() -> None:
    """The tokens before stay; a row's None ends that row only."""
    import torch

    logits = torch.zeros(2, 3, 8)
    logits[0, 0, 5] = logits[0, 1, 6] = logits[0, 2, 7] = 1.0
    logits[1, 0, 5] = 1.0
    logits[1, 1] = float("nan")
    assert agreed(logits, [[5, 6], [5, 6]]) == [[5, 6, 7], [5, None]]
    assert agreed(logits, [[4, 6], [5, 6]]) == [[5], [5, None]]


def config(path: Path, **fields: Any) -> ReplicaConfig:
    values: dict[str, Any] = {"engine": "cpu", "source": str(path), "dtype": "fp32", "slots": 2, "max_len": 32}
    values |= {"model": "m", "replica": 0, "epoch": 1, "host": "h", "cores": [], "claims": None, "env": {}}
    return replica_config(**values, log="", socket="", token="", **fields)


def test_a_replicas_configuration_opens_the_draft(checkpoint: Checkpoints) -> None:
    """draft_source and draft_k; without them nothing drafts."""
    path = checkpoint("llama")
    drafting = open_engine(config(path, draft_source=str(path), draft_k=3))
    alone = open_engine(config(path, engine_options={"prefill_chunk": 8}))
    drafting.load()
    alone.load()
    assert (drafting.spec.draft_k, alone.spec.draft_k) == (3, 0)


def test_a_pickled_draft_is_read_only_where_the_model_allows_it(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """One word, allow_pickle, for both."""
    import torch
    from safetensors.torch import load_file

    draft = shutil.copytree(checkpoint("llama"), tmp_path / "draft")
    torch.save(load_file(draft / "model.safetensors"), draft / "pytorch_model.bin")
    (draft / "model.safetensors").unlink()
    how = {"draft_source": str(draft), "draft_k": 3}
    with pytest.raises(EngineLoadError, match="pickle-refused: the draft model: "):
        open_engine(config(checkpoint("llama"), **how)).load()
    allowed = open_engine(config(checkpoint("llama"), **how, allow_pickle=True))
    allowed.load()
    assert allowed.spec.draft_k == 3


def test_a_draft_of_another_vocabulary_is_a_load_error(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Its guesses would be other words; the error has both sizes."""
    from transformers import AutoModelForCausalLM

    path = checkpoint("gpt2")
    model = AutoModelForCausalLM.from_pretrained(str(path))
    model.resize_token_embeddings(100)
    model.save_pretrained(tmp_path / "small")
    with pytest.raises(EngineLoadError, match=r"bad-draft.*100 ids.*512"):
        SpeculativeEngine(engine(path), engine(tmp_path / "small"), 2).load()


def test_the_error_of_a_broken_draft_names_the_draft(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """The id of the fault, and which of the two models."""
    with pytest.raises(EngineLoadError, match="model-not-found: the draft model: "):
        SpeculativeEngine(engine(checkpoint("gpt2")), engine(tmp_path / "none"), 2).load()
