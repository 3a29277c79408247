"""From text to tokens and back: tokenizer, chat template, streaming detokenizer, stops, reasoning, tools."""
