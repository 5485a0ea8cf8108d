"""The commands of `advise`: which instance type, degree, batch and replicas for a model, and which buckets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from typer.core import TyperGroup

from orchestrator.advise.advice import SizingQuestion, advise
from orchestrator.advise.buckets import BucketAdvice, advise_buckets
from orchestrator.advise.report import advice_data, advice_text, buckets_data, buckets_text
from orchestrator.cli.app import (
    FAILED,
    FormatOption,
    OfflineOption,
    SpeedsOption,
    argument,
    bad_parameter,
    group,
    one_of,
    option,
)
from orchestrator.cli.client import find_fleet
from orchestrator.cli.output import Format, complain, say, show, write
from orchestrator.cli.plan_result import speeds_of_home
from orchestrator.process.failure import Failed
from orchestrator.simulate.speeds import read_speeds, reported_speeds
from orchestrator.simulate.trace_file import InvalidTrace, read_trace
from placements.engines.registry import CHOICES, Engine, capabilities
from placements.facts.plural import counted
from placements.facts.topology import DEGREES, TOPOLOGIES
from placements.resources.calibration import MeasuredSpeed
from placements.spec.notation import is_path

FAMILY = "inf2"  # of the instance types that are compared by default
PRICES_HINT = "write a line for each instance type: inf2.48xlarge: DOLLARS"


class _ModelFirst(TyperGroup):
    """`advise MODEL` is `advise model MODEL`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help"):
            args = ["model", *args]
        return super().parse_args(ctx, args)


HELP = "Compare ways to serve a model: instance types, degrees, batches; and prefill buckets."
commands = group("advise", HELP, cls=_ModelFirst)


