"""TRL's DPOTrainer as its documentation uses it, on all weights. MODEL DATA OUTPUT"""

import sys

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

import sala
from sala.lab.finetune.recall import RecallCallback
from sala.text.tokenizer import Tokenizer

sala.register()
model_path, data, output = sys.argv[1:4]
model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
rows = load_dataset("json", data_files=f"{data}/preferences.jsonl", split="train")
rows = rows.map(lambda row: {"prompt": row["messages"], "chosen": [row["chosen"]], "rejected": [row["rejected"]]})
recall = RecallCallback([2048], 1)
trainer = DPOTrainer(
    model=model,
    callbacks=[recall],
    args=DPOConfig(
        output_dir=output,
        max_steps=12,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        logging_steps=4,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        max_length=512,
    ),
    train_dataset=rows.select_columns(["prompt", "chosen", "rejected"]),
    processing_class=AutoTokenizer.from_pretrained(model_path),
)

# TRL applies the head itself: it must find what the model's own scores say.
batch = trainer.data_collator([trainer.train_dataset[index] for index in range(2)])
inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
with torch.no_grad():
    fused = trainer.model(**inputs, labels=labels, fused_lm_head=True).log_probs
    scores = trainer.model(**inputs, use_cache=False).logits[:, :-1].log_softmax(-1)
plain = scores.gather(-1, inputs["input_ids"][:, 1:, None]).squeeze(-1).masked_fill(labels[:, 1:] == -100, 0)
torch.testing.assert_close(fused, plain, atol=1e-4, rtol=0)

# Its tokens are those that the model reads when it is asked.
first, encoded = rows[0], trainer.train_dataset[0]
asked = Tokenizer.load(model_path).encode_chat(first["prompt"] + first["chosen"], add_generation_prompt=False)
assert encoded["prompt_ids"] + encoded["chosen_ids"] == asked

trainer.train()
assert recall.before[0].asked == recall.after[0].asked > 0
trainer.save_model()
trainer.save_state()
