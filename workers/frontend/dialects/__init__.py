"""Other forms of a chat over HTTP: Anthropic's messages, OpenAI's responses; and the description of them all."""
