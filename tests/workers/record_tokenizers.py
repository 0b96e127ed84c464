"""Records what transformers' AutoTokenizer makes of the directories of `tokenizer_table`, for the default tests.

In an environment of its own, from the root: `pip install transformers==4.57.1 jinja2`, then
`python tests/workers/record_tokenizers.py`. It writes `tokenizers.json` beside itself.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECORDING = HERE / "tokenizers.json"


def main() -> None:
    sys.path.insert(0, str(HERE.parents[1]))
    import transformers

    from tests.workers.tokenizer_families import FAMILIES
    from tests.workers.tokenizer_table import TEXT, chats, vocabulary_digest, write

    recorded: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, family) in enumerate(FAMILIES.items()):
            path = write(name, Path(folder) / str(number))
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(path))
            found: dict[str, Any] = {"text": tokenizer(TEXT)["input_ids"]}
            for chat, (messages, options) in chats(family, recorded=True).items():
                try:
                    prompt = tokenizer.apply_chat_template(messages, tokenize=False, **options)
                except Exception as error:
                    found[chat] = {"error": " ".join(str(error).split())[:120]}
                    continue
                ids = tokenizer.apply_chat_template(messages, tokenize=True, **options)
                found[chat] = {"prompt": prompt, "ids": ids}
            recorded[name] = {"vocabulary": vocabulary_digest(path), **found}
    RECORDING.write_text(_lines({"transformers": transformers.__version__, "families": recorded}))


def _lines(told: dict[str, Any]) -> str:
    """JSON with a line for each chat."""
    families = [
        json.dumps(name, ensure_ascii=False)
        + ": {\n"
        + ",\n".join(
            f"  {json.dumps(chat)}: {json.dumps(made, ensure_ascii=False)}" for chat, made in found.items()
        )
        + "\n }"
        for name, found in told["families"].items()
    ]
    version = json.dumps(told["transformers"])
    return f'{{"transformers": {version}, "families": {{\n ' + ",\n ".join(families) + "\n}}\n"


if __name__ == "__main__":
    main()
