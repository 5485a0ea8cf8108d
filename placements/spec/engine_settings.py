"""Settings of engines in a spec: interpreters, commands and servers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from placements.facts.server_commands import placeholders
from placements.facts.vllm import PluginRelease
from placements.spec.notation import Frozen, Interpreter, Reported, choice, in_words


class EngineSettings(Frozen):
    """Settings of one engine on every host."""

    wanted = "a mapping, like {python: ~/envs/nxdi/bin/python}"
    python: Interpreter | None = None
    """The Python interpreter of its replicas: a path, relative to the spec file. It must have the fleet's Ray version
    and Python minor version, except for `vllm`, whose server is a process of its own. Unset: the fleet's
    interpreter."""
    command: Annotated[
        tuple[str, ...], Field(strict=False), Reported("a list of texts, like [numactl, vllm, serve]")
    ] = Field((), json_schema_extra=in_words("list of texts"))
    """The command that starts the server of `vllm`, before its flags. It must run the vLLM of `python`, whose version
    is checked, and not a container. Unset: `PYTHON -m vllm.entrypoints.cli.main serve`."""
    plugin: PluginRelease | None = None
    """The release of `vllm-neuron` that `vllm` plans for, in quotes. Unset: `"0.4"` on inf2 and trn1, the newest on
    trn2; none on emulated hosts, where vLLM runs on the CPU."""
    warm: bool | None = None
    """Keep a process on each host that has imported the engine's packages: each start forks it, and takes seconds
    less. Unset: true for `cpu`, else false. See [warm processes](engines.md#warm-processes)."""


class Server(Frozen):
    """The command of a server of OpenAI's API, and how it is reached."""

    wanted = "a mapping, like {command: [llama-server, --port, '{port}'], slots: 4}"
    command: Annotated[tuple[str, ...], Field(min_length=1, strict=False), Reported("a list of texts")] = Field(
        ..., json_schema_extra=in_words("list of texts")
    )
    """The program and its arguments. In them and in `env`, `{port}` or `{socket}` is where it must listen, `{model}`
    the folder of `source`, `{cores}` the range of its cores like `4-7`, `{first}` the first of them and `{tp}` their
    number."""
    slots: Annotated[int, Field(ge=1, le=1024)]
    """The most requests that it gets at a time, in place of `max_batch`: what it processes concurrently."""
    listen: Annotated[Literal["port", "unix"], choice("port", "unix")] = "port"
    """`port`: on `{port}` of 127.0.0.1; `unix`: on the unix socket `{socket}`."""
    ready: Annotated[str, Field(pattern="^/")] = "/health"
    """The route that answers 200 when it is ready."""
    env: Annotated[dict[str, str], Reported("a mapping from names to texts")] = Field({})
    """Variables of its environment, beside `PATH`, `HOME`, `LD_LIBRARY_PATH`, `LANG`, `TMPDIR` and proxies."""
    cores_env: Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$")] = "NEURON_RT_VISIBLE_CORES"
    """The variable that gets `{cores}`."""

    @property
    def texts(self) -> dict[tuple[str | int, ...], str]:
        """All texts that may have placeholders, by their paths."""
        parts: dict[tuple[str | int, ...], str] = {("command", i): text for i, text in enumerate(self.command)}
        return parts | {("env", name): text for name, text in self.env.items()}

    @property
    def uses_model(self) -> bool:
        """Returns whether it needs the folder of a checkpoint."""
        return any("model" in placeholders(text) for text in self.texts.values())
