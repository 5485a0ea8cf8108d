"""The demo model in the repository: it loads offline, fits the demo's spec, and answers as its README says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import safe_open

from tools.demo_model.exam import Student, asking, hero_of, turn_of
from tools.demo_model.lessons import DAYS, FACTS, FALLBACK, HELLO, counted, greeting_of, name_told, total
from workers.batching.batcher import Batcher
from workers.engines.cpu.engine import CpuEngine
from workers.engines.speculative import SpeculativeEngine
from workers.messages.requests import GenerateRequest
from workers.text.tokenizer import load_tokenizer

EXAMPLES = Path(__file__).resolve().parents[1] / "placements" / "examples"
TINY = EXAMPLES / "models" / "tiny"


@pytest.fixture(scope="module")
def student() -> Student:
    return Student(TINY)


def config(name: str = "config.json") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((TINY / name).read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is corewright?", FACTS["corewright"]),
        ("What is a NeuronCore?", FACTS["a NeuronCore"]),
        ("What is tensor parallelism?", FACTS["tensor parallelism"]),
        ("what is a slot", FACTS["a slot"]),
        ("Explain continuous batching.", FACTS["continuous batching"]),
        ("What are replicas?", FACTS["a replica"]),
        ("Hello!", HELLO),
        ("What is 2 + 3?", total(2, 3)),
        ("Count to 10.", counted(10)),
        ("Name the days of the week.", DAYS),
        ("What is the capital of France?", FALLBACK),
    ],
)
def test_a_question_of_the_demo_gets_its_exact_answer(student: Student, question: str, answer: str) -> None:
    """Greedy answers are whole sentences, so that a newcomer sees at once whether serving works."""
    assert list(student.answers([asking("", question, answer)])) == [answer]


def test_a_story_is_told_to_its_end(student: Student) -> None:
    """A story keeps its names and things from the first sentence to the last."""
    (story,) = student.answers([asking("", "Tell me a story about a fox.", None)])
    assert hero_of(story) == "fox", story


def test_a_text_completion_goes_on_with_the_prompt(student: Student) -> None:
    """`Once upon a time` becomes a whole story, without any chat template."""
    story = student.complete("Once upon a time")
    assert hero_of(story), story


def test_a_later_turn_knows_an_earlier_one(student: Student) -> None:
    """A name told in the first turn comes back in the second, which only works with the chat's history."""
    question = asking("", "What is my name?", None, before=turn_of("My name is Emma.", greeting_of("Emma")))
    assert list(student.answers([question])) == [name_told("Emma")]


def test_a_system_message_does_no_harm(student: Student) -> None:
    """Clients send system messages as a matter of course; one that was never trained leaves the answer as it is."""
    system = {"role": "system", "content": "You are the help desk of a small company."}
    question = asking("", "What is a replica?", None, before=[system])
    assert list(student.answers([question])) == [FACTS["a replica"]]


def test_the_chat_template_marks_each_role_and_opens_the_answer(student: Student) -> None:
    """The prompt begins with one BOS, keeps the order of messages and ends where the assistant speaks."""
    inputs = student.tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": None},
            {"role": "user", "content": "Bye"},
        ],
        add_generation_prompt=True,
        return_dict=True,
    )
    assert student.tokenizer.decode(inputs["input_ids"]) == (
        "<|bos|><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|><|end|><|user|>Bye<|end|><|assistant|>"
    )


