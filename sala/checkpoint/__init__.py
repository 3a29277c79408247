"""Weight files: safetensors only, checked before they are trusted, read when they are needed."""
