"""Runs in vLLM's environment: its ExampleConnector, which keeps KV in files, with the words of its NixlConnector.

A prompt's KV is stored for a request that asks for its place, and loaded for one that names that place alone.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

PLACE = {"do_remote_decode": False, "do_remote_prefill": True}


class PlaceConnector(ExampleConnector):  # type: ignore[misc]
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        named = (request.kv_transfer_params or {}).get("remote_path") == self._storage_path
        found: tuple[int | None, bool] = (
            super().get_num_new_matched_tokens(request, num_computed_tokens) if named else (0, False)
        )
        return found

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        wanted = (request.kv_transfer_params or {}).get("do_remote_decode")
        return False, {**PLACE, "remote_path": self._storage_path} if wanted else None
