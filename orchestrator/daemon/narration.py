"""The progress that `up` reports: what changes from one status of the fleet to the next."""

from __future__ import annotations

from orchestrator.fleet.fleet_status import FleetStatus, ModelInFleet, ReplicaInFleet
from orchestrator.fleet.progress_text import fetch_text

MOST_NAMED = 4  # replicas in a line that shows what `up` waits for


class Narration:
    """The news that were reported, and the replicas that the fleet waits for before it is ready."""

    def __init__(self) -> None:
        self.unready: list[str] = []
        self._reported: dict[str, str] = {}  # the last news of each replica or model
        self._hold = ""  # why the controller holds its actions

    def news(self, status: FleetStatus) -> list[str]:
        """Returns a line for each change since the last status."""
        self.unready = [text for model in status.models for text in _unready(model)]
        hold, lines = status.hold, []
        if hold and hold != self._hold:
            lines.append(f"error: {hold}")
        self._hold = hold
        for model in status.models:
            for id, (news, line) in _news(model).items():
                if self._reported.get(id) != news:
                    self._reported[id] = news
                    lines.append(line)
        return lines

    def waited_for(self) -> str:
        named, more = self.unready[:MOST_NAMED], len(self.unready) - MOST_NAMED
        return ", ".join(named) + (f" and {more} more" if more > 0 else "") or "the controller to find the fleet ready"


def _news(model: ModelInFleet) -> dict[str, tuple[str, str]]:
    """Returns a key and a line, as `progress`, for each replica, and for a model without one."""
    news = {replica.id: progress(replica) for replica in model.replicas}
    if not news and model.reason:
        text = f"{model.name} {model.state.value}: {model.reason}"
        news[model.name] = text, text
    for preparation in model.preparing:
        text = f"{model.name} {preparation.state} on {preparation.host}, for the new version"
        news[f"{model.name} on {preparation.host}"] = text, text
    return news


def _unready(model: ModelInFleet) -> list[str]:
    """Returns what a model waits for before it is ready, such as "chat/0 (loading)"."""
    replicas = [f"{replica.id} ({replica.state.value})" for replica in model.replicas if not replica.ready]
    return replicas or ([f"{model.name} ({model.state.value})"] if model.wanted and not model.replicas else [])


def progress(replica: ReplicaInFleet) -> tuple[str, str]:
    """Returns a key that changes with each news of a replica (of a fetch: each phase and each tenth), and its line."""
    held, fetch = replica.cores, replica.fetch
    cores = "" if held is None else f" on core{'s' if '-' in held else ''} {held}"
    reason = f": {replica.reason}" if replica.reason else ""
    line = f"{replica.id} {replica.state.value}{cores}{reason}"
    if fetch is None:
        return line, line
    silent = " silent" if fetch.trouble else ""
    return f"{line} {fetch.phase} {fetch.tenths}{silent}", f"{replica.id} {fetch_text(fetch)}"
