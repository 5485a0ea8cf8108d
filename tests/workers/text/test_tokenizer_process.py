"""Tokenizers and chat templates that hang or exhaust memory end their own process only."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.checkpoints import save_tokenizer
from tests.tiers import everyday
from workers.messages.engine_protocol import EngineLoadError
from workers.text import tokenizer_process
from workers.text.tokenizer import ChatTemplateError, PromptTokenizer, TemplateInput, TooManyTokens, load_tokenizer
from workers.text.tokenizer_process import TokenizerFault, load_apart

CHAT = [{"role": "user", "content": "hello there"}]
SURE_S = 30.0


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is not done within half a second is late."""
    monkeypatch.setattr(tokenizer_process, "CALL_S", 0.5)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_process, "CALL_S", SURE_S)


def processes() -> list[psutil.Process]:
    """The nursery and all below it; other tests' servers are children of this process as well."""
    family: list[psutil.Process] = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if "workers.text.tokenizer_process" in child.cmdline():
                family += [child, *child.children(recursive=True)]
    return family


def of_template(folder: Path, template: str) -> PromptTokenizer:
    save_tokenizer(folder, template)
    return load_apart("cpu", str(folder))


def of_json(folder: Path, change: Callable[[dict[str, Any]], None]) -> PromptTokenizer:
    """The tokenizer of the tests, with another tokenizer.json."""
    save_tokenizer(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return load_apart("cpu", str(folder))


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LATE = {
    "loops": ENDLESS,
    "doubled text": "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}"
    "{% endfor %}{{ ns.x }}",
    "doubled lists": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
    "{{ ns.x | tojson }}",
    "a wide field": "{{ '%3000000000d' % 1 }}",
    "a large power": "{{ 3 ** (10 ** 9) }}",
    "filler text": "{{ lipsum(n=10 ** 7) }}",
    "an output of a gigabyte": "{% for i in range(1000) %}{{ 'a' * 1000000 }}{% endfor %}",
}
REFUSED = {
    "a long range": ("{% for i in range(10 ** 9) %}{% endfor %}", "OverflowError"),
    "much memory": ("{{ 'a' * 10 ** 10 }}", "MemoryError"),
    "endless macros": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    "nested brackets": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "RecursionError"),
    "a class": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "globals": ("{{ cycler.__init__.__globals__.os.system('id') }}", "unsafe"),
    "a subclass": ("{{ ().__class__.__base__.__subclasses__() }}", "unsafe"),
    "attr": ("{{ ''|attr('__class__') }}{{ (''|attr('__class__')).mro() }}", "unsafe|undefined"),
    "a list that is changed": ("{{ messages.append(1) }}", "unsafe|not safely"),
    "a file": ("{% include '/etc/passwd' %}", "no loader"),
    "a long complaint": ("{{ raise_exception('x' * 10 ** 6) }}", "^x{2000}$"),
}


@pytest.mark.parametrize("name", everyday(LATE, ("loops", "doubled text", "a wide field")))
def test_a_template_that_does_not_end_is_killed(name: str, tmp_path: Path) -> None:
    """At its deadline or its memory limit."""
    tokenizer = of_template(tmp_path, LATE[name])
    before = processes()
    began = time.monotonic()
    with pytest.raises((TokenizerFault, ChatTemplateError, TooManyTokens)):
        tokenizer.apply_chat_template(TemplateInput(CHAT), most=1000)
    assert time.monotonic() - began < SURE_S
    _, alive = psutil.wait_procs([process for process in processes() if process not in before], timeout=SURE_S)
    assert alive == []


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("patient")
def test_a_template_that_needs_too_much_is_rejected(name: str, tmp_path: Path) -> None:
    template, message = REFUSED[name]
    with pytest.raises(ChatTemplateError, match=message):
        of_template(tmp_path, template).apply_chat_template(TemplateInput(CHAT))


def split(pattern: str) -> Callable[[dict[str, Any]], None]:
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return lambda content: content.update(pre_tokenizer=step)


def normalizers(count: int, text: str) -> Callable[[dict[str, Any]], None]:
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": text}
    return lambda content: content.update(normalizer={"type": "Sequence", "normalizers": [step] * count})


