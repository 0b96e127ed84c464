"""Everything that two halfmoon processes must agree on: messages, subjects, block keys, codec, shared configuration."""
