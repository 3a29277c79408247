"""Few bits per weight: from a checkpoint to one in the layout of MLX, layer by layer."""
