"""Model families for agents: the chat template and the format of reasoning, calls and answers of each family.

The templates are short forms of the published ones: same roles, tags and places of tools, no texts of advice.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.checkpoints import SPECIAL_TOKENS, byte_level_tokenizer, save_tokenizer
from workers.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """A call that the scripted model makes."""

    name: str
    arguments: Arguments


@dataclass(frozen=True)
class Family:
    """A family of models. Text without special tokens contains the ``added`` tokens, but not the ``special`` ones.
    ``result`` is the text of a prompt at which the result of a call begins, and ``tools`` the text before the tools."""

    template: str
    special: tuple[str, ...]
    added: tuple[str, ...]
    result: str
    tools: str
    call: Callable[[str, Arguments], str]
    thought: str = ""  # around a `%s`; empty without reasoning
    answer: str = "%s"

    def text(self, step: Call | str, prompt: str) -> str:
        """The text of the model between its thought and its end token: a call, or an answer to the user."""
        if isinstance(step, Call):
            return self._thinks(f"I need {step.name}.", prompt) + self.call(step.name, step.arguments)
        return self._thinks("That is all.", prompt) + self.answer.replace("%s", step)

    def _thinks(self, thought: str, prompt: str) -> str:
        """A template may begin the thought, or write an empty one."""
        if prompt.endswith("<think>"):
            return f"{thought}</think>"
        return "" if prompt.rstrip().endswith("</think>") else self.thought.replace("%s", thought)

    def save(self, folder: Path) -> Tokenizer:
        """Writes the tokenizer to a new folder. It is the same for all families, except for this family's tokens."""
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as FastTokenizer

        save_tokenizer(folder, self.template)
        tokenizer = FastTokenizer.from_str(_vocabulary().to_str())
        tokenizer.add_special_tokens([AddedToken(token, special=True) for token in self.special])
        tokenizer.add_tokens([AddedToken(token, special=False) for token in self.added])
        tokenizer.save(str(folder / "tokenizer.json"))
        return load_tokenizer("cpu", str(folder))


@lru_cache(maxsize=1)
def _vocabulary() -> FastTokenizer:
    """A tokenizer whose tokens have about as many characters as those of real models: agents' prompts are long."""
    from tokenizers import trainers

    tokenizer = byte_level_tokenizer().__class__.from_str(byte_level_tokenizer().to_str())
    trainer = trainers.BpeTrainer(vocab_size=8192, special_tokens=list(SPECIAL_TOKENS), show_progress=False)
    tokenizer.train([str(page) for page in (Path(__file__).parents[2] / "docs").glob("*.md")], trainer)
    return tokenizer