@commands.command("model")
def advise_model(
    model: Annotated[str, argument("MODEL", "A folder with config.json, a hub ID, or s3://BUCKET/PREFIX.")],
    instance: Annotated[
        list[str] | None, option("TYPE", "An instance type, or a family of them. Repeatable.", default=FAMILY)
    ] = None,
    degree: Annotated[
        list[int] | None, option("N", "A tp_degree to compare. Repeatable.", default="all", min=1)
    ] = None,
    batch: Annotated[
        list[int] | None, option("N", "A max_batch to compare. Repeatable.", default="1 to 64", min=1, max=1024)
    ] = None,
    engine: Annotated[str, option("NAME", "The engine, which limits the options.")] = "auto",
    prompt_tokens: Annotated[int, option("N", "Tokens of a prompt.", min=1, max=1 << 20)] = 512,
    output_tokens: Annotated[int, option("N", "Tokens of an output.", min=1, max=1 << 20)] = 128,
    max_len: Annotated[
        int | None, option("N", "Tokens of a slot.", default="the next power of two", min=2, max=1 << 24)
    ] = None,
    rps: Annotated[
        float | None, option("R", "The load, in requests/s.", default="70% of a host's capacity", min=0.0001, max=1e5)
    ] = None,
    ttft_ms: Annotated[
        float | None, option("MS", "The limit of the time to the first token.", min=0.001, max=1e8)
    ] = None,
    tpot_ms: Annotated[float | None, option("MS", "The limit of the time between tokens.", min=0.001, max=1e8)] = None,
    prices: Annotated[
        Path | None, option("FILE", "Prices in dollars an hour: YAML lines like `inf2.48xlarge: 10`.")
    ] = None,
    speeds: SpeedsOption = None,
    offline: OfflineOption = False,
    write_to: Annotated[Path | None, option("FILE", "Write the spec of a line to FILE.", "--write")] = None,
    line: Annotated[int, option("N", "The line for --write.", min=1)] = 1,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show the efficient ways to serve a model under a load, cheapest first."""
    priced = {} if prices is None else _prices(prices)
    question = SizingQuestion(
        str(Path(model).absolute()) if is_path(model) and not model.startswith("~") else model,
        _engine(engine),
        _instances(instance or [FAMILY], priced),
        prompt_tokens,
        output_tokens,
        max_len,
        rps,
        ttft_ms,
        tpot_ms,
        priced,
        _measured(speeds, offline),
        degrees=_degrees(degree or [], _instances(instance or [FAMILY], priced)),
        batches=tuple(batch or ()),
    )
    if prompt_tokens + output_tokens > question.slot:
        raise typer.BadParameter(f"shorter than {prompt_tokens} + {output_tokens} tokens", param_hint="--max-len")
    advice = advise(question)
    if line > len(advice.lines):
        raise typer.BadParameter(f"there are {len(advice.lines)} lines", param_hint="--line")
    show(advice_data(advice), output, advice_text(advice))
    if write_to is not None:
        write(write_to, advice.lines[line - 1].spec)


def _measured(speeds: Path | None, offline: bool) -> tuple[MeasuredSpeed, ...]:
    """Returns the measured speeds of the file; without one of the running fleet, or else those of this home."""
    if speeds is not None:
        return read_speeds(speeds)
    fleet = None if offline else find_fleet()
    return speeds_of_home() if fleet is None else reported_speeds(fleet.get("speeds"))


def _engine(name: str) -> Engine:
    engine = capabilities(name)
    if name in CHOICES and engine.runs_on != "cpus" and not engine.forwards and "generate" in engine.kinds:
        return name
    raise typer.BadParameter(f"{name!r} is not an engine for Neuron cores", param_hint="--engine")


def _instances(names: list[str], prices: dict[str, float]) -> tuple[str, ...]:
    """Returns the instance types of names and families; with prices, those that have one."""
    for name in names:
        one_of("--instance", name, [*TOPOLOGIES, *DEGREES])
    chosen = [name for name in TOPOLOGIES if name in names or TOPOLOGIES[name].family in names]
    priced = tuple(name for name in chosen if not prices or name in prices)
    if not priced:
        raise Failed("prices-wrong", f"no price of {', '.join(chosen)}", PRICES_HINT)
    return priced


def _degrees(degrees: list[int], instances: tuple[str, ...]) -> tuple[int, ...]:
    """Returns the degrees to compare, of which at least one is documented for an instance type."""
    known = sorted({degree for name in instances for degree in DEGREES[TOPOLOGIES[name].family]})
    if degrees and not set(degrees) & set(known):
        wanted = ", ".join(map(str, degrees))
        raise typer.BadParameter(f"{wanted} is not one of {', '.join(map(str, known))}", param_hint="--degree")
    return tuple(degrees)


def _prices(path: Path) -> dict[str, float]:
    """Reads a YAML mapping of instance types to dollars an hour. Raises Failed."""
    try:
        prices = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise Failed("prices-wrong", f"{path} cannot be read: {reason}", PRICES_HINT) from None
    if not isinstance(prices, dict) or not prices:
        raise Failed("prices-wrong", f"{path} has no prices", PRICES_HINT)
    for name, price in prices.items():
        if name not in TOPOLOGIES:
            raise Failed("prices-wrong", f"{path}: {name} is not one of {', '.join(TOPOLOGIES)}", PRICES_HINT)
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 < price < 1e6:
            raise Failed("prices-wrong", f"{path}: the price of {name} is {price!r}", PRICES_HINT)
    return {name: float(price) for name, price in prices.items()}


@commands.command("buckets")
def advise_for_prompts(
    trace: Annotated[Path, option("FILE", "Recorded requests: CSV or JSON lines, as `trace export` writes them.")],
    model: Annotated[str | None, option("NAME", "A model of the trace.", default="all models")] = None,
    max_len: Annotated[
        int | None, option("N", "The last bucket.", default="the longest prompt", min=2, max=1 << 24)
    ] = None,
    most: Annotated[int, option("N", "The largest number of buckets.", min=1, max=32)] = 8,
    compile_s: Annotated[
        float | None, option("S", "The time to compile a graph, in seconds, for COMPILE.", min=0, max=1e6)
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show the prefill buckets that pad recorded prompts least, for each number of buckets."""
    advice = _bucket_advice(trace, model, max_len, most)
    show(buckets_data(advice, compile_s), output, buckets_text(advice, compile_s))


def _bucket_advice(path: Path, model: str | None, max_len: int | None, most: int) -> dict[str, BucketAdvice]:
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            trace = read_trace(stream, str(path), None if model is None else {model: model})
    except (OSError, UnicodeDecodeError) as error:
        fact = f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
        raise Failed("trace-unreadable", fact, "check the path and its permissions") from None
    except InvalidTrace as error:
        complain(error.problems)
        raise typer.Exit(FAILED) from None
    prompts: dict[str, list[int]] = {name: [] for name in sorted(trace.models)}
    for arrival in trace:
        prompts[arrival.model].append(arrival.prompt_tokens)
    advice = {}
    for name, lengths in prompts.items():
        fitting = [length for length in lengths if max_len is None or length <= max_len]
        if longer := len(lengths) - len(fitting):
            say(f"left out: {counted(longer, 'prompt')} of {name} of more than {max_len} tokens")
        if fitting:
            with bad_parameter("--max-len"):
                advice[name] = advise_buckets(fitting, most, max_len)
    if not advice:
        raise Failed("trace-unreadable", f"{path} has no prompts of at most that length", "raise --max-len")
    return advice
