"""The configuration as vLLM reads it."""

# mypy: disable-error-code="import-not-found, misc, no-untyped-call"

from typing import Any

from sala.plugins.transformers.config import SalaHfConfig


class VllmSalaConfig(SalaHfConfig):
    """vLLM looks for a quantized checkpoint's table under its usual name.

    `rswa_window` asks vLLM to tell attention backends how long the prompt of each request is, which decides whether
    it is dense or sparse. vLLM has that for another kind of attention; no layer of ours reads the number itself.
    """

    rswa_window = 1

    def __init__(self, **values: Any) -> None:
        table = values.get("quantization_config")
        super().__init__(**values)
        if table is not None:
            self.quantization_config = table


def register_config() -> None:
    """For vLLM's own table of configurations, which it prefers to that of transformers; and for the tokenizer."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    _CONFIG_REGISTRY[VllmSalaConfig.model_type] = VllmSalaConfig
    AutoTokenizer.register(VllmSalaConfig, fast_tokenizer_class=PreTrainedTokenizerFast, exist_ok=True)
