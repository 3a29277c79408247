"""SALA as a model of transformers: sala's layers behind transformers' interface.

A padded batch is packed before the layers see it, so padding costs nothing and changes nothing; rows whose positions
restart are several sequences. Without a cache gradients flow; with one they do not.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.cache_utils import Cache
from transformers.generation.utils import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from sala.backends.torch.model import Layer, RMSNorm
from sala.errors import InputError
from sala.plugins.transformers.cache import SalaCache
from sala.plugins.transformers.config import GATHERED, IS_OLD, SalaHfConfig
from sala.plugins.transformers.layout import BatchLayout, find_layout
from sala.plugins.transformers.pretrained import from_quantized, peek

_CHUNK = 4096  # columns of a prompt per forward pass with a cache
_TIED = {"lm_head.weight": "model.embed_tokens.weight"}


class SalaLayer(GradientCheckpointingLayer, Layer):
    """A layer with a name for wrappers (FSDP, device maps) and with transformers' gradient checkpointing."""


class SalaPreTrainedModel(PreTrainedModel):
    config_class = SalaHfConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["SalaLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_attention_backend = False
    _is_stateful = True  # states cannot be rolled back: no assisted generation
    _can_compile_fullgraph = False

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        """Load a checkpoint; a quantized one in a format that sala reads is dequantized."""
        if kwargs.get("state_dict") is None and pretrained_model_name_or_path is not None:
            found = config if isinstance(config, SalaHfConfig) else peek(pretrained_model_name_or_path, kwargs)
            if found is not None and found.quantization is not None:
                load = partial(super().from_pretrained, None, *args)
                return from_quantized(load, found, pretrained_model_name_or_path, kwargs)
        return super().from_pretrained(pretrained_model_name_or_path, *args, config=config, **kwargs)

    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0.0, std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, 0.0, std)
        elif isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)


class SalaDecoder(SalaPreTrainedModel):
    """Tokens in, normed hidden states out."""

    def __init__(self, config: SalaHfConfig) -> None:
        super().__init__(config)
        sala = config.to_sala()
        self.sala_config = sala
        self.embed_tokens = nn.Embedding(sala.vocab_size, sala.hidden_size)
        self.layers = nn.ModuleList(SalaLayer(sala, mixer) for mixer in sala.mixers)
        self.norm = RMSNorm(sala.hidden_size, sala.rms_norm_eps)
        self.gradient_checkpointing = False
        self.kernels = "auto"  # or off: the reference
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds, and not both")
        embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        keeps_states = bool(self.config.output_hidden_states if output_hidden_states is None else output_hidden_states)
        cache = self._find_cache(past_key_values, use_cache)
        if cache is None:
            layout = find_layout(tuple(embeds.shape[:2]), attention_mask, position_ids)
            states: list[Any] = self._run_layers(
                embeds, layout, layout.whole(embeds.device, self.kernels), None, keeps_states
            )
        else:
            with torch.no_grad():
                states = self._run_cached(embeds, attention_mask, cache, keeps_states)
        return BaseModelOutputWithPast(
            last_hidden_state=states[-1], past_key_values=cache, hidden_states=tuple(states) if keeps_states else None
        )

    def _find_cache(self, past: Cache | None, use_cache: bool | None) -> SalaCache | None:
        if past is None:
            if use_cache is None:
                use_cache = self.config.use_cache and not torch.is_grad_enabled()
            is_learning = self.training and torch.is_grad_enabled()
            return SalaCache(self.sala_config) if use_cache and not is_learning else None
        if isinstance(past, SalaCache):
            return past
        if isinstance(past, Cache) and not past.get_seq_length():
            return SalaCache(self.sala_config)
        raise InputError("past_key_values", f"is a {type(past).__name__}", "pass what this model returned, or None")

    def _run_layers(
        self, embeds: Tensor, layout: BatchLayout, batch: Any, cache: SalaCache | None, keeps_states: bool
    ) -> list[Tensor]:
        """embeds [B, n, hidden] → the input of every layer, if they are kept, and the normed hidden states."""
        x = layout.pack(embeds) * self.sala_config.scale_emb
        kept = []
        for index, layer in enumerate(self.layers):
            if keeps_states:
                kept.append(layout.unpack(x))
                x = layout.pack(kept[-1])  # so that gradients pass through the returned states
            x = layer(x, batch, None if cache is None else cache.past_of(index))
        return [*kept, layout.unpack(self.norm(x))]

    def _run_cached(
        self, embeds: Tensor, attention_mask: Tensor | None, cache: SalaCache, keeps_states: bool
    ) -> list[Tensor]:
        """Return the same as `_run_layers`, and extend the cache. A long prompt is processed in chunks."""
        num_rows, num_columns = embeds.shape[:2]
        layout = find_layout((num_rows, num_columns), attention_mask)
        if not cache.num_columns and cache.prompt_lens is None:
            cache.prompt_lens = layout.counts
        mask = None if layout.places is None or attention_mask is None else attention_mask[:, -num_columns:]
        devices = [_device_of(layer, embeds.device) for layer in self.layers]
        pieces: list[list[Tensor]] = []
        for begin in range(0, num_columns, _CHUNK):
            part = embeds[:, begin : begin + _CHUNK]
            own_mask = None if mask is None else mask[:, begin : begin + _CHUNK]
            own_layout = find_layout((num_rows, part.shape[1]), own_mask)
            batch = cache.advance(own_layout.counts, embeds.dtype, devices, self.kernels)
            cache.num_columns += part.shape[1]
            if batch.spans:
                pieces.append(self._run_layers(part, own_layout, batch, cache, keeps_states))
            else:  # padding only
                pieces.append([torch.zeros_like(part)] * (len(self.layers) + 1 if keeps_states else 1))
        return [torch.cat(parts, 1) if len(parts) > 1 else parts[0] for parts in zip(*pieces, strict=True)]


