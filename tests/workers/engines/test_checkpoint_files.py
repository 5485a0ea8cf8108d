"""What is read of a checkpoint before its weights."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workers.engines import weight_files
from workers.engines.checkpoint_files import check_rotary, contents_of
from workers.engines.weight_files import check_checkpoint, copy_bytes
from workers.messages.engine_protocol import EngineLoadError


def test_what_a_server_writes_beside_a_model_is_no_change_of_the_model(tmp_path: Path) -> None:
    """A log, or what vLLM on Neuron compiles; a file that the model is loaded from is a change, in subfolders too."""

    def contents_with(name: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("written")
        return contents_of([tmp_path])

    before = contents_with("config.json")
    written = ("received.jsonl", "neuron-compiled-artifacts/a1/model.pt", ".cache/huggingface/config.json")
    assert {contents_with(name) for name in written} == {before}
    assert len({before, *map(contents_with, ("model.safetensors", "1_Pooling/config.json", "code.py"))}) == 4


BASE = {"rope_type": "default", "rope_theta": 500_000.0}


@pytest.mark.parametrize(
    ("settings", "read", "ignored"),
    [
        ({"rope_parameters": BASE}, {"rope_theta": 10_000.0}, "rope_theta: 500000.0"),
        ({"rope_parameters": BASE}, {"rope_theta": 500_000.0}, ""),
        ({"rope_parameters": BASE}, {}, ""),  # transformers 5
        ({"rope_theta": 500_000.0}, {"rope_theta": 500_000.0}, ""),
        ({"rope_parameters": {"rope_type": "llama3"}}, {"rope_theta": 10_000.0, "rope_scaling": None}, "llama3"),
        ({"rope_parameters": {"rope_type": "llama3"}}, {"rope_theta": 10_000.0, "rope_scaling": BASE}, ""),
    ],
)
def test_rotary_parameters_that_transformers_ignores_are_refused(
    settings: dict[str, Any], read: dict[str, Any], ignored: str
) -> None:
    """Releases before 5 take their own base where config.json has only the names of 5."""
    if not ignored:
        check_rotary(settings, SimpleNamespace(**read))
        return
    with pytest.raises(EngineLoadError) as caught:
        check_rotary(settings, SimpleNamespace(**read))
    assert (caught.value.id, ignored in caught.value.what) == ("rotary-misread", True)


def tensor(begin: int = 0, end: int = 4, shape: Any = (1,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def save(folder: Path, header: Any, data: int, length: int | None = None) -> Path:
    """A checkpoint whose weights have that header, and ``data`` bytes behind it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "config.json").write_text("{}")
    prefix = (len(text) if length is None else length).to_bytes(8, "little")
    (folder / "model.safetensors").write_bytes(prefix + text + bytes(data))
    return folder


def test_a_copy_has_floats_in_its_own_dtype_and_quantized_tensors_as_they_are(tmp_path: Path) -> None:
    """The size is compared with the free disk space before a compilation."""
    header = {"quantized": tensor(0, 4, (4,), "I8"), "scale": tensor(4, 12, (2,), "F32")}
    save(tmp_path, header, 12)
    assert (copy_bytes(tmp_path, "bf16"), copy_bytes(tmp_path, "fp32")) == (4 + 2 * 2, 4 + 2 * 4)


BRACKETS = b"[" * 100_000 + b"]" * 100_000
BAD_HEADERS: dict[str, tuple[Any, int, int | None, str]] = {
    "length 2^63": ({"a": tensor()}, 4, 2**63, "no safetensors header"),
    "length 2^64 - 1": ({"a": tensor()}, 4, 2**64 - 1, "no safetensors header"),
    "length 0": (b"", 4, 0, "no safetensors header"),
    "length of the rest": ({"a": tensor()}, 4, 10**6, "no safetensors header"),
    "brackets": (b'{"a":' + BRACKETS + b"}", 4, None, "recursion"),
    "brackets in the metadata": (b'{"__metadata__":' + BRACKETS + b"}", 0, None, "recursion"),
    "an array": (b"[]", 0, None, "object"),
    "negative offset": ({"a": tensor(-4, 4)}, 4, None, "should begin at 0"),
    "reversed offsets": ({"a": tensor(4, 0), "b": tensor()}, 4, None, "'a' is at 4 to 0"),
    "overlap": ({"a": tensor(), "b": tensor(2, 6)}, 6, None, "'b' is at 2 to 6"),
    "the same bytes": ({"a": tensor(), "b": tensor()}, 4, None, "should begin at 4"),
    "a hole": ({"a": tensor(), "b": tensor(8, 12)}, 12, None, "should begin at 4"),
    "offset 2^70": ({"a": tensor(0, 2**70)}, 4, None, "does not match its shape"),
    "a product beyond 2^64": ({"a": tensor(shape=[2**32, 2**32, 4])}, 4, None, "does not match its shape"),
    "a product that wraps to 1": ({"a": tensor(shape=[2**32 + 1, 2**32 - 1])}, 4, None, "does not match its shape"),
    "negative shape": ({"a": tensor(shape=[-1])}, 4, None, ">= 0"),
    "another shape": ({"a": tensor(shape=[5])}, 4, None, "does not match its shape"),
    "a long name": ({"x" * 10**6: tensor(1, 2)}, 4, None, "should begin at"),
    "no dtype": ({"a": {"shape": [1], "data_offsets": [0, 4]}}, 4, None, "dtype"),
    "text behind it": ({"a": tensor()}, 5, None, "bytes"),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_a_header_that_no_library_accepts_is_refused(name: str, tmp_path: Path) -> None:
    header, data, length, message = BAD_HEADERS[name]
    with pytest.raises(EngineLoadError, match=message) as caught:
        check_checkpoint(save(tmp_path, header, data, length))
    assert caught.value.id == "weights-broken"
    assert len(caught.value.what) < 1000


def test_the_headers_of_a_checkpoint_have_a_limit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many links to one file, or one header of 100 MB, do not hold up `validate` for minutes."""
    save(tmp_path, {"a": tensor()}, 4)
    for number in range(20):
        (tmp_path / f"{number}.safetensors").symlink_to("model.safetensors")
    names = {f"tensor{number}": f"{number}.safetensors" for number in range(20)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    check_checkpoint(tmp_path)
    monkeypatch.setattr(weight_files, "MAX_HEADERS", 1000)
    with pytest.raises(EngineLoadError, match="more than 1000 bytes"):
        check_checkpoint(tmp_path)


def test_a_header_with_a_dtype_of_a_later_release_is_left_to_its_library(tmp_path: Path) -> None:
    check_checkpoint(save(tmp_path, {"a": tensor(0, 3, dtype="Q7"), "b": tensor(3, 7), "e": tensor(7, 7, [0])}, 7))
