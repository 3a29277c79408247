"""transformers' own tests of causal models, on our class. On demand: they need a checkout of transformers.

    SALA_TEST_TRANSFORMERS_SOURCE=path/to/transformers pytest tests/integrations/test_transformers_own.py

The checkout should be of the version that is installed. What cannot hold for a state that only goes forward is
skipped by name, with the reason, as transformers' own recurrent models do.
"""

import contextlib
import importlib
import os
import re
import sys
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch

SOURCE = os.environ.get("SALA_TEST_TRANSFORMERS_SOURCE")
if SOURCE is None:
    pytest.skip("set SALA_TEST_TRANSFORMERS_SOURCE to a checkout of transformers", allow_module_level=True)

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from sala.plugins.transformers import SalaDecoder, SalaForCausalLM, SalaHfConfig, register  # noqa: E402

register()


def open_tests(source: str) -> Any:
    """Their tests import each other as `tests.…`, which ours are too: both live under one name.

    What a checkout of another version wants and the installed one does not have is None; a test that uses it fails.
    """
    import tests

    tests.__path__.append(str(Path(source) / "tests"))
    sys.path.append(source)
    for _ in range(20):
        try:
            with contextlib.chdir(source):  # some open their pictures when they are imported
                return importlib.import_module("tests.causal_lm_tester")
        except ImportError as error:
            missing = re.match(r"cannot import name '(\w+)' from '(transformers[\w.]*)'", str(error))
            if missing is None:
                raise
            setattr(importlib.import_module(missing[2]), missing[1], None)
    raise ImportError(f"{source} does not fit the installed transformers")


THEIRS = open_tests(SOURCE)
SHAPE = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "mixer_types": ["minicpm4", "lightning-attn"],
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dim_model_base": 32,
}
ALWAYS_DENSE = {"block_size": 16, "kernel_size": 8, "kernel_stride": 4, "window_size": 32, "topk": 4, "dense_len": 512}
ALWAYS_SPARSE = {"block_size": 4, "kernel_size": 2, "kernel_stride": 1, "window_size": 4, "topk": 2, "dense_len": 0}


class Tester(THEIRS.CausalLMModelTester):  # type: ignore[misc, name-defined]
    config_class = SalaHfConfig
    base_model_class = SalaDecoder
    causal_lm_class = SalaForCausalLM
    sparse_config: dict[str, int] = ALWAYS_DENSE

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        for name, value in SHAPE.items():
            setattr(self, name, value)

    def get_config(self) -> SalaHfConfig:
        return SalaHfConfig(**SHAPE, sparse_config=dict(self.sparse_config))


class SparseTester(Tester):
    sparse_config = ALWAYS_SPARSE


class SalaModelTest(THEIRS.CausalLMModelTest, unittest.TestCase):  # type: ignore[misc, name-defined]
    model_tester_class = Tester
    pipeline_model_mapping = {"text-generation": SalaForCausalLM, "feature-extraction": SalaDecoder}  # noqa: RUF012
    has_attentions = False

    def setUp(self) -> None:
        super().setUp()
        sys.path.insert(0, str(SOURCE))  # processes that are started here find their `tests` first
        self.addCleanup(sys.path.remove, str(SOURCE))
        if "training" in self._testMethodName:
            self.all_model_classes = [SalaForCausalLM]  # the decoder alone has no loss
        if "padding" in self._testMethodName:
            self.has_attentions = True  # no maps of them, but these tests look at logits

    def _prepare_for_class(self, inputs: Any, model_class: Any, return_labels: bool = False) -> Any:
        prepared = super()._prepare_for_class(inputs, model_class, return_labels=return_labels)
        if return_labels and model_class is SalaForCausalLM:  # they know only the names of their own classes
            prepared["labels"] = prepared["input_ids"].clone()
        return prepared

    @unittest.skip("its RoPE takes no scaling: a configuration that asks for it is refused")
    def test_model_rope_scaling_frequencies(self) -> None: ...

    @unittest.skip("its RoPE takes no scaling: a configuration that asks for it is refused")
    def test_model_rope_scaling_from_config_0_linear(self) -> None: ...

    @unittest.skip("its RoPE takes no scaling: a configuration that asks for it is refused")
    def test_model_rope_scaling_from_config_1_dynamic(self) -> None: ...

    @unittest.skip("its RoPE takes no scaling: a configuration that asks for it is refused")
    def test_model_rope_scaling_from_config_2_yarn(self) -> None: ...

    def _check_caches_are_equal(self, cache1: Any, cache2: Any) -> None:
        for layer in range(len(cache1)):
            torch.testing.assert_close(cache1[layer], cache2[layer])

    def test_generate_continue_from_past_key_values(self) -> None:
        with torch.no_grad():  # a cache is made where no gradients are wanted
            super().test_generate_continue_from_past_key_values()

    def test_generate_continue_from_inputs_embeds(self) -> None:
        with torch.no_grad():
            super().test_generate_continue_from_inputs_embeds()

    @unittest.skip("its past is pages and states, not a pair of keys and values per layer")
    def test_past_key_values_format(self) -> None: ...


class SparseSalaModelTest(SalaModelTest):
    model_tester_class = SparseTester
