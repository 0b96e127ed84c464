"""The same request gives the same text, whichever edge and form it is asked in."""

from __future__ import annotations

from typing import Any

from frontend_double import ANSWER


def test_http_and_nats_give_the_same_text_streamed_or_whole(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 200}
        status, headers, whole = await cluster.post("/v1/completions", body)
        assert status == 200
        assert whole["choices"][0]["text"] == ANSWER
        assert len(headers["x-request-id"]) == 26
        events = await cluster.sse("/v1/completions", {**body, "stream": True})
        assert events[-1] == "[DONE]"
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == ANSWER
        _, answer = await cluster.ask("generate", body)
        assert answer["text"] == ANSWER
        messages = await cluster.stream("generate", body)
        assert "".join(message["text"] for message in messages[:-1]) == messages[-1]["text"] == ANSWER

    run(scenario)