def _hermes(name: str, arguments: Arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _coder(name: str, arguments: Arguments) -> str:
    pairs = "".join(f"<parameter={key}>\n{_written(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"


def _glm(name: str, arguments: Arguments) -> str:
    pairs = (
        f"<arg_key>{key}</arg_key>\n<arg_value>{_written(value)}</arg_value>\n" for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


def _llama(name: str, arguments: Arguments) -> str:
    return json.dumps({"name": name, "parameters": arguments})


def _mistral(name: str, arguments: Arguments) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}"


def _deepseek(name: str, arguments: Arguments) -> str:
    call = f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"


def _harmony(name: str, arguments: Arguments) -> str:
    channel = f"<|channel|>commentary to=functions.{name} <|constrain|>json"
    return f"<|start|>assistant{channel}<|message|>{json.dumps(arguments)}"


def _chatml(calls: str, tools: str) -> str:
    """The template of Qwen's families, with their form of calls in a turn, and what follows the tools."""
    return (
        "{%- if tools %}<|im_start|>system\n# Tools\n\n<tools>"
        "{% for tool in tools %}{{ '\n' ~ (tool | tojson) }}{% endfor %}{{ '\n' }}"
        f"</tools>\n\n{tools}<|im_end|>\n{{% endif %}}"
        "{%- for m in messages %}"
        "{%- if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
        "{%- else %}<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content or '' }}"
        f"{{%- for call in m.tool_calls or [] %}}{calls}{{% endfor %}}<|im_end|>\n{{% endif %}}{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    )


_PAIRS = "call.function.arguments | items"
QWEN3 = Family(
    template=_chatml(
        '\n<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
        "</tool_call>",
        'Return each call as\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
    ),
    special=("<|im_start|>", "<|im_end|>"),
    added=("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    result="<tool_response>",
    tools="<tools>",
    call=_hermes,
    thought="<think>\n%s\n</think>\n\n",
)
QWEN3_CODER = Family(
    template=_chatml(
        "\n<tool_call>\n<function={{ call.function.name }}>\n"
        f"{{% for key, value in {_PAIRS} %}}<parameter={{{{ key }}}}>\n"
        "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
        "Reply as\n<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>",
    ).replace("enable_thinking is defined", "false"),
    special=QWEN3.special,
    added=QWEN3.added[:4],
    result="<tool_response>",
    tools="<tools>",
    call=_coder,
)
LLAMA3 = Family(
    template=(
        "{{- bos_token }}"
        "{%- if tools %}<|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n"
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.\n'
        "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|eot_id|>{% endif %}"
        "{%- for m in messages %}"
        "{%- if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
        "{%- elif m.tool_calls %}<|start_header_id|>assistant<|end_header_id|>\n\n{% for call in m.tool_calls %}"
        '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}'
        "{% endfor %}<|eot_id|>"
        "{%- else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endif %}"
        "{%- endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    special=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
    added=(),
    result="<|start_header_id|>ipython",
    tools="Environment: ipython",
    call=_llama,
)
MISTRAL = Family(
    template=(
        "{{- bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        "{%- for m in messages %}"
        "{%- if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
        "{%- elif m.role == 'user' %}[INST]{{ m.content }}[/INST]"
        "{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]"
        "{%- else %}{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
        "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}{{ eos_token }}"
        "{%- endif %}{% endfor %}"
    ),
    special=(
        *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]"),
        *("[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[TOOL_CONTENT]", "[/TOOL_RESULTS]"),
    ),
    added=(),
    result="[TOOL_RESULTS]",
    tools="[AVAILABLE_TOOLS]",
    call=_mistral,
)
GLM = Family(
    template=(
        "[gMASK]<sop>{% if tools %}<|system|>\n# Tools\n\n<tools>{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}"
        "{% endfor %}\n</tools>\n\nFor each call output\n<tool_call>{function-name}\n<arg_key>{key}</arg_key>\n"
        "<arg_value>{value}</arg_value>\n</tool_call>{% endif %}"
        "{%- for m in messages %}"
        "{%- if m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>"
        "{%- else %}<|{{ m.role }}|>\n"
        "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content or '' }}</think>\n{% endif %}"
        "{{- m.content or '' }}"
        "{%- for call in m.tool_calls or [] %}\n<tool_call>{{ call.function.name }}\n"
        f"{{% for key, value in {_PAIRS} %}}<arg_key>{{{{ key }}}}</arg_key>\n"
        "<arg_value>{{ value if value is string else value | tojson }}</arg_value>\n{% endfor %}</tool_call>"
        "{%- endfor %}{% endif %}{% endfor %}"
        "{%- if add_generation_prompt %}<|assistant|>"
        "{%- if enable_thinking is defined and not enable_thinking %}\n<think></think>{% endif %}{% endif %}"
    ),
    special=("[gMASK]", "<sop>", "<|system|>", "<|observation|>"),  # the tokenizer has <|user|> and <|assistant|>
    added=(
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    result="<tool_response>",
    tools="<tools>",
    call=_glm,
    thought="\n<think>%s</think>\n",
)
DEEPSEEK = Family(
    template=(
        "{{- bos_token }}{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
        "{%- if tools %}\n\n## Tools\n{% for tool in tools %}\n### {{ tool.function.name }}\n"
        "Parameters: {{ tool.function.parameters | tojson }}\n{% endfor %}\nUse this format:\n"
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>{% endif %}"
        "{%- for m in messages %}"
        "{%- if m.role == 'user' %}<｜User｜>{{ m.content }}"
        "{%- elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
        "{%- elif m.role == 'assistant' %}<｜Assistant｜></think>{{ m.content or '' }}"
        "{%- if m.tool_calls %}<｜tool▁calls▁begin｜>{% for call in m.tool_calls %}<｜tool▁call▁begin｜>"
        "{{ call.function.name }}<｜tool▁sep｜>{{ call.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}"
        "<｜tool▁calls▁end｜>{% endif %}{{ eos_token }}{% endif %}{% endfor %}"
        "{%- if add_generation_prompt %}<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}{% endif %}"
    ),
    special=("<｜User｜>", "<｜Assistant｜>"),
    added=(
        *("<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
    ),
    result="<｜tool▁output▁begin｜>",
    tools="## Tools",
    call=_deepseek,
)
GPT_OSS = Family(
    template=(
        "<|start|>system<|message|>You are ChatGPT.\n\nReasoning: {{ reasoning_effort or 'medium' }}\n\n"
        "# Valid channels: analysis, commentary, final.<|end|>"
        "<|start|>developer<|message|>{% for m in messages if m.role in ('system', 'developer') %}{{ m.content }}"
        "{% endfor %}{% if tools %}# Tools\n\n## functions\n\nnamespace functions {\n{% for tool in tools %}"
        "type {{ tool.function.name }} = (_: {{ tool.function.parameters | tojson }}) => any;\n{% endfor %}}"
        "{%- endif %}<|end|>"
        "{%- set last = namespace(name='') %}{% for m in messages %}"
        "{%- if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
        "{%- elif m.role == 'tool' %}<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>"
        "{{ m.content | tojson }}<|end|>"
        "{%- elif m.tool_calls %}{% set call = m.tool_calls[0].function %}{% set last.name = call.name %}"
        "{%- set thought = m.thinking or m.reasoning_content %}"
        "{%- if thought %}<|start|>assistant<|channel|>analysis<|message|>{{ thought }}<|end|>{% endif %}"
        "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>"
        "{{ call.arguments | tojson }}<|call|>"
        "{%- elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
        "{%- endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
    special=("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"),
    added=(),
    result=" to=assistant<|channel|>commentary",
    tools="namespace functions {",
    call=_harmony,
    thought="<|channel|>analysis<|message|>%s<|end|>",
    answer="<|start|>assistant<|channel|>final<|message|>%s",
)
FAMILIES = {
    "qwen3": QWEN3,
    "qwen3-coder": QWEN3_CODER,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "glm4.5": GLM,
    "deepseek-v3.1": DEEPSEEK,
    "gpt-oss": GPT_OSS,
}
