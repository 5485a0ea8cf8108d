from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.checkpoints import BOS_ID, VOCAB_SIZE, save_tokenizer
from workers.messages.engine_protocol import EngineLoadError
from workers.text.tokenizer import (
    ByteTokenizer,
    ChatTemplateError,
    NoChatTemplate,
    NoToolsInTemplate,
    TemplateInput,
    Tokenizer,
    load_tokenizer,
    own_class,
)

CHAT = [
    {"role": "user", "content": "Grüß Gott 🙂"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "?"},
]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    return load_tokenizer("cpu", str(path))


def transformers_tokenizer(path: Path):  # type: ignore[no-untyped-def]
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path))


@pytest.mark.parametrize("special", [True, False])
def test_ids_are_those_of_transformers(tmp_path: Path, special: bool) -> None:
    """They are encoded by the fast tokenizer directly."""
    save_tokenizer(tmp_path)
    expected = transformers_tokenizer(tmp_path)("Hello wörld 日本", add_special_tokens=special)["input_ids"]
    assert load_tokenizer("cpu", str(tmp_path)).encode("Hello wörld 日本", add_special_tokens=special) == expected


def test_a_prompt_gets_its_special_tokens_and_a_rendered_chat_does_not(hub: Tokenizer) -> None:
    """The template writes them itself; otherwise BOS would be doubled."""
    assert hub.encode("hi")[0] == BOS_ID
    assert hub.apply_chat_template(TemplateInput(CHAT)).count(BOS_ID) == 1


def test_the_ids_of_a_chat_are_those_of_transformers(tmp_path: Path) -> None:
    """Of its apply_chat_template, with the generation prompt."""
    save_tokenizer(tmp_path)
    expected = transformers_tokenizer(tmp_path).apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)
    assert load_tokenizer("cpu", str(tmp_path)).apply_chat_template(TemplateInput(CHAT)) == expected["input_ids"]


def test_the_vocabulary_size_includes_added_tokens(hub: Tokenizer) -> None:
    """Ids are below it."""
    assert hub.vocab_size == VOCAB_SIZE


def test_a_model_without_a_chat_template_rejects_chats(tmp_path: Path) -> None:
    """With an exception of its own: the model takes prompts only."""
    save_tokenizer(tmp_path, chat_template=None)
    with pytest.raises(NoChatTemplate, match="chat template"):
        load_tokenizer("cpu", str(tmp_path)).apply_chat_template(TemplateInput(CHAT))


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, [{"role": "tool", "content": "x"}], "unknown role tool"),
        (None, [], "empty"),
        ("{{ messages[0]['content'] + 1 }}", CHAT, "str"),
        ("{% for %}", CHAT, "."),
        ("{{ messages[0].nothing.deeper }}", CHAT, "nothing"),
    ],
)
def test_a_chat_that_the_template_cannot_render_is_a_template_error(
    tmp_path: Path, template: str | None, messages: list[dict[str, str]], message: str
) -> None:
    """With the template's own text for each exception."""
    save_tokenizer(tmp_path, **({} if template is None else {"chat_template": template}))
    with pytest.raises(ChatTemplateError, match=message):
        load_tokenizer("cpu", str(tmp_path)).apply_chat_template(TemplateInput(messages))


@pytest.mark.parametrize("engine", ["cpu", "echo"])
def test_a_lone_surrogate_is_a_value_error(hub: Tokenizer, engine: str) -> None:
    r"""JSON can carry "\ud800", which is not text and must not crash the tokenizer."""
    with pytest.raises(ValueError, match="not valid Unicode"):
        (hub if engine == "cpu" else ByteTokenizer()).encode("a\ud800")


def test_threads_may_share_a_tokenizer(hub: Tokenizer) -> None:
    """No "Already borrowed": eight threads encode, render and stream as one thread does."""

    def work(number: int) -> tuple[list[int], list[int], str]:
        ids = hub.encode(f"number {number} " * 20)
        stream = hub.stream([BOS_ID], skip_special_tokens=True)
        return ids, hub.apply_chat_template(TemplateInput(CHAT)), "".join(map(stream.push, ids)) + stream.flush()

    expected = [work(number) for number in range(64)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(64))) == expected


def empty(path: Path) -> None:
    pass


def garbled(path: Path) -> None:
    (path / "tokenizer.json").write_text("{")


