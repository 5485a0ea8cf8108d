"""Tiny checkpoints with random weights and a small tokenizer, for tests that need a real model.

Random weights (standard deviation 0.2) and not trained ones: a model that has learned its text by heart answers well
even from a wrong position, and so hides the fault.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FAMILIES = (  # configurations: a model_type may occur in several
    "llama",
    "gpt2",
    "bloom",
    "gpt_bigcode",
    "gptj",
    "gpt_neox",
    "opt",
    "mistral",
    "mistral-window",
    "mixtral",
    "qwen2",
    "qwen3",
)
WINDOW = 24  # of the sliding ones, shorter than many prompts of the tests
INIT_STD = 0.2
VOCAB_SIZE = 512
MAX_POSITIONS = 512
PAD_ID, BOS_ID, EOS_ID, USER_ID, ASSISTANT_ID, END_ID = range(6)
SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|end|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] not in ('system', 'user', 'assistant') %}{{ raise_exception('unknown role ' ~ m['role']) }}"
    "{% endif %}"
    "{{ '<|assistant|>' if m['role'] == 'assistant' else '<|user|>' }}{{ m['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_SAMPLE = (
    "A replica is one running copy of a model that owns its own set of cores. A slot is one row of the batch, with "
    "its own position and its own part of the cache. The quick brown fox jumps over the lazy dog; 0123456789. "
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter "
    "Deich. 日本語のテキスト、絵文字 🙂🚀 и немного кириллицы."
)


def _options(hidden: int, layers: int, heads: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """The model_type of each configuration, and what it says beyond ``_config``'s own."""
    small = {"n_embd": hidden, "n_layer": layers, "n_head": heads}
    named = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    positions = {"max_position_embeddings": MAX_POSITIONS}
    grouped = {**named, **positions, "num_key_value_heads": max(1, heads // 2), "intermediate_size": 3 * hidden}
    head_dim = hidden // heads
    return {
        "llama": ("llama", grouped),
        "gpt2": ("gpt2", {**small, "n_positions": MAX_POSITIONS}),
        "bloom": ("bloom", {"hidden_size": hidden, "n_layer": layers, "n_head": heads}),
        "gpt_bigcode": ("gpt_bigcode", {**small, "n_positions": MAX_POSITIONS, "multi_query": True}),
        "gptj": ("gptj", {**small, "n_positions": MAX_POSITIONS, "rotary_dim": head_dim // 2}),
        "gpt_neox": ("gpt_neox", {**named, **positions, "intermediate_size": 4 * hidden}),
        "opt": (
            "opt",
            {**named, **positions, "ffn_dim": 4 * hidden, "word_embed_proj_dim": hidden, "init_std": INIT_STD},
        ),
        "mistral": ("mistral", {**grouped, "sliding_window": None}),
        "mistral-window": ("mistral", {**grouped, "sliding_window": WINDOW}),
        "mixtral": (
            "mixtral",
            {**grouped, "sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2},
        ),
        "qwen2": ("qwen2", grouped),
        # The window holds from layer max_window_layers on: the first layer sees everything.
        "qwen3": (
            "qwen3",
            {
                **grouped,
                "head_dim": 2 * head_dim,
                "use_sliding_window": True,
                "sliding_window": WINDOW,
                "max_window_layers": 1,
            },
        ),
    }


def _config(family: str, hidden: int, layers: int, heads: int) -> Any:
    from transformers import AutoConfig

    if family not in FAMILIES:
        raise ValueError(f"no test checkpoint for {family}, only for {', '.join(FAMILIES)}")
    model_type, options = _options(hidden, layers, heads)[family]
    shared: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "initializer_range": INIT_STD,
        "tie_word_embeddings": False,
    }
    return AutoConfig.for_model(model_type, **shared | options)


@lru_cache(maxsize=1)
def byte_level_tokenizer() -> Tokenizer:
    """A byte-level BPE of ``VOCAB_SIZE`` ids, the special ones first; it encodes any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_SAMPLE] * 2, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", BOS_ID)])
    # The model's vocabulary is filled, so that every id that it can produce has a text.
    filling = [f"⟨{number}⟩" for number in range(VOCAB_SIZE - tokenizer.get_vocab_size())]
    tokenizer.add_tokens(filling)
    return tokenizer


def save_tokenizer(path: Path, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Write the tokenizer in files that transformers 4.57 and 5.x both read."""
    path.mkdir(parents=True, exist_ok=True)
    byte_level_tokenizer().save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # what 5.x writes, TokenizersBackend, is unknown to 4.57
        "pad_token": SPECIAL_TOKENS[PAD_ID],
        "bos_token": SPECIAL_TOKENS[BOS_ID],
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def make_checkpoint(
    path: Path,
    family: str,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    seed: int = 0,
    eos: int | list[int] | None = EOS_ID,
    chat_template: str | None = CHAT_TEMPLATE,
) -> Path:
    """Save a model of a family of ``FAMILIES`` with random weights, and its tokenizer, in ``path``; returns ``path``.

    ``eos`` goes into generation_config.json and config.json; None leaves the model without one.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = _config(family, hidden, layers, heads)
    config.eos_token_id = eos
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = eos
    model.save_pretrained(path)
    save_tokenizer(path, chat_template)
    return path


def set_eos(path: Path, eos: int | list[int] | None) -> None:
    """Change the EOS ids of a saved checkpoint, in generation_config.json and config.json."""
    for name in ("generation_config.json", "config.json"):
        settings = json.loads((path / name).read_text())
        settings["eos_token_id"] = eos
        (path / name).write_text(json.dumps(settings))


def make_adapter(path: Path, checkpoint: Path, seed: int, rank: int = 8) -> Path:
    """Writes a LoRA adapter with random weights for the query and down projections of a llama, as peft saves one."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    random, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).named_parameters():
        if name.endswith(("q_proj.weight", "down_proj.weight")):
            prefix, (rows, columns) = f"base_model.model.{name.removesuffix('.weight')}", weight.shape
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, columns, generator=random) * 0.1
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, rank, generator=random) * 0.1
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj", "down_proj"]}
    (path / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": str(checkpoint)}))
    return path


def merged_model(checkpoint: Path, adapter: Path) -> Any:
    """Returns transformers' model with the weights of an adapter of `make_adapter` added to its own."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    settings = json.loads((adapter / "adapter_config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tensors = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{prefix}.lora_A.weight" in tensors:
                low_rank = tensors[f"{prefix}.lora_B.weight"] @ tensors[f"{prefix}.lora_A.weight"]
                weight.add_(low_rank, alpha=settings["lora_alpha"] / settings["r"])
    return model
