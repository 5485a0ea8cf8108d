"""Agents and their libraries against a scripted model of each family: two calls with their results, then an answer.

Claude Code and Codex run by the commands of docs/agents.md, the others by the programs of `tests/clients/programs`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.families import FAMILIES, Call
from tests.clients.installed import node_modules, run, run_program
from tests.clients.place import AGENT_MAX_LEN, SUMMARY, AgentPlace
from tests.docs.pages import DOCS, blocks

PAGE = DOCS / "agents.md"
ADDRESS, NAME = "http://127.0.0.1:8080", "coder"  # of the page
ANSWER = "It rains at noon."
FACTS = ("fact-1-rain", "fact-2-noon")  # results of the two calls
PROGRAMS = [
    "openai_agents_loop qwen3 chat",
    "openai_agents_loop gpt-oss responses",
    "pydantic_ai_loop qwen3 chat",
    "pydantic_ai_loop deepseek-v3.1 responses",
    "langchain_loop glm4.5",
    "litellm_loop mistral openai",
    "litellm_loop qwen3-coder anthropic",
    "open_webui_loop llama3",
]

TYPED_PROGRAMS = [
    "openai_agents_loop qwen3 responses typed",
    "pydantic_ai_loop mistral chat typed",
    "langchain_loop llama3 typed",
]
COMMANDS = [Call("exec_command", {"cmd": cmd}) for cmd in ("cat notes.txt", "bash notes.sh")]
OBJECT = '{"sky":"rain","hour":12}'
WEATHER = (Call("get_weather", {"city": "Paris", "days": 2}), Call("get_time", {"city": "Paris"}))

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentPlace]:
    built = AgentPlace(tmp_path_factory.mktemp("models"))
    yield built
    built.close()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The home of an agent, with the files that it is to read."""
    (tmp_path / "notes.txt").write_text(f"{FACTS[0]}\n")
    (tmp_path / "notes.sh").write_text(f"echo {FACTS[1].replace('-2-', '-$((1 + 1))-')}\n")
    return tmp_path


def block(section: str, language: str, place: AgentPlace, model: str) -> str:
    """A block of the page, for this gateway and this model."""
    (text,) = [each.text for each in blocks(PAGE) if (each.section, each.language) == (section, language)]
    return text.replace(ADDRESS, place.url).replace(NAME, model)


def run_commands(section: str, place: AgentPlace, home: Path, model: str, options: str = "") -> str:
    """Returns the output of the page's commands, the last one with further options. Codex reads its configuration."""
    (home / ".codex").mkdir(exist_ok=True)
    if not (config := home / ".codex" / "config.toml").exists():
        config.write_text(block("Codex", "toml", place, model))
    path = f"{node_modules() / '.bin'}:{os.environ['PATH']}"
    script = f"{block(section, 'bash', place, model).rstrip()} {options}"
    return run(["bash", "-ec", script], home, {"PATH": path})


def follow(place: AgentPlace, *calls: Call, answer: str = ANSWER) -> None:
    """The script of the next agent."""
    place.steps = (*calls, answer)
    place.prompts.clear()


def facts_of(place: AgentPlace) -> list[bool]:
    """Returns the facts that the model has read when it answers."""
    return [fact in place.prompts[-1] for fact in FACTS]


def thoughts_of(place: AgentPlace, name: str) -> int:
    """Returns the number of thoughts of calls that the model has read when it answers."""
    return place.prompts[-1].count(f"I need {name}.")


@pytest.mark.parametrize("family", FAMILIES)
def test_claude_code_reads_runs_and_answers(place: AgentPlace, home: Path, family: str) -> None:
    """The commands of the page use the tools Read and Bash, and print only the answer. Thoughts go back to a model that
    thinks."""
    bash = {"command": "bash notes.sh", "description": "Run the notes"}
    follow(place, Call("Read", {"file_path": str(home / "notes.txt")}), Call("Bash", bash))

    printed = run_commands("Claude Code", place, home, family)

    thoughts = [thoughts_of(place, "Read"), thoughts_of(place, "Bash")]
    assert (printed.strip(), facts_of(place)) == (ANSWER, [True, True])
    assert thoughts == [int(FAMILIES[family].thought != "")] * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_codex_runs_commands_and_answers(place: AgentPlace, home: Path, family: str) -> None:
    """With the page's configuration and command, it runs two commands and prints only the answer. Thoughts go back."""
    follow(place, *COMMANDS)

    printed = run_commands("Codex", place, home, family)

    assert (printed.strip(), facts_of(place)) == (ANSWER, [True, True])
    assert thoughts_of(place, "exec_command") == (2 if FAMILIES[family].thought else 0)


@pytest.mark.parametrize("agent", ["Claude Code", "Codex"])
def test_an_agent_compacts_a_history_that_becomes_too_long(place: AgentPlace, home: Path, agent: str) -> None:
    """Claude Code compacts it when the gateway refuses it, Codex before it reaches the configured length."""
    (home / "long.txt").write_text("".join(f"fact {n}: {n * 7919 % 9973}\n" for n in range(1600)))
    (home / ".codex").mkdir()
    short = block("Codex", "toml", place, "mistral").replace(str(AGENT_MAX_LEN), "12000")
    (home / ".codex" / "config.toml").write_text(short)
    names = {"Claude Code": ("Bash", "command"), "Codex": ("exec_command", "cmd")}[agent]
    follow(place, *(Call(names[0], {names[1]: f"{tool} long.txt"}) for tool in ("cat", "tac")))

    printed = run_commands(agent, place, home, "mistral")

    assert (printed.strip(), SUMMARY in place.prompts[-1]) == (ANSWER, True)


@pytest.mark.parametrize("client", PROGRAMS)
def test_a_library_completes_two_calls_and_streams_the_answer(place: AgentPlace, tmp_path: Path, client: str) -> None:
    """Its own loop calls the functions; the result of each is in the model's last prompt."""
    follow(place, *WEATHER)

    read = run_program(client, place.url, tmp_path)

    assert (read["answer"], read["streamed"], facts_of(place)) == (ANSWER, ANSWER, [True, True])


@pytest.mark.parametrize("client", TYPED_PROGRAMS)
def test_a_library_completes_two_calls_and_reads_an_object(place: AgentPlace, tmp_path: Path, client: str) -> None:
    """It sends tools together with the schema of the answer; the grammar of the request allows calls and the object."""
    follow(place, *WEATHER, answer=OBJECT)

    read = run_program(client, place.url, tmp_path)

    assert (read["answer"], read["streamed"], facts_of(place)) == (OBJECT, OBJECT, [True, True])


def test_codex_answers_by_a_schema_after_its_commands(place: AgentPlace, home: Path) -> None:
    """The option is `--output-schema`."""
    properties = {"sky": {"type": "string"}, "hour": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    (home / "schema.json").write_text(json.dumps(schema))
    follow(place, *COMMANDS, answer=OBJECT)

    printed = run_commands("Codex", place, home, "gpt-oss", "--output-schema schema.json")

    assert (printed.strip(), facts_of(place)) == (OBJECT, [True, True])
