"""Text to tokens and back: tokenizers, chat templates in their sandbox, and the text of tokens as they come."""
