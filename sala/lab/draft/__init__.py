"""Draft heads for speculative decoding: trained on the model's own answers, and how many drafts are accepted."""