def truncated(path: Path) -> None:
    save_tokenizer(path)
    text = (path / "tokenizer.json").read_text()
    (path / "tokenizer.json").write_text(text[: len(text) // 2])


@pytest.mark.parametrize(
    ("fault", "id"), [(empty, "no-tokenizer"), (garbled, "bad-tokenizer"), (truncated, "bad-tokenizer")]
)
def test_a_tokenizer_that_cannot_be_read_is_a_load_error(
    tmp_path: Path, fault: Callable[[Path], None], id: str
) -> None:
    """The id distinguishes missing from broken; the text has the folder."""
    fault(tmp_path)
    with pytest.raises(EngineLoadError) as caught:
        load_tokenizer("cpu", str(tmp_path))
    assert caught.value.id == id
    assert str(tmp_path) in caught.value.what


def with_code(path: Path, named: object) -> Path:
    """A tokenizer of a class that only the checkpoint's code has; the code would leave a mark."""
    save_tokenizer(path)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "MyTokenizer", "auto_map": named}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "tokenization_my.py").write_text(f"open({str(path / 'mark')!r}, 'w')")
    return path


NAMED = [
    {"AutoTokenizer": ["tokenization_my.MyTokenizer", None]},
    {"AutoTokenizer": "tokenization_my.MyTokenizer"},
    ["tokenization_my.MyTokenizer", None],
]


@pytest.mark.parametrize("named", NAMED)
def test_a_tokenizer_json_is_read_without_the_class_of_the_checkpoint(
    hub: Tokenizer, tmp_path: Path, named: object
) -> None:
    """Ids and chats are the same, and the code is not run, for all forms of auto_map."""
    tokenizer = load_tokenizer("cpu", str(with_code(tmp_path, named)))
    assert tokenizer.encode("Hello wörld 日本") == hub.encode("Hello wörld 日本")
    assert tokenizer.apply_chat_template(TemplateInput(CHAT)) == hub.apply_chat_template(TemplateInput(CHAT))
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("named", NAMED)
def test_a_tokenizer_that_is_only_code_is_refused(tmp_path: Path, named: object) -> None:
    """There is no tokenizer.json. The error names the code."""
    (with_code(tmp_path, named) / "tokenizer.json").rename(tmp_path / "vocab.json")
    with pytest.raises(EngineLoadError, match=r"tokenizer-needs-code.*tokenization_my\.MyTokenizer"):
        load_tokenizer("cpu", str(tmp_path))


