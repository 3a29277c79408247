"""Documents: files of many formats in, token ids out, with a table of what each token comes from."""
