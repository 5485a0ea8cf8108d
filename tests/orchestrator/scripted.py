"""A replica that says what a test wants it to say: through the real batcher and the real data plane."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import workers
from orchestrator.process.version import corewright_version
from tests.checkpoints import EOS_ID, byte_level_tokenizer, save_tokenizer
from tests.served import EPOCH, TOKEN
from workers.batching.batcher import Batcher
from workers.messages.engine_protocol import EngineSpec, GenerateEngine
from workers.messages.wire import Welcome
from workers.serving.dataplane import DataPlane
from workers.text.tokenizer import Tokenizer, load_tokenizer

MARKS = ("[TOOL_CALLS]", "<|python_tag|>")  # special tokens, which text without special tokens does not show
TEMPLATE = (
    "{% if tools %}MARK {{ tools | tojson }}{{ '\\n' }}{% endif %}{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content %}<{{ m.reasoning_content }}> {% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %} {{ call.function.name }}({{ call.function.arguments | tojson }})"
    "{% endfor %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def save_tools_tokenizer(folder: Path, mark: str) -> Tokenizer:
    """A tokenizer whose chat template knows tools, and shows the mark of a format of calls."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as FastTokenizer

    save_tokenizer(folder, TEMPLATE.replace("MARK", mark))
    tokenizer = FastTokenizer.from_str(byte_level_tokenizer().to_str())
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    return load_tokenizer("cpu", str(folder))


class ScriptedEngine:
    """Answers every prompt with ``says``, or what it returns for the prompt, and ends; it remembers the prompts."""

    says: str | Callable[[str], str]

    def __init__(
        self, tokenizer: Tokenizer, says: str | Callable[[str], str] = "", *, slots: int = 4, max_len: int = 4096
    ) -> None:
        self.says = says
        self.prompts: list[str] = []
        self._tokenizer = tokenizer
        self._rest: dict[int, list[int]] = {}
        self.spec = EngineSpec(
            slots=slots,
            max_len=max_len,
            prefill_buckets=(max_len,),
            decode_buckets=(max_len,),
            vocab_size=tokenizer.vocab_size,
            eos_token_ids=frozenset({EOS_ID}),
            returns="tokens",
        )

    def load(self) -> None:
        pass

    def prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> list[int]:
        for slot, prompt in zip(slots, prompts, strict=True):
            text = self._tokenizer.decode(prompt)
            self.prompts.append(text)
            says = self.says if isinstance(self.says, str) else self.says(text)
            self._rest[slot] = [*self._tokenizer.encode(says, add_special_tokens=False), EOS_ID]
        return [self._rest[slot].pop(0) for slot in slots]

    def decode(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> list[int]:
        return [self._rest[slot].pop(0) for slot in slots]

    def close(self) -> None:
        pass


class ScriptedReplica:
    """One replica with an engine of the test's own. ``path`` is its socket, as ``Served`` has it."""

    def __init__(self, engine: GenerateEngine, tokenizer: Tokenizer) -> None:
        spec = engine.spec
        self._folder = tempfile.TemporaryDirectory(prefix="cwt-", dir="/tmp")
        self.path = Path(self._folder.name) / "s"
        self.batcher = Batcher(engine, tokenizer, lambda events: self._plane.emit(events))
        package = str(Path(workers.__file__).parent)
        welcome = Welcome(
            corewright_version(), package, spec.slots, spec.max_len, spec.prefill_buckets[-1], spec.vocab_size
        )
        self._plane = DataPlane(self.path, welcome=welcome, token=TOKEN, epoch=EPOCH, batcher=self.batcher)
        self._plane.start()
        self._thread = threading.Thread(target=self.batcher.run)
        self._thread.start()

    def close(self) -> None:
        self.batcher.close()
        self._thread.join(10)
        self._plane.close()
        self._folder.cleanup()
