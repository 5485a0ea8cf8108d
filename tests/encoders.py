"""Tiny encoders with random weights, as plain checkpoints and as folders of sentence-transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests import checkpoints

FAMILIES = ("bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "deberta-v2", "modernbert")
DECODERS = ("qwen2", "qwen3", "mistral")
TYPED = ("bert", "deberta-v2")  # their tokenizers tell the second text of a pair from the first
HIDDEN = 32
WORDS = 95
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_POSITIONS = 128

_SHAPE: dict[str, Any] = {
    "vocab_size": len(SPECIAL) + WORDS,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "initializer_range": 0.2,  # large weights, so that a wrong mask or position shows
    "pad_token_id": 0,
    "max_position_embeddings": MAX_POSITIONS,
}
_SHIFTED = {"pad_token_id": 1, "max_position_embeddings": MAX_POSITIONS + 2}  # positions begin after the padding's id
_DECODER = {"vocab_size": checkpoints.VOCAB_SIZE, "num_key_value_heads": 2, "head_dim": 8}
_OPTIONS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": _SHIFTED,
    "xlm-roberta": _SHIFTED,
    "distilbert": {"dim": HIDDEN, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    "mpnet": _SHIFTED,
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16},
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2, "bos_token_id": 2, "eos_token_id": 3},
    "qwen2": _DECODER,
    "qwen3": _DECODER,
    "mistral": {**_DECODER, "sliding_window": None},
}


def save_tokenizer(folder: Path, types: bool) -> None:
    """Saves a tokenizer of words, which joins pairs as BERT's does, and gives ``types`` as BERT's does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = [*SPECIAL, *(f"w{i}" for i in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
    special = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair=pair, special_tokens=special)
    fast: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", *(["token_type_ids"] if types else []), "attention_mask"],
    )
    fast.save_pretrained(folder)


def save_encoder(folder: Path, family: str, *, labels: int = 0, **options: Any) -> Any:
    """Saves a model with its tokenizer, with ``labels`` one of classes. Returns the tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(len(family))
    heads = {"num_labels": labels} if labels else {}
    config: Any = AutoConfig.for_model(family, **{**_SHAPE, **_OPTIONS[family], **heads, **options})
    auto: Any = AutoModelForSequenceClassification if labels else AutoModel
    auto.from_config(config).save_pretrained(folder)
    if family in DECODERS:
        checkpoints.save_tokenizer(folder, chat_template=None)  # with one, sentence-transformers would fill it in
    else:
        save_tokenizer(folder, family in TYPED)
    return AutoTokenizer.from_pretrained(folder)  # it may be another class for the family


def sentence_transformer(folder: Path, pooling: Any, *after: Any, width: int = HIDDEN) -> Any:
    """Returns the model of sentence-transformers over a plain checkpoint, with ``after`` behind the pooling."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    return SentenceTransformer(modules=[Transformer(str(folder)), Pooling(width, pooling), *after], device="cpu")


def texts(count: int, *, seed: int = 0, longest: int = 18) -> list[str]:
    """Returns texts of 1 to ``longest`` words."""
    draw = random.Random(seed)
    return [" ".join(f"w{draw.randrange(WORDS)}" for _ in range(draw.randint(1, longest))) for _ in range(count)]
