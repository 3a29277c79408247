"""SGLang without a GPU: a task as JSON on stdin, the tokens of each greedy answer on stdout.

With SGLANG_AS_IT_IS the plug-in believes that SGLang's norm needs no repair.
"""

import json
import os
import sys

if os.environ.get("SGLANG_AS_IT_IS"):  # every process of the engine imports this file before it loads plug-ins
    from sala.plugins import sglang as plugin

    plugin.read_norm = lambda source: plugin.Norm.OTHER


def main() -> None:
    import sglang

    task = json.load(sys.stdin)
    engine = sglang.Engine(
        model_path=task["model"],
        tp_size=task["tp"],
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        context_length=task["context"],
        max_total_tokens=4096,
        chunked_prefill_size=task["chunk"],
        max_running_requests=4,
        disable_overlap_schedule=True,
        skip_server_warmup=True,
        log_level="info",
    )
    try:
        sampling = {"temperature": 0, "max_new_tokens": task["num_tokens"], "ignore_eos": True}
        answers = engine.generate(input_ids=task["prompts"], sampling_params=sampling)
        print(json.dumps([answer["output_ids"] for answer in answers]))
    finally:
        engine.shutdown()


if __name__ == "__main__":  # the engine's processes import this file again
    main()
