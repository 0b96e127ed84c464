"""Messages to the user at the terminal, and the form of the log."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
import time

_JSON = logging.getLogger("halfmoon.say")


class JsonLines(logging.Formatter):
    """One JSON object a line: `ts` (UTC), `level`, `logger`, `message`, and `exception` where there was one."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        told = {
            "ts": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told)


def set_logging(args: argparse.Namespace) -> None:
    """Set logging by `SharedOptions`; a command without these keeps the logging that there is."""
    root = logging.getLogger()
    if (level := getattr(args, "log_level", None)) is not None:
        # The libraries' own debugging lines are left out: nats-py and asyncio log each message.
        logging.getLogger("halfmoon").setLevel(level.upper())
        root.setLevel(max(logging.INFO, getattr(logging, level.upper())))
    if getattr(args, "log_format", "") == "json" and args.command != "up":
        for handler in root.handlers:
            handler.setFormatter(JsonLines())
        _JSON.setLevel(logging.INFO)


def say(text: str) -> None:
    """One line on standard error, at once; lost where that is a full disk, or nobody's any more."""
    if _JSON.level == logging.INFO:
        _JSON.info(text)
        return
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
