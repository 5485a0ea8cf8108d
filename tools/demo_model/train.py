"""Make the demo's models: their text (from lessons.py), tokenizer and weights; and examine them (exam.py).

    python -m tools.demo_model.train            # train, then write placements/examples/models/tiny/
    python -m tools.demo_model.train draft      # the small one that guesses tiny's next tokens
    python -m tools.demo_model.train --check    # ask the saved model; exit code 1 when a core answer is wrong

Training takes a fixed number of steps from a fixed seed, so two runs on one machine and one torch give the same file.
A run elsewhere rounds differently and gives a model as good, with other bits.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from tools.demo_model.exam import check
from tools.demo_model.lessons import ASSISTANT, BOS, END, EOS, PAD, SPECIAL_TOKENS, SYSTEM, USER, Author

MODELS = Path(__file__).resolve().parents[2] / "placements" / "examples" / "models"
MAX_LEN = 512  # positions the model has seen in training
VOCAB_SIZE = 512

# The last branch but one reads OpenAI's content parts; an assistant message may have no content at all.
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
  {%- if message.role == 'assistant' %}{{- '<|assistant|>' }}
  {%- elif message.role in ('system', 'developer') %}{{- '<|system|>' }}
  {%- else %}{{- '<|user|>' }}
  {%- endif %}
  {%- if message.content is string %}{{- message.content }}
  {%- elif message.content %}{%- for part in message.content %}{{- part.text or '' }}{%- endfor %}
  {%- endif %}
  {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""


@dataclass(frozen=True)
class Recipe:
    """Shape of one model and how long it learns.

    A step sees ``tokens_per_step`` tokens: mostly as short rows, which are cheap and begin with a fresh document each;
    every ``long_every``-th time as rows of MAX_LEN, so that late turns of a chat work.
    """

    hidden: int = 128
    layers: int = 4
    heads: int = 8  # divisible by every tp_degree of demo.yaml
    kv_heads: int = 4
    intermediate: int = 320
    steps: int = 2300
    tokens_per_step: int = 2048
    short_row: int = 128
    long_every: int = 4
    peak_lr: float = 3e-3
    seed: int = 7


RECIPES = {"tiny": Recipe(), "draft": Recipe(layers=1)}


def train_tokenizer() -> Tokenizer:
    """Byte-level BPE, so that any text survives; digits one by one, so that sums can be learnt; BOS in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    author = Author(seed=0)
    tokenizer.train_from_iterator((author.document() for _ in range(5000)), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


IGNORED = -100  # the label that cross_entropy leaves out


def labels_of(ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """``ids`` where the model is speaking, else IGNORED: answers with their END, and plain text up to its EOS."""
    assistant, end, user, system = (tokenizer.token_to_id(token) for token in (ASSISTANT, END, USER, SYSTEM))
    speaking = user not in ids
    labels = []
    for token in ids:
        labels.append(token if speaking and token not in (assistant, user, system) else IGNORED)
        speaking = token == assistant or (speaking and token != end)
    return labels


def batch(author: Author, tokenizer: Tokenizer, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, both ``[rows, length] int64``. Each row starts with a new document; the last one is cut."""
    ids: list[list[int]] = []
    labels: list[list[int]] = []
    for _ in range(rows):
        row: list[int] = []
        row_labels: list[int] = []
        while len(row) < length:
            document: list[int] = tokenizer.encode(author.document(), add_special_tokens=False).ids
            row += document
            row_labels += labels_of(document, tokenizer)
        ids.append(row[:length])
        labels.append(row_labels[:length])
    return torch.tensor(ids), torch.tensor(labels)


def learning_rate(recipe: Recipe, step: int) -> float:
    """Warm up over 40 steps, then half a cosine down to 2 % of the peak."""
    warm_up = min(1.0, (step + 1) / 40)
    return recipe.peak_lr * warm_up * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / recipe.steps)))


def train_weights(recipe: Recipe, tokenizer: Tokenizer) -> Any:
    """A LlamaForCausalLM in float32, with its generation config. Prints the loss every 100 steps."""
    torch.manual_seed(recipe.seed)
    special: dict[str, Any] = {
        "pad_token_id": tokenizer.token_to_id(PAD),
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": [tokenizer.token_to_id(EOS), tokenizer.token_to_id(END)],
    }
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.hidden // recipe.heads,
        max_position_embeddings=MAX_LEN,
        tie_word_embeddings=True,
        **special,
    )
    model: Any = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.peak_lr, betas=(0.9, 0.95), weight_decay=0.05)
    model.train()
    start = time.monotonic()
    author = Author(recipe.seed)
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step)
        length = MAX_LEN if step % recipe.long_every == 0 else recipe.short_row
        ids, labels = batch(author, tokenizer, recipe.tokens_per_step // length, length)
        logits = model(input_ids=ids).logits
        loss: Any = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 99:
            seconds = time.monotonic() - start
            print(f"step {step + 1}/{recipe.steps}  loss {loss.item():.3f}  {seconds:.0f} s", flush=True)
    model.generation_config = GenerationConfig.from_dict(special)
    return model


def save(model: Any, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a checkpoint that transformers 4.47 and later load.

    tokenizer_config.json is written here, since transformers 5 names a class that 4.57 does not know.
    """
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LEN,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train the demo model, or ask the saved one.")
    parser.add_argument("model", nargs="?", default="tiny", choices=sorted(RECIPES))
    parser.add_argument("--check", action="store_true", help="ask the saved model instead of training one")
    parser.add_argument("--out", type=Path, help="folder of the model; default: a folder of its name beside this file")
    given = parser.parse_args(arguments)
    folder: Path = given.out or MODELS / given.model
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if given.check:
        return 0 if check(folder) else 1
    start = time.monotonic()
    tokenizer = train_tokenizer()
    model = train_weights(RECIPES[given.model], tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    save(model, tokenizer, folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{model.num_parameters():,} parameters, {size:,} bytes, {time.monotonic() - start:.0f} s -> {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