def _device_of(layer: nn.Module, default: torch.device) -> torch.device:
    """Return the device of a layer; an offloading hook knows it if the weights are elsewhere."""
    place = getattr(getattr(layer, "_hf_hook", None), "execution_device", None)
    if place is None:
        parameter = next(layer.parameters(), None)
        place = default if parameter is None else parameter.device
    return torch.device(place)


class SalaForCausalLM(SalaPreTrainedModel, GenerationMixin):
    """The decoder and its head. With `loss_rows` the loss is computed in chunks and no logits are returned."""

    _tied_weights_keys: Any = list(_TIED) if IS_OLD else _TIED
    _tp_plan = {"lm_head": GATHERED}  # noqa: RUF012

    def __init__(self, config: SalaHfConfig) -> None:
        super().__init__(config)
        self.model = SalaDecoder(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.loss_rows: int | None = None
        self.post_init()

    def set_decoder(self, decoder: SalaDecoder) -> None:
        self.model = decoder

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        token_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits and loss; `token_type_ids`, which some tokenizers return, are ignored."""
        if use_cache is None and labels is not None:
            use_cache = False
        inputs = (input_ids, attention_mask, position_ids, past_key_values, inputs_embeds)
        outputs = self.model(*inputs, use_cache=use_cache, output_hidden_states=output_hidden_states)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else logits_to_keep
        hidden = outputs.last_hidden_state[:, slice(None) if isinstance(kept, int) else kept]
        logits: Any = None if labels is not None and self.loss_rows else self._score(hidden)
        loss: Any = None
        if labels is not None and self.loss_rows:
            loss = self._tiled_loss(hidden, labels, self.loss_rows, kwargs.get("num_items_in_batch"))
        elif labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
        )

    def _score(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden / self.model.sala_config.logit_divisor)

    def _tiled_loss(self, hidden: Tensor, labels: Tensor, num_rows: int, num_items: Tensor | int | None) -> Tensor:
        """Return the mean loss, or the sum divided by `num_items`; logits exist for a few rows at a time."""
        targets = F.pad(labels, (0, 1), value=-100)[:, 1:].flatten().to(hidden.device)
        places = (targets != -100).nonzero().squeeze(1)
        rows, targets = hidden.flatten(0, 1)[places], targets[places]

        def one(x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self._score(x).float(), y, reduction="sum")

        tiles = zip(rows.split(num_rows), targets.split(num_rows), strict=True)
        total = sum((checkpoint(one, x, y, use_reentrant=False) for x, y in tiles), start=rows.new_zeros(()).float())
        count = len(places) if num_items is None else num_items
        return total / (count.to(total.device) if isinstance(count, Tensor) else max(count, 1))

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Give `generate` a SalaCache that knows the prompt lengths, which decide between dense and sparse."""
        past, implementation = model_kwargs.get("past_key_values"), generation_config.cache_implementation
        if implementation not in (None, "dynamic", "dynamic_full"):
            raise InputError("cache_implementation", f"is {implementation!r}", "this model has its own cache")
        if generation_config.use_cache is False and past is None:
            return
        past = self.model._find_cache(past, True)
        mask = model_kwargs.get("attention_mask")
        if past is not None and mask is not None and mask.dim() == 2:
            past.prompt_lens = mask.sum(1).tolist()
        model_kwargs["past_key_values"] = past


def register() -> None:
    """Add configuration, models and tokenizer to the Auto classes; it may be called several times."""
    AutoConfig.register(SalaHfConfig.model_type, SalaHfConfig, exist_ok=True)
    AutoModel.register(SalaHfConfig, SalaDecoder, exist_ok=True)
    AutoModelForCausalLM.register(SalaHfConfig, SalaForCausalLM, exist_ok=True)
    AutoTokenizer.register(SalaHfConfig, fast_tokenizer_class=PreTrainedTokenizerFast, exist_ok=True)
