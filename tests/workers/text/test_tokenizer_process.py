"""Tokenizers and chat templates that hang or exhaust memory end their own process only."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.checkpoints import save_tokenizer
from tests.fleet import until
from tests.tiers import everyday
from workers.messages.engine_protocol import EngineLoadError
from workers.text import tokenizer_pool
from workers.text.tokenizer import ChatTemplateError, PromptTokenizer, TemplateInput, TooManyTokens, load_tokenizer
from workers.text.tokenizer_pool import TokenizerBusy, TokenizerFault, TokenizerPool, load_apart

CHAT = [{"role": "user", "content": "hello there"}]
SURE_S = 30.0
POOL = TokenizerPool()


@pytest.fixture(scope="module", autouse=True)
def ended() -> Iterator[None]:
    """The processes of this file's tokenizers have descriptors in this process."""
    yield
    POOL.retain(())


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is not done within half a second is late."""
    monkeypatch.setattr(tokenizer_pool, "CALL_S", 0.5)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_pool, "CALL_S", SURE_S)


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
    return load_apart(POOL, "cpu", str(folder))


def of_json(folder: Path, change: Callable[[dict[str, Any]], None]) -> PromptTokenizer:
    """The tokenizer of the tests, with another tokenizer.json."""
    save_tokenizer(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return load_apart(POOL, "cpu", str(folder))


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
        load_apart(POOL, "cpu", str(tmp_path))
    assert caught.value.id == "bad-tokenizer"


def test_a_load_that_takes_too_long_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """300,000 added tokens take 10 s."""
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    added = [{"id": 600 + i, "content": f"tok{i}", **token} for i in range(300_000)]
    load_apart(POOL, "cpu", str(_good(tmp_path)))  # the nursery is there
    monkeypatch.setattr(tokenizer_pool, "LOAD_S", 0.5)
    with pytest.raises(EngineLoadError, match="not loaded within"):
        of_json(tmp_path / "slow", lambda content: content["added_tokens"].extend(added))


def _good(folder: Path) -> Path:
    save_tokenizer(folder / "good")
    return folder / "good"


@pytest.mark.usefixtures("patient")
def test_a_tokenizer_process_returns_the_results_of_the_tokenizer(tmp_path: Path) -> None:
    """All methods and their errors."""
    save_tokenizer(tmp_path)
    apart, direct = load_apart(POOL, "cpu", str(tmp_path)), load_tokenizer("cpu", str(tmp_path))

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
    tokenizer = load_apart(POOL, "cpu", str(_good(tmp_path)))
    tokenizer.encode("Zwölf")
    maps = [Path(f"/proc/{process.pid}/maps").read_text() for process in processes()]

    assert len(maps) >= 3
    assert not any("libtorch" in mapped for mapped in maps)


@pytest.mark.usefixtures("patient")
def test_the_call_after_a_killed_process_uses_another(tmp_path: Path) -> None:
    """After the end of a worker, of a loader with its workers, or of the nursery with all of them."""
    tokenizer = load_apart(POOL, "cpu", str(_good(tmp_path)))
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
        with contextlib.suppress(TokenizerFault, TokenizerBusy):
            tokenizer.encode("a" * 4000)

    slow = threading.Thread(target=tokenize_slowly, daemon=True)
    slow.start()
    began = time.monotonic()
    tokenizer.encode("b")
    assert slow.is_alive()
    assert time.monotonic() - began < SURE_S / 2


class Opened:
    """Tokenizers of a new pool, and the processes that have started since."""

    def __init__(self, folder: Path) -> None:
        self.pool = TokenizerPool()
        self._folder = folder
        load_apart(POOL, "cpu", str(_good(folder))).encode("hello")  # the nursery is there
        self._before = processes()

    def tokenizer(self, name: str, content: str = "") -> PromptTokenizer:
        save_tokenizer(self._folder / name)
        return load_apart(self.pool, "cpu", str(self._folder / name), content=content)

    def processes(self) -> list[psutil.Process]:
        return [process for process in processes() if process not in self._before and process.is_running()]

    def has(self, count: int) -> bool:
        return len(self.processes()) == count


@pytest.fixture
def opened(tmp_path: Path, patient: None) -> Iterator[Opened]:
    tokenizers = Opened(tmp_path)
    yield tokenizers
    tokenizers.pool.retain(())


def test_equal_tokenizers_share_their_processes(opened: Opened) -> None:
    """Whichever folder they come from."""
    for name in ("a", "b", "c"):
        opened.tokenizer(name, "equal").encode("hello")

    assert len(opened.processes()) == 2


def test_a_dropped_tokenizer_leaves_no_process(opened: Opened) -> None:
    opened.tokenizer("kept", "kept").encode("hello")
    kept = opened.processes()
    dropped = opened.tokenizer("dropped", "dropped")
    dropped.encode("hello")
    ended = [process for process in opened.processes() if process not in kept]

    opened.pool.retain({"kept"})

    assert len(ended) == 2
    assert psutil.wait_procs(ended, timeout=SURE_S)[1] == []
    assert opened.processes() == kept


def test_a_tokenizer_that_is_dropped_during_a_call_ends_with_it(opened: Opened) -> None:
    tokenizer = opened.tokenizer("a", "a")
    calls = [threading.Thread(target=lambda: tokenizer.encode("hello " * 100_000)) for _ in range(2)]
    for call in calls:
        call.start()
    until(lambda: len(opened.processes()) > 1, SURE_S, "the calls have begun")

    opened.pool.retain(())
    for call in calls:
        call.join(SURE_S)

    until(lambda: not opened.processes(), SURE_S, "its processes have ended")


def test_idle_processes_end_and_start_again_with_a_call(opened: Opened) -> None:
    """Workers after a minute, loaders later."""
    tokenizer = opened.tokenizer("a")
    ids = tokenizer.encode("hello")
    for idle_s, left in (
        (tokenizer_pool.WORKER_IDLE_S / 2, 2),
        (tokenizer_pool.WORKER_IDLE_S, 1),
        (tokenizer_pool.TOKENIZER_IDLE_S, 0),
    ):
        opened.pool.sweep(time.monotonic() + idle_s + 1)
        until(partial(opened.has, left), SURE_S, f"{left} processes")

    assert tokenizer.encode("hello") == ids


def test_the_processes_of_all_tokenizers_are_bounded(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokenizers than processes serve in turn: those that were not used for longest end."""
    monkeypatch.setattr(tokenizer_pool, "MAX_PROCESSES", 5)
    tokenizers = [opened.tokenizer(f"t{number}") for number in range(8)]
    for tokenizer in [*tokenizers, *tokenizers]:
        assert tokenizer.encode("hello")
        until(lambda: len(opened.processes()) <= 5, SURE_S, "at most five processes")


