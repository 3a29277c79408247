"""Names that transformers and other engines use for parts of this model."""

ARCHITECTURE = "MiniCPMSALAForCausalLM"  # what other engines look for in config.json
LAYER_TYPES = {"sparse": "full_attention", "lightning": "linear_attention"}  # names that transformers allows
