"""Numbers and lists in the English of messages."""

from __future__ import annotations

from collections.abc import Sequence


def plural(number: int, noun: str) -> str:
    """Returns the noun in the form for the number: "host" for 1, else "hosts"."""
    return noun if number == 1 else f"{noun}s"


def counted(number: int, noun: str) -> str:
    """Returns, for example, "1 host" or "2 hosts"."""
    return f"{number} {plural(number, noun)}"


def joined(words: Sequence[object], last: str = "and") -> str:
    """Returns words as a list in a sentence: "1, 2 and 4"."""
    texts = [str(word) for word in words]
    return f" {last} ".join(filter(None, (", ".join(texts[:-1]), texts[-1] if texts else "")))