def test_the_memory_of_idle_tokenizers_is_bounded(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_pool, "MAX_BYTES", 1)
    for number in range(3):
        opened.tokenizer(f"t{number}").encode("hello")

    until(lambda: not opened.processes(), SURE_S, "all have ended")


def test_a_process_that_gets_no_cpu_time_is_not_broken(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may not reply for as long as the machine is busy; the client may retry."""
    save_tokenizer(opened._folder / "endless", ENDLESS)
    tokenizer = load_apart(opened.pool, "cpu", str(opened._folder / "endless"))
    monkeypatch.setattr(tokenizer_pool, "CALL_S", 0.1)
    monkeypatch.setattr(tokenizer_pool, "LATE_S", 0.5)
    monkeypatch.setattr(tokenizer_pool._Process, "_cpu_s", lambda process: 0.0)

    with pytest.raises(TokenizerBusy):
        tokenizer.apply_chat_template(TemplateInput(CHAT))


@pytest.mark.parametrize("depths", [(3,), (2, 3), (1, 2, 3)], ids=["workers", "loader", "nursery"])
def test_a_call_to_a_stopped_process_gets_another(opened: Opened, depths: tuple[int, ...]) -> None:
    """A worker, a loader with its workers, or all of them are stopped; also with a text that no socket holds."""
    tokenizer = opened.tokenizer("a")
    ids = tokenizer.encode("hello")
    stopped = [process for process in processes() if _depth(process) in depths]
    for process in stopped:
        process.suspend()

    answers = [tokenizer.encode("hello"), tokenizer.encode("hello " * 200_000)[: len(ids)]]

    assert answers[0] == ids
    assert len(answers[1]) == len(ids)
    for process in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def test_special_tokens_are_not_in_a_text(tmp_path: Path) -> None:
    tokenizer = load_apart(POOL, "cpu", str(_good(tmp_path)))
    ids = tokenizer.encode("hello")
    assert tokenizer.text([*ids, 2]) == "hello"
