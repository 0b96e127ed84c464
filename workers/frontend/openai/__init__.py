"""Answers in the forms of OpenAI's API: texts, log probabilities, calls of tools, thoughts; over HTTP and NATS."""
