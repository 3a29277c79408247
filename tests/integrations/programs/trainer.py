"""transformers' Trainer as its documentation uses it. MODEL DATA OUTPUT [option=value …]"""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, default_data_collator

import sala

sala.register()
model_path, data, output = sys.argv[1:4]
options = dict(item.split("=", 1) for item in sys.argv[4:])
tokenizer = AutoTokenizer.from_pretrained(model_path)
model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)


def encode(messages: list[dict[str, str]]) -> dict[str, list[int]]:
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False).input_ids[:192]
    pad = 192 - len(ids)
    return {"input_ids": ids + [257] * pad, "attention_mask": [1] * len(ids) + [0] * pad, "labels": ids + [-100] * pad}


lines = (Path(data) / "dialogues.jsonl").read_text().splitlines()
arguments = TrainingArguments(
    output_dir=output,
    per_device_train_batch_size=2,
    max_steps=20,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    logging_steps=5,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    deepspeed=options.get("deepspeed"),
    gradient_checkpointing=options.get("checkpointing") == "on",
)
if os.environ.get("ACCELERATE_USE_FSDP") == "true" and arguments.device.type == "cpu":
    # Accelerate shards on accelerators only; told that this is one, it does the same with processes on a CPU.
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=[encode(json.loads(line)["messages"]) for line in lines],
    data_collator=default_data_collator,
    processing_class=tokenizer,
)
trainer.train()
if os.environ.get("ACCELERATE_USE_FSDP") == "true":
    kinds = {type(module).__name__ for module in trainer.model_wrapped.modules()}
    assert "FSDPSalaLayer" in kinds, kinds  # every layer is a unit of its own
trainer.save_model()
trainer.save_state()
