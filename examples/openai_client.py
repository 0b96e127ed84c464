"""OpenAI's own client against halfmoon: python examples/openai_client.py "What is a half moon?"
[http://127.0.0.1:8000]
"""

import sys

from openai import OpenAI


def main(question: str, url: str = "http://127.0.0.1:8000") -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": question}]
    stream = client.chat.completions.create(
        model=model, messages=messages, max_tokens=64, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage:
            print(f"\n{chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out")


main(*sys.argv[1:])