FAULTS = {
    "exponential backtracking": split("(a+)+b"),
    "alternatives": split("(a|aa)+[bc]"),
    "backtracking below the limit": split("a*a*[bc]|a"),
    "a text that doubles": normalizers(60, "aa"),
    "many normalizers": normalizers(100_000, "a"),
}


@pytest.mark.parametrize("name", everyday(FAULTS, ("exponential backtracking", "many normalizers")))
def test_a_tokenizer_that_does_not_end_is_killed(name: str, tmp_path: Path) -> None:
    """Also if its library panics, which does not raise an Exception."""
    tokenizer = of_json(tmp_path, FAULTS[name])
    began = time.monotonic()
    with pytest.raises(TokenizerFault):
        tokenizer.encode("a" * 2000)
    assert time.monotonic() - began < SURE_S


def nested(content: dict[str, Any]) -> None:
    step: dict[str, Any] = {"type": "Lowercase"}
    for _ in range(100):
        step = {"type": "Sequence", "normalizers": [step]}
    content["normalizer"] = step


UNREADABLE: dict[str, Callable[[dict[str, Any]], None]] = {
    "nested sequences": nested,
    "half a pattern": split("(((("),
    "unknown merges": lambda content: content["model"].update(merges=[["nope", "nada"]]),
    "dropout 5": lambda content: content["model"].update(dropout=5.0),
    "no model": lambda content: content.pop("model"),
    "a number for a model": lambda content: content.update(model=7),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_broken_tokenizer_is_a_load_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(EngineLoadError) as caught:
        of_json(tmp_path, UNREADABLE[name])
    assert caught.value.id == "bad-tokenizer"


BRACKETS = "[" * 100_000 + "]" * 100_000


def large(file: Path) -> None:
    with file.open("wb") as stream:
        stream.truncate(2**37)


FILES: dict[str, tuple[str, Callable[[Path], object]]] = {
    f"{kind} in {name}": (name, make)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    for kind, make in {
        "brackets": lambda file: file.write_text(BRACKETS),
        "deep brackets": lambda file: file.write_text(f'{{"model": {BRACKETS}, "x": {BRACKETS}}}'),
    }.items()
}
FILES |= {f"128 GiB of {name}": (name, large) for name in ("tokenizer.json", "chat_template.jinja")}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_crashes_its_reader_is_a_load_error(name: str, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    file, make = FILES[name]
    make(tmp_path / file)
    with pytest.raises(EngineLoadError) as caught:
        load_apart("cpu", str(tmp_path))
    assert caught.value.id == "bad-tokenizer"


def test_a_load_that_takes_too_long_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """300,000 added tokens take 10 s."""
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    added = [{"id": 600 + i, "content": f"tok{i}", **token} for i in range(300_000)]
    load_apart("cpu", str(_good(tmp_path)))  # the nursery is there
    monkeypatch.setattr(tokenizer_process, "LOAD_S", 0.5)
    with pytest.raises(EngineLoadError, match="not loaded within"):
        of_json(tmp_path / "slow", lambda content: content["added_tokens"].extend(added))


def _good(folder: Path) -> Path:
    save_tokenizer(folder / "good")
    return folder / "good"


@pytest.mark.usefixtures("patient")
def test_a_tokenizer_process_returns_the_results_of_the_tokenizer(tmp_path: Path) -> None:
    """All methods and their errors."""
    save_tokenizer(tmp_path)
    apart, direct = load_apart("cpu", str(tmp_path)), load_tokenizer("cpu", str(tmp_path))

    def outcomes(tokenizer: PromptTokenizer) -> list[object]:
        calls: list[Callable[[], object]] = [
            lambda: tokenizer.vocab_size,
            lambda: tokenizer.encode("Zwölf 🙂"),
            lambda: tokenizer.encode("Zwölf 🙂", add_special_tokens=False),
            lambda: tokenizer.encode("hello " * 1000, most=5),
            lambda: tokenizer.encode("\ud800"),
            lambda: tokenizer.apply_chat_template(TemplateInput(CHAT)),
            lambda: tokenizer.apply_chat_template(TemplateInput(CHAT, template_kwargs={"huge": 10**30})),
            lambda: tokenizer.apply_chat_template(TemplateInput(CHAT, add_generation_prompt=False), most=2),
            lambda: tokenizer.apply_chat_template(
                TemplateInput(CHAT, continue_final_message=True, add_special_tokens=True)
            ),
            lambda: tokenizer.apply_chat_template(TemplateInput([])),
            lambda: tokenizer.apply_chat_template(TemplateInput([{"role": "nobody", "content": ""}])),
            lambda: tokenizer.apply_chat_template(
                TemplateInput(CHAT, [{"type": "function", "function": {"name": "f"}}])
            ),
            lambda: tokenizer.chat_template(False),
            lambda: tokenizer.decode([1, 70, 80, 10**6]),
            lambda: tokenizer.tokens([1, 70, 80, 10**6]),
            lambda: tokenizer.text([1, 70, 80]),
        ]
        results: list[object] = []
        for call in calls:
            try:
                results.append(call())
            except (TooManyTokens, ChatTemplateError, ValueError, OverflowError) as error:
                results.append((type(error), str(error)))
        return results

    assert outcomes(apart) == outcomes(direct)


@pytest.mark.usefixtures("patient")
def test_no_tokenizer_process_has_torch(tmp_path: Path) -> None:
    """Its import takes longer than all else that they do before their first call."""
    tokenizer = load_apart("cpu", str(_good(tmp_path)))
    tokenizer.encode("Zwölf")
    maps = [Path(f"/proc/{process.pid}/maps").read_text() for process in processes()]

    assert len(maps) >= 3
    assert not any("libtorch" in mapped for mapped in maps)


@pytest.mark.usefixtures("patient")
def test_the_call_after_a_killed_process_uses_another(tmp_path: Path) -> None:
    """After the end of a worker, of a loader with its workers, or of the nursery with all of them."""
    tokenizer = load_apart("cpu", str(_good(tmp_path)))
    ids = tokenizer.encode("hello")
    for depth in (3, 2, 1):
        ended: list[psutil.Process] = []
        for process in processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # one of an earlier test that ends just now
                if _depth(process) == depth:
                    ended += [process, *process.children(recursive=True)]
                    process.kill()
        assert len(ended) >= 4 - depth
        assert psutil.wait_procs(ended, timeout=SURE_S)[1] == []
        assert tokenizer.encode("hello") == ids


def _depth(process: psutil.Process) -> int:
    """1 for a child of this process, 2 for its child; 0 for one whose parent has ended."""
    parents = [parent.pid for parent in process.parents()]
    return parents.index(os.getpid()) + 1 if os.getpid() in parents else 0


@pytest.mark.usefixtures("patient")
def test_concurrent_calls_have_separate_processes(tmp_path: Path) -> None:
    """A slow text does not delay a short one."""
    tokenizer = of_json(tmp_path, split("a*a*[bc]|a"))
    tokenizer.encode("b")

    def tokenize_slowly() -> None:
        with contextlib.suppress(TokenizerFault):
            tokenizer.encode("a" * 4000)

    slow = threading.Thread(target=tokenize_slowly, daemon=True)
    slow.start()
    began = time.monotonic()
    tokenizer.encode("b")
    assert slow.is_alive()
    assert time.monotonic() - began < SURE_S / 2


def test_a_deleted_tokenizer_leaves_no_process(tmp_path: Path) -> None:
    tokenizer = load_apart("cpu", str(_good(tmp_path)))
    before = processes()
    other = load_apart("cpu", str(_good(tmp_path)))
    other.encode("hello")
    new = [process for process in processes() if process not in before]
    assert len(new) == 2
    del other
    gc.collect()
    ended, alive = psutil.wait_procs(new, timeout=SURE_S)
    assert (len(ended), alive) == (2, [])
    assert tokenizer.encode("hello")


def test_special_tokens_are_not_in_a_text(tmp_path: Path) -> None:
    tokenizer = load_apart("cpu", str(_good(tmp_path)))
    ids = tokenizer.encode("hello")
    assert tokenizer.text([*ids, 2]) == "hello"
