"""Registers the model with transformers' Auto classes."""


def register() -> None:
    """Add configuration, models and tokenizer to the Auto classes; it may be called several times."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    from sala.plugins.transformers.config import SalaHfConfig
    from sala.plugins.transformers.model import SalaDecoder, SalaForCausalLM

    AutoConfig.register(SalaHfConfig.model_type, SalaHfConfig, exist_ok=True)
    AutoModel.register(SalaHfConfig, SalaDecoder, exist_ok=True)
    AutoModelForCausalLM.register(SalaHfConfig, SalaForCausalLM, exist_ok=True)
    AutoTokenizer.register(SalaHfConfig, fast_tokenizer_class=PreTrainedTokenizerFast, exist_ok=True)
