"""Fine-tuning: chat examples or plain text in, an adapter or a whole checkpoint out."""
