"""SALA inside other programs: one module or package for each."""

ARCHITECTURE = "MiniCPMSALAForCausalLM"  # what other engines look for in config.json
LAYER_TYPES = {"sparse": "full_attention", "lightning": "linear_attention"}  # names that transformers allows