@pytest.mark.parametrize(
    "settings",
    [
        {"tokenizer_class": "LlamaTokenizer", "auto_map": NAMED[0]},
        {"tokenizer_class": "LlamaTokenizerFast", "auto_map": NAMED[0]},
        {"tokenizer_class": "MyTokenizer", "auto_map": {"AutoConfig": "my.MyConfig"}},
        {"tokenizer_class": "MyTokenizer"},
        [],
    ],
)
def test_a_class_that_transformers_has_needs_no_code(tmp_path: Path, settings: object) -> None:
    """A model without auto_map for tokenizers needs none, either."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert own_class(tmp_path) is None


def test_an_engine_with_a_model_needs_a_tokenizer_directory() -> None:
    """Echo does not."""
    with pytest.raises(EngineLoadError, match="no-tokenizer"):
        load_tokenizer("cpu", None)


def test_saved_truncation_and_padding_are_disabled(tmp_path: Path) -> None:
    """They would change the prompts of clients."""
    save_tokenizer(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    saved["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    assert len(load_tokenizer("cpu", str(tmp_path)).encode("one two three four five six")) > 4


def test_echo_tokenizes_to_bytes() -> None:
    """A chat is one line for each message."""
    tokenizer = load_tokenizer("echo", None)
    assert tokenizer.encode("aé") == [0x61, 0xC3, 0xA9]
    assert (
        bytes(tokenizer.apply_chat_template(TemplateInput(CHAT[1:]))).decode() == "assistant: Hi\nuser: ?\nassistant:"
    )


@pytest.mark.parametrize("message", [{"role": "user"}, {"content": "x"}, {"role": "user", "content": ["x"]}])
def test_echo_rejects_messages_that_are_not_text(message: dict[str, object]) -> None:
    """With the error of a template."""
    with pytest.raises(ChatTemplateError):
        ByteTokenizer().apply_chat_template(TemplateInput([message]))


def test_a_saved_checkpoint_has_its_tokenizer(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """A copied model directory is complete."""
    copy = shutil.copytree(checkpoint("gpt2"), tmp_path / "copy")
    assert load_tokenizer("cpu", str(copy)).vocab_size == VOCAB_SIZE


@pytest.mark.parametrize("text", ["Zwölf Boxkämpfer 🙂\n\t日本", " a  b", "x\x00\x7f\xa0\xad"])
def test_the_bytes_of_tokens_joined_are_those_of_the_text(hub: Tokenizer, text: str) -> None:
    """Also where a token is a part of a character."""
    for tokenizer in (hub, ByteTokenizer()):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_a_part_of_a_character_keeps_its_bytes(hub: Tokenizer) -> None:
    """Decoding it alone would return U+FFFD."""
    pieces = [hub.token_bytes(id) for id in hub.encode("🚀", add_special_tokens=False)]
    assert len(pieces) > 1
    assert all(b"\xef\xbf\xbd" not in piece for piece in pieces)


def test_special_and_added_tokens_have_bytes_and_unknown_ids_none(hub: Tokenizer) -> None:
    """Those of a special token are its name."""
    assert hub.token_bytes(BOS_ID) == b"<|bos|>"
    assert hub.token_bytes(VOCAB_SIZE - 1).decode().startswith("⟨")
    assert hub.token_bytes(VOCAB_SIZE + 5) == b""
    assert ByteTokenizer().token_bytes(ByteTokenizer.EOS_ID) == b""


def sentencepiece_like(path: Path, decoder: object) -> Tokenizer:
    from tokenizers import Tokenizer as Fast
    from tokenizers import models
    from transformers import PreTrainedTokenizerFast

    entries = ["<unk>", "▁Hi", "▁", "there", *(f"<0x{byte:02X}>" for byte in range(256))]
    fast = Fast(models.BPE({entry: id for id, entry in enumerate(entries)}, [], byte_fallback=True, unk_token="<unk>"))
    fast.decoder = decoder  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="<unk>").save_pretrained(path)
    return load_tokenizer("cpu", str(path))


def test_sentencepiece_tokens_are_converted_to_bytes(tmp_path: Path) -> None:
    """U+2581 is a space and <0xE4> is a byte, with both decoders of such models."""
    from tokenizers import decoders

    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    llama = sentencepiece_like(tmp_path / "llama", decoders.Sequence(steps))
    assert [llama.token_bytes(id) for id in (1, 3, 4 + 0xE4)] == [b" Hi", b"there", b"\xe4"]
    metaspace = sentencepiece_like(tmp_path / "t5", decoders.Metaspace())
    assert [metaspace.token_bytes(id) for id in (1, 2, 4)] == [b" Hi", b" ", b"<0x00>"]


def test_tokens_of_other_vocabularies_are_decoded_one_by_one(tmp_path: Path) -> None:
    """For example, those of BPE with a suffix at the end of words."""
    from tokenizers import decoders

    assert sentencepiece_like(tmp_path, decoders.BPEDecoder(suffix="▁Hi")).token_bytes(3) == b"there"


# Tools, and further variables of the template

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
WITH_TOOLS = (
    "{# tools #}{% if tools %}[{{ tools | tojson }}]{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments.a }}){% endfor %}"
    "{{ m.tool_call_id }}{% endfor %}{{ extra }}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def rendered(path: Path, template: str, messages: list[dict[str, object]], *args: object, **more: object) -> str:
    save_tokenizer(path, template)
    tokenizer = load_tokenizer("cpu", str(path))
    return tokenizer.decode(tokenizer.apply_chat_template(TemplateInput(messages, *args, **more)))  # type: ignore[arg-type]


def test_the_template_gets_tools_and_calls(tmp_path: Path) -> None:
    """Tools and messages are passed on unchanged."""
    messages: list[dict[str, object]] = [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 7}}}]},
        {"role": "tool", "content": "8", "tool_call_id": "c1"},
    ]

    text = rendered(tmp_path, WITH_TOOLS, messages, TOOLS)

    assert text == f"[{json.dumps(TOOLS)}]<assistant>f(7)<tool>8c1<assistant>"


def test_a_template_without_tools_rejects_them(tmp_path: Path) -> None:
    """The model would not see them. A comment about tools does not count."""
    save_tokenizer(tmp_path, "{# tools #}no tools{{ messages[0].content }}")
    for tokenizer in (load_tokenizer("cpu", str(tmp_path)), ByteTokenizer()):
        with pytest.raises(NoToolsInTemplate, match="does not support tools"):
            tokenizer.apply_chat_template(TemplateInput(CHAT, TOOLS))
        assert tokenizer.apply_chat_template(TemplateInput(CHAT, []))


def test_a_model_may_have_a_separate_template_for_tools(tmp_path: Path) -> None:
    """It is named `tool_use`; without tools, the default is used."""
    save_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = {"default": "plain", "tool_use": "{{ tools | length }} tools"}
    settings["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer("cpu", str(tmp_path))

    assert [tokenizer.decode(tokenizer.apply_chat_template(TemplateInput(CHAT, tools))) for tools in (None, TOOLS)] == [
        "plain",
        "1 tools",
    ]
    assert [tokenizer.chat_template(tools) for tools in (False, True)] == list(named.values())


def test_template_variables_cannot_be_arguments_of_transformers(tmp_path: Path) -> None:
    """A client could otherwise disable the rendering."""
    hello: list[dict[str, object]] = [{"role": "user", "content": "x"}]
    assert rendered(tmp_path, WITH_TOOLS, hello, template_kwargs={"extra": "!"}) == "<user>x!<assistant>"
    for name in ("tokenize", "chat_template", "tools", "conversation", "messages", "kwargs", "self"):
        with pytest.raises(ChatTemplateError, match=f"{name} is not a variable of chat templates"):
            rendered(tmp_path, WITH_TOOLS, hello, template_kwargs={name: "x"})


def test_the_last_message_can_be_continued(tmp_path: Path) -> None:
    """Without a generation prompt, the chat just ends."""
    chat: list[dict[str, object]] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}]
    assert rendered(tmp_path, WITH_TOOLS, chat, continue_final_message=True) == "<user>Hi<assistant>Well,"
    assert rendered(tmp_path, WITH_TOOLS, chat[:1], add_generation_prompt=False) == "<user>Hi"
    byte = ByteTokenizer()
    assert (
        byte.decode(byte.apply_chat_template(TemplateInput(chat, continue_final_message=True)))
        == "user: Hi\nassistant: Well,"
    )
    assert byte.decode(byte.apply_chat_template(TemplateInput(chat[:1], add_generation_prompt=False))) == "user: Hi\n"


def test_the_role_developer_becomes_system_if_the_template_does_not_have_it(tmp_path: Path) -> None:
    """Most templates drop unknown roles."""
    chat: list[dict[str, object]] = [{"role": "developer", "content": "x"}]
    assert rendered(tmp_path, WITH_TOOLS, chat) == "<system>x<assistant>"
    knows = "{{ 'developer' if messages[0].role == 'developer' else 'system' }}"
    assert rendered(tmp_path, knows, chat) == "developer"


@pytest.mark.parametrize(
    ("template", "content", "calls", "text"),
    [
        ("{{ m.reasoning_content }} | {{ m.content }}", "So.", True, "Hm. | So."),  # Qwen3, GLM, Kimi
        ("{{ m.get('reasoning') }} | {{ m.content }}", "So.", True, "Hm. | So."),  # Gemma 4
        ("{{ m.thinking }} | {{ m.content }}", "So.", True, "Hm. | So."),  # LFM2
        ("{{ '<|channel|>' ~ m.thinking ~ ' | ' ~ m.content }}", "So.", False, "<|channel|>Hm. | So."),  # gpt-oss
        ("{{ '<|channel|>' ~ m.thinking ~ ' | ' ~ m.content }}", "", True, "<|channel|>Hm. | "),
        ("{{ '<|channel|>' ~ m.thinking ~ ' | ' ~ m.content }}", "So.", True, "<|channel|>Hm.\n\nSo. | "),
        (  # Mistral
            "{% for b in m.content %}{{ '[THINK]' ~ b.thinking if b.type == 'thinking' else b.text }}{% endfor %}",
            "So.",
            False,
            "[THINK]Hm.So.",
        ),
        ("{{ m.content }}{% if thinking %}<think>{% endif %}", "So.", True, "So."),  # DeepSeek: reads none
    ],
)
def test_reasoning_gets_the_name_that_the_template_reads(
    tmp_path: Path, template: str, content: str, calls: bool, text: str
) -> None:
    """The expressions are those of the families' templates."""
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    message: dict[str, object] = {"role": "assistant", "content": content, "reasoning_content": "Hm."}
    if calls:
        message["tool_calls"] = [call]

    assert rendered(tmp_path, "{% set m = messages[0] %}" + template, [message]) == text


def test_ids_are_converted_to_text_and_to_vocabulary_entries(hub: Tokenizer) -> None:
    """Special tokens have their names; unknown ids are empty."""
    ids = hub.encode("Hi there 🙂")
    assert hub.decode(ids) == "<|bos|>Hi there 🙂"
    assert hub.tokens(ids)[0] == "<|bos|>"
    assert "".join(hub.tokens(ids)[1:]).startswith("Hi")
    assert hub.tokens([VOCAB_SIZE + 5]) == [""]
    assert hub.decode([VOCAB_SIZE + 5]) == ""
    byte = ByteTokenizer()
    assert byte.decode([*"é".encode(), byte.EOS_ID]) == "é"
    assert byte.tokens([65, byte.EOS_ID]) == ["A", ""]
