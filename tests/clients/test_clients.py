"""Clients of other projects against a gateway: each reads answers, streams, calls, usage and errors as it should.

The programs of `tests/clients/programs` run with the versions of requirements.txt and package.json: `make clients`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.place import CALL, DEMO_ANSWER, Place

FOLDER = Path(__file__).parent
INSTALLED = FOLDER.parents[1] / ".venv-clients"
PROGRAM_S = 120.0
CLIENTS = [
    "anthropic_python",
    "anthropic_js",
    "ai_js openai-compatible",
    "ai_js anthropic",
    "langchain_clients langchain-openai",
    "langchain_clients langchain-anthropic",
    "litellm_client openai",
    "litellm_client anthropic",
    "llama_index_client",
    "openai_python",
    "openai_responses_python",
    "openai_js",
]
NOT_FOUND = {"ai_js openai-compatible": ["AI_APICallError", 404], "ai_js anthropic": ["AI_APICallError", 404]}
OFFLINE = {  # some would ask for prices, or report their use
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "LANGSMITH_TRACING": "false",
    "HF_HUB_OFFLINE": "1",
    "NO_PROXY": "127.0.0.1",
    "HTTPS_PROXY": "http://127.0.0.1:9",  # where nothing listens
}

pytestmark = pytest.mark.clients


class Programs:
    """What each program has read of the gateway; it runs once."""

    def __init__(self, place: Place, folder: Path) -> None:
        self.place = place
        self._folder = folder
        self._read: dict[str, dict[str, Any]] = {}

    def read(self, client: str) -> dict[str, Any]:
        if client not in self._read:
            self.place.caller.prompts.clear()
            self._read[client] = self._run(client)
            self._read[client]["prompts"] = list(self.place.caller.prompts)
        return self._read[client]

    def _run(self, client: str) -> dict[str, Any]:
        name, *arguments = client.split()
        command = self._of_javascript(name) if "_js" in name else self._of_python(name)
        environment = {"PATH": os.environ["PATH"], "HOME": str(self._folder), **OFFLINE}
        command = [*command, self.place.url, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_S, check=False, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        read: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return read

    def _of_python(self, name: str) -> list[str]:
        return [str(installed_python()), str(FOLDER / "programs" / f"{name}.py")]

    def _of_javascript(self, name: str) -> list[str]:
        """Node looks for packages beside the program and above it."""
        packages = Path(os.environ.get("COREWRIGHT_CLIENTS_NODE_MODULES") or INSTALLED / "node_modules")
        link, program = self._folder / "node_modules", self._folder / f"{name}.mjs"
        if not link.exists():
            link.symlink_to(installed(packages), target_is_directory=True)
        shutil.copyfile(FOLDER / "programs" / program.name, program)
        return ["node", str(program)]


def installed_python() -> Path:
    return installed(Path(os.environ.get("COREWRIGHT_CLIENTS_PYTHON") or INSTALLED / "bin" / "python"))


def installed(path: Path) -> Path:
    if not path.exists():
        pytest.skip(f"{path} does not exist: make clients installs it")
    return path


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    place = Place(tmp_path_factory.mktemp("model"))
    yield Programs(place, tmp_path_factory.mktemp("programs"))
    place.close()


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_reads_the_whole_answer(programs: Programs, client: str) -> None:
    assert programs.read(client)["whole"] == DEMO_ANSWER


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_joins_a_stream_to_the_whole_answer(programs: Programs, client: str) -> None:
    assert programs.read(client)["streamed"] == DEMO_ANSWER


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_reads_the_usage(programs: Programs, client: str) -> None:
    """Prompt and answer, with the tokens that are not in the text; also at the end of a stream, where it shows it."""
    read = programs.read(client)

    assert [read["usage"], read.get("streamed_usage", [10, 34])] == [[10, 34], [10, 34]]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_reads_a_call_whole_and_streamed(programs: Programs, client: str) -> None:
    """Text comes before it."""
    read, call = programs.read(client), [CALL["name"], CALL["arguments"]]

    assert [read["call"], read["streamed_call"]] == [call, call]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_call_and_its_result_go_back_to_the_model(programs: Programs, client: str) -> None:
    """As the client sends its own message back."""
    turns = [prompt for prompt in programs.read(client)["prompts"] if "tool: rain" in prompt]

    assert len(turns) == 1
    assert 'get_weather({"city": "Paris"})\ntool: rain' in turns[0]


@pytest.mark.parametrize("client", CLIENTS)
def test_an_unknown_model_is_the_clients_own_not_found_error(programs: Programs, client: str) -> None:
    """Or a subclass of it; package ai has one class, with the status."""
    raised = programs.read(client)["unknown_model"]

    assert raised == NOT_FOUND[client] if client in NOT_FOUND else "NotFoundError" in raised


@pytest.mark.parametrize("client", ["anthropic_python", "anthropic_js"])
def test_anthropics_clients_list_the_models(programs: Programs, client: str) -> None:
    """The one for Node page by page, with one model each."""
    assert programs.read(client)["models"] == ["assistant", "claude-demo", "caller", "any"]


@pytest.mark.parametrize("client", ["openai_responses_python", "openai_js"])
def test_openais_clients_read_an_incomplete_response(programs: Programs, client: str) -> None:
    """With its reason."""
    assert programs.read(client)["cut"][:2] == ["incomplete", "max_output_tokens"]


def test_openais_client_for_node_reads_responses(programs: Programs) -> None:
    """Whole, by deltas, and joined by its helper."""
    assert programs.read("openai_js")["responses"] == [DEMO_ANSWER] * 3


@pytest.mark.parametrize("client", ["anthropic_python", "openai_python", "openai_responses_python"])
def test_a_wrong_value_is_the_clients_own_bad_request_error(programs: Programs, client: str) -> None:
    assert programs.read(client)["wrong_value"][0] == "BadRequestError"


@pytest.mark.parametrize("mode", ["tool_call", "json_schema_mode"])
def test_instructor_gets_an_object_of_its_class(programs: Programs, mode: str) -> None:
    """From a model of random weights: whole, and streamed in parts."""
    whole, partial, tokens = programs.read("instructor_client")[mode]

    assert whole == partial
    assert (len(whole["city"]) <= 8, 1 <= whole["days"] <= 9, tokens > 0) == (True, True, True)


def test_instructor_raises_the_clients_not_found_error(programs: Programs) -> None:
    """As the cause of its own."""
    assert "NotFoundError" in programs.read("instructor_client")["unknown_model"]