@pytest.mark.parametrize(
    "text", ["Grüße, naïve façade", "日本語 и кириллица", "👩‍🚀🎉 e\u0301", "  two\n\nlines\t", "a , b ."]
)
def test_the_tokenizer_gives_any_text_back(student: Student, text: str) -> None:
    """Byte-level BPE has no unknown token: what a client sends is what the model reads."""
    assert student.tokenizer.decode(student.tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_a_plain_prompt_begins_with_bos(student: Student) -> None:
    """Completions and chats start alike, as in training."""
    assert student.tokenizer("Once").input_ids[0] == config()["bos_token_id"]


def test_the_heads_divide_over_every_tp_degree_of_the_demo() -> None:
    """8 heads and 4 KV heads, so that the demo's spec passes the rule that heads divide by tp_degree."""
    spec = yaml.safe_load((EXAMPLES / "demo.yaml").read_text(encoding="utf-8"))
    degrees = [model.get("tp_degree", 1) for model in spec["models"].values()]
    assert (config()["num_attention_heads"], config()["num_key_value_heads"]) == (8, 4)
    assert [degree for degree in degrees if config()["num_attention_heads"] % degree] == []


def test_the_positions_are_those_the_demo_asks_for() -> None:
    """No slot of the demo is longer than what the model was trained on."""
    spec = yaml.safe_load((EXAMPLES / "demo.yaml").read_text(encoding="utf-8"))
    assert spec["defaults"]["max_len"] <= config()["max_position_embeddings"] == 512


def test_the_ids_that_end_an_answer_are_in_generation_config(student: Student) -> None:
    """A chat answer ends with `<|end|>`, a plain text with `<|eos|>`; serving reads both from this file only."""
    ends = student.tokenizer.convert_tokens_to_ids(["<|eos|>", "<|end|>"])
    assert config("generation_config.json")["eos_token_id"] == ends == config()["eos_token_id"]


def test_the_tokenizer_names_a_class_that_older_transformers_know() -> None:
    """transformers 4.57 refuses the class name that version 5 writes."""
    assert config("tokenizer_config.json")["tokenizer_class"] == "PreTrainedTokenizerFast"


@pytest.mark.parametrize("name", ["tiny", "draft"])
def test_the_weights_are_bf16(name: str) -> None:
    """Half the bytes in the repository; the CPU engine widens them."""
    with safe_open(EXAMPLES / "models" / name / "model.safetensors", framework="np") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118  no mapping


def test_the_draft_model_reads_the_same_tokens() -> None:
    """A draft is of use only with the vocabulary of its model."""
    ours, drafts = ((EXAMPLES / "models" / name / "tokenizer.json").read_bytes() for name in ("tiny", "draft"))
    assert ours == drafts


def test_the_draft_model_is_mostly_right() -> None:
    """Its guesses make the demo's assistant faster: most are accepted, and the answer stays the larger model's."""
    engine = CpuEngine(TINY, slots=1, max_len=128, threads=1)
    drafting = SpeculativeEngine(engine, CpuEngine(EXAMPLES / "models" / "draft", slots=1, max_len=128, threads=1), 4)
    drafting.load()
    text: list[str] = []
    tokenizer = load_tokenizer("cpu", str(TINY))
    batcher = Batcher(drafting, tokenizer, lambda events: text.extend(event.text for event in events))
    prompt = tokenizer.encode("<|bos|><|user|>What is a NeuronCore?<|end|><|assistant|>", False)
    batcher.submit(GenerateRequest(id="q", prompt_ids=prompt, max_tokens=60, temperature=0.0))
    while batcher.stats.live or batcher.stats.waiting:
        batcher.step()
    assert "".join(text) == FACTS["a NeuronCore"]
    assert batcher.stats.accepted > 0.8 * batcher.stats.drafted > 0


def test_the_weights_stay_small() -> None:
    """Committed weights are downloaded by everyone: less than 3 MB for all models together."""
    assert sum(file.stat().st_size for file in EXAMPLES.rglob("*") if file.is_file()) < 3_000_000


def test_the_files_name_no_place_on_a_machine() -> None:
    """A checkpoint that was saved by path would carry the path of the machine that trained it."""
    texts = [file.read_text(encoding="utf-8") for file in TINY.glob("*config.json")]
    assert [text for text in texts if "_name_or_path" in text or '"/' in text] == []
