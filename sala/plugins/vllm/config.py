"""The configuration for vLLM."""

# mypy: disable-error-code="import-not-found, misc, no-untyped-call"

from typing import Any

from sala.plugins.transformers.config import SalaHfConfig


class VllmSalaConfig(SalaHfConfig):
    """Keeps a quantization table under its usual name, where vLLM looks for it, unless it is MLX's, which vLLM
    does not know.

    `rswa_window` makes vLLM pass the prompt length of each request to attention backends, which decides whether it is
    dense or sparse. vLLM has it for another kind of attention; SALA's layers do not use the number itself.
    """

    rswa_window = 1

    def __init__(self, **values: Any) -> None:
        table = values.get("quantization_config")
        super().__init__(**values)
        if table is not None and "quant_method" in table:
            self.quantization_config = table


def register_config() -> None:
    """Register the configuration in vLLM's table, which precedes that of transformers, and the tokenizer."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    _CONFIG_REGISTRY[VllmSalaConfig.model_type] = VllmSalaConfig
    AutoTokenizer.register(VllmSalaConfig, fast_tokenizer_class=PreTrainedTokenizerFast, exist_ok=True)
