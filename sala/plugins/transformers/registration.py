"""Makes transformers' Auto classes know the model."""

import sys

_NEEDED = {
    "transformers.modeling_layers": "GradientCheckpointingLayer",
    "transformers.modeling_utils": "PreTrainedModel",
    "sala.plugins.transformers.config": "SalaHfConfig",
    "sala.plugins.transformers.model": "SalaForCausalLM",
}


def register() -> None:
    """Idempotent. `import sala` does it by itself when transformers arrives."""
    from transformers.models.auto import modeling_auto  # noqa: F401

    register_config()
    register_models()
    register_tokenizer()


def register_config() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from sala.plugins.transformers.config import SalaHfConfig

    CONFIG_MAPPING.register(SalaHfConfig.model_type, SalaHfConfig, exist_ok=True)


def register_models() -> None:
    """Only where transformers has loaded its table, and only when nothing is half loaded: then it comes again."""
    table = sys.modules.get("transformers.models.auto.modeling_auto")
    if not hasattr(table, "AutoModelForCausalLM") or _is_half_loaded():
        return
    from transformers.models.auto.modeling_auto import AutoModel, AutoModelForCausalLM

    from sala.plugins.transformers.config import SalaHfConfig
    from sala.plugins.transformers.model import SalaDecoder, SalaForCausalLM

    AutoModel.register(SalaHfConfig, SalaDecoder, exist_ok=True)
    AutoModelForCausalLM.register(SalaHfConfig, SalaForCausalLM, exist_ok=True)


def _is_half_loaded() -> bool:
    """Whether a module that we need is being imported at this moment, by somebody who waits for us."""
    return any(name in sys.modules and not hasattr(sys.modules[name], item) for name, item in _NEEDED.items())


def register_tokenizer() -> None:
    from transformers import PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    from sala.plugins.transformers.config import SalaHfConfig

    AutoTokenizer.register(SalaHfConfig, fast_tokenizer_class=PreTrainedTokenizerFast, exist_ok=True)
