"""vLLM: reads {model, adapter, options, rounds, num_tokens}, writes tokens and reused tokens of each greedy answer."""

import json
import sys


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    task = json.load(sys.stdin)
    llm = LLM(task["model"], dtype="float32", max_num_seqs=8, **task["options"])
    sampling = SamplingParams(temperature=0, max_tokens=task["num_tokens"], ignore_eos=True)
    adapter = LoRARequest("adapter", 1, task["adapter"]) if task.get("adapter") else None
    rounds = []
    for prompts in task["rounds"]:
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        answers = llm.generate(inputs, sampling, use_tqdm=False, lora_request=adapter)
        rounds.append([(list(answer.outputs[0].token_ids), answer.num_cached_tokens) for answer in answers])
    print(json.dumps(rounds))


if __name__ == "__main__":  # the engine's processes import this file again
    main()
