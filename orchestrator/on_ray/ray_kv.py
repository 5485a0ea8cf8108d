"""Ray's internal key-value store, which the GCS keeps; with a GCS store it survives the head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray.experimental.internal_kv import internal_kv_get_gcs_client

CALL_S = 5.0  # a call takes a millisecond; without a limit it blocks while the head is away


class RayKeyValues:
    """A ``machine_claims.KeyValues`` of the cluster that this process is connected to.

    Each call blocks for at most ``CALL_S``, and raises an error of Ray if the head does not reply.
    """

    def get(self, namespace: str, keys: Sequence[str]) -> Mapping[str, bytes]:
        if not keys:
            return {}
        stored = _gcs().internal_kv_multi_get([key.encode() for key in keys], namespace.encode(), CALL_S)
        return {key.decode(): value for key, value in stored.items()}

    def put(self, namespace: str, key: str, value: bytes, *, overwrite: bool = True) -> bool:
        return bool(_gcs().internal_kv_put(key.encode(), value, overwrite, namespace.encode(), CALL_S))

    def delete(self, namespace: str, key: str) -> None:
        _gcs().internal_kv_del(key.encode(), False, namespace.encode(), CALL_S)

    def keys(self, namespace: str, prefix: str) -> Sequence[str]:
        return [key.decode() for key in _gcs().internal_kv_keys(prefix.encode(), namespace.encode(), CALL_S)]


def _gcs() -> Any:
    return internal_kv_get_gcs_client()
