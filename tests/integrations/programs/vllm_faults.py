"""Every fault of vLLM that the plug-in works around, shown without it: prints the version and {name: is it there?}.

Run it with an interpreter that has vLLM. Nothing is loaded; docs/concepts/engines.md says what each one is.
"""

import inspect
import json
import os
from collections.abc import Callable

os.environ["VLLM_PLUGINS"] = "none"


def hashes_ignore_the_prompt() -> bool:
    """Two prompts, one of them longer, begin with the same blocks: their hashes are equal."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)

    def hashes(length: int) -> list[bytes]:
        prompt, hasher = list(range(length)), get_request_block_hasher(16, sha256)
        return list(Request(str(length), prompt, SamplingParams(), None, block_hasher=hasher).block_hashes)

    return hashes(64) == hashes(256)[:4]


def metadata_lacks_prompt_lengths() -> bool:
    """Attention metadata has the prompt lengths only as `rswa_prefix_lens`, for models with `rswa_window`."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    names = [name for name in inspect.signature(CommonAttentionMetadata).parameters if "prompt" in name]
    return not names and CommonAttentionMetadata.rswa_prefix_lens is None


def one_spec_passes_for_all() -> bool:
    """Register one spec of one's own, and vLLM's no longer exist."""
    from vllm.v1 import kv_cache_spec_registry as registry
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    class Own(FullAttentionSpec):
        pass

    registry._REGISTRY_KVCACHESPEC_LIST.clear()
    registry.KVCacheSpecRegistry.register(Own, FullAttentionManager)
    registry.KVCacheSpecRegistry._ensure_registered()
    return MambaSpec not in registry._REGISTRY_KVCACHESPEC_LIST


def several_greedy_answers_are_refused() -> bool:
    from vllm import SamplingParams

    try:
        SamplingParams(n=2, temperature=0.0)
    except Exception as error:  # its class depends on the release
        return "n must be 1" in str(error)
    return False


def answers_pass_for_reasoning() -> bool:
    """An answer without tags, through the parser for `<think>`: all of it is reasoning."""
    from vllm.reasoning import ReasoningParserManager

    class Vocabulary:
        def get_vocab(self) -> dict[str, int]:
            return {"<think>": 1, "</think>": 2}

    parser = ReasoningParserManager.get_reasoning_parser("deepseek_r1")(Vocabulary())
    return parser.extract_reasoning("Paris.", None) == ("Paris.", None)


def parsers_need_the_tags_as_tokens() -> bool:
    from vllm.reasoning import ReasoningParserManager

    class Vocabulary:
        def get_vocab(self) -> dict[str, int]:
            return {"Paris": 1}

    try:
        ReasoningParserManager.get_reasoning_parser("deepseek_r1")(Vocabulary())
    except RuntimeError:
        return True
    return False


def error_codes_are_numbers() -> bool:
    try:
        from vllm.entrypoints.serve.engine.protocol import ErrorInfo
    except ImportError:
        from vllm.entrypoints.openai.engine.protocol import ErrorInfo
    return ErrorInfo.model_fields["code"].annotation is int


def states_ignore_the_page() -> bool:
    """Before 0.28 the size of a block is computed from plain keys and values, whatever the backend stores."""
    from vllm.v1.attention.backend import AttentionBackend

    return not hasattr(AttentionBackend, "customize_spec")


def one_foreign_backend() -> bool:
    """Before 0.32 attention backends cannot have names of their own."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return not hasattr(AttentionBackendEnum, "register")


FAULTS: tuple[Callable[[], bool], ...] = (
    hashes_ignore_the_prompt,
    metadata_lacks_prompt_lengths,
    one_spec_passes_for_all,
    several_greedy_answers_are_refused,
    answers_pass_for_reasoning,
    parsers_need_the_tags_as_tokens,
    error_codes_are_numbers,
    states_ignore_the_page,
    one_foreign_backend,
)

if __name__ == "__main__":
    from vllm.version import __version__

    print(json.dumps({"version": __version__} | {fault.__name__: fault() for fault in FAULTS}))
