"""Ask the saved demo model, greedily, and count what it gets exactly right."""

# ruff: noqa: T201  what a script prints is its result

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.demo_model.lessons import (
    ANIMALS,
    BLANKS,
    COUNTS,
    DAYS,
    FACTS,
    FALLBACK,
    HELLO,
    IDENTITY,
    NAMES,
    PLOTS,
    bare,
    counted,
    greeting_of,
    name_told,
    total,
)

Message = dict[str, str]

# Never in the training text.
UNSEEN_FACT_PHRASINGS = (
    "Could you tell me what {} is?",
    "I would like to know what {} is.",
    "Give me a short definition of {bare}.",
    "Hello, can you say what {} is?",
)
UNSEEN_OTHER = (
    "What is the tallest building in the world?",
    "How do I bake a chocolate cake?",
    "Who painted the Mona Lisa?",
    "Translate good morning to French",
    "Explain photosynthesis",
    "What is a llama?",
    "What is a blockchain?",
    "asdf qwer zxcv",
    "¿Dónde está la biblioteca?",
    "Write a haiku about autumn leaves.",
    "def main(): pass",
    "What is the square root of 16?",
)


@dataclass(frozen=True)
class Question:
    """One chat to send, and the one right answer; None stands for any whole story about the animal in the question."""

    kind: str
    messages: tuple[Message, ...]
    answer: str | None

    @property
    def asked(self) -> str:
        return self.messages[-1]["content"]

    def passes(self, given: str) -> bool:
        if self.answer is not None:
            return given == self.answer
        return hero_of(given) in ([animal for animal in ANIMALS if animal in self.asked] or ANIMALS)


def hero_of(story: str) -> str | None:
    """The animal it is about; None unless it is a plot told to its end, true to its own names and things.

    A second animal like the first is let pass.
    """
    matches = (re.fullmatch(as_pattern(plot), story) for plot in PLOTS)
    return next((match["animal"] for match in matches if match), None)


def as_pattern(plot: str) -> str:
    """A regular expression: a blank matches any of its words where it is first used, and the same word from then on."""
    pattern = re.escape(plot)
    for blank, words in BLANKS.items():
        marked = re.escape(f"{{{blank}}}")
        pattern = pattern.replace(marked, f"(?P<{blank}>{'|'.join(words)})", 1).replace(marked, f"(?P={blank})")
    return pattern


def asking(kind: str, question: str, answer: str | None, before: Sequence[Message] = ()) -> Question:
    return Question(kind, (*before, {"role": "user", "content": question}), answer)


def turn_of(question: str, answer: str) -> tuple[Message, Message]:
    return {"role": "user", "content": question}, {"role": "assistant", "content": answer}


def fixed_questions() -> list[Question]:
    """What a newcomer is likely to type, and the harder cases: system prompts, later turns, words never seen."""
    pirate = {"role": "system", "content": "Speak like Shakespeare and be very brief."}
    two_turns = (*turn_of("hi", HELLO), *turn_of("what is a slot?", FACTS["a slot"]))
    return [
        asking("core", "What is corewright?", FACTS["corewright"]),
        asking("core", "What is a NeuronCore?", FACTS["a NeuronCore"]),
        asking("core", "What is tensor parallelism?", FACTS["tensor parallelism"]),
        asking("core", "What is a slot?", FACTS["a slot"]),
        asking("core", "What is a replica?", FACTS["a replica"]),
        asking("core", "What is continuous batching?", FACTS["continuous batching"]),
        asking("core", "What is placement?", FACTS["placement"]),
        asking("core", "What is the KV cache?", FACTS["the KV cache"]),
        asking("core", "what is 2 + 3?", total(2, 3)),
        asking("core", "Hello!", HELLO),
        asking("core", "Who are you?", IDENTITY),
        asking("core", "Name the days of the week.", DAYS),
        asking("core", "Count to 10.", counted(10)),
        asking("core", "Tell me a story about a fox.", None),
        asking("phrasing", "could you tell me what a replica is", FACTS["a replica"]),
        asking("phrasing", "In one sentence: what is prefill?", FACTS["prefill"]),
        asking("phrasing", "whats a neuroncore", FACTS["a NeuronCore"]),
        asking("phrasing", "Why do we need buckets?", FACTS["a bucket"]),
        asking("phrasing", "What's the result of 12 + 7?", total(12, 7)),
        asking("phrasing", "Can you list all days of the week for me?", DAYS),
        asking("system", "What is tensor parallelism?", FACTS["tensor parallelism"], [pirate]),
        asking("later turn", "And what is a replica?", FACTS["a replica"], two_turns),
        asking("later turn", "What is my name?", name_told("Emma"), turn_of("My name is Emma.", greeting_of("Emma"))),
        asking("fallback", "What is the tallest building in the world?", FALLBACK),
        asking("fallback", "Explain photosynthesis", FALLBACK),
    ]


