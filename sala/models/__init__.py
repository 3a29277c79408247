"""Where models come from: the embedded model, the local catalog, downloads."""