def surveys() -> list[Question]:
    """Every fact, every sum and more, for rates that a list of 25 cannot give."""
    every = [
        asking("every fact, as taught", ask.format(name, bare=bare(name)), answer)
        for name, answer in FACTS.items()
        for ask in ("What is {}?", "explain {bare}")
    ]
    every += [
        asking("every fact, unseen phrasing", ask.format(name, bare=bare(name)), answer)
        for name, answer in FACTS.items()
        for ask in UNSEEN_FACT_PHRASINGS
    ]
    long_chat = [
        message
        for name in ("a slot", "the gateway", "streaming", "a plan", "a host", "a lease")
        for message in turn_of(f"What is {name}?", FACTS[name])
    ]
    every += [asking("every fact, after six turns", f"What is {name}?", FACTS[name], long_chat) for name in FACTS]
    every += [asking("every sum to 20 + 20", f"What is {a} + {b}?", total(a, b)) for a in range(21) for b in range(21)]
    every += [asking("every count", f"Count to {n}.", counted(n)) for n in COUNTS]
    every += [asking("every animal's story", f"Tell me a story about a {animal}.", None) for animal in ANIMALS]
    every += [
        asking(
            "every name, a turn later", "What is my name?", name_told(name), turn_of(f"I am {name}.", greeting_of(name))
        )
        for name in NAMES
    ]
    every += [asking("fallback, unseen subject", question, FALLBACK) for question in UNSEEN_OTHER]
    return every


class Student:
    """A saved model that answers greedily, in float32 as demo.yaml serves it."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)

    def answers(self, questions: Sequence[Question], at_once: int = 32) -> Iterator[str]:
        for first in range(0, len(questions), at_once):
            inputs = self.tokenizer.apply_chat_template(
                [list(question.messages) for question in questions[first : first + at_once]],
                add_generation_prompt=True,
                return_dict=True,
                return_tensors="pt",
                padding=True,
            )
            yield from self.continued(inputs)

    def complete(self, prompt: str) -> str:
        return prompt + self.continued(self.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False))[0]

    def continued(self, inputs: Any) -> list[str]:
        with torch.inference_mode():
            ids = self.model.generate(**inputs, do_sample=False, max_new_tokens=160)
        new = ids[:, inputs["input_ids"].shape[1] :]
        texts: list[str] = self.tokenizer.batch_decode(new, skip_special_tokens=True)
        return texts


def check(folder: Path) -> bool:
    """Print what the model answers and the rates. True when every core question was answered exactly."""
    student = Student(folder)
    questions = fixed_questions()
    given = list(student.answers(questions, at_once=1))
    passed = [question.passes(answer) for question, answer in zip(questions, given, strict=True)]
    for question, answer, ok in zip(questions, given, passed, strict=True):
        print(f"{'ok   ' if ok else 'WRONG'} {question.kind}: {question.asked}\n      {answer}")
    completion = student.complete("Once upon a time")
    print(f"{'ok   ' if hero_of(completion) else 'WRONG'} completion: Once upon a time\n      {completion}\n")

    rates: dict[str, list[bool]] = {"the fixed list": passed}
    more = surveys()
    for question, answer in zip(more, student.answers(more), strict=True):
        rates.setdefault(question.kind, []).append(question.passes(answer))
    for kind, results in rates.items():
        print(f"{kind:28} {sum(results):4} of {len(results):4}  {sum(results) / len(results):6.1%}")
    core = [ok for question, ok in zip(questions, passed, strict=True) if question.kind == "core"]
    return all(core) and hero_of(completion) is not None
