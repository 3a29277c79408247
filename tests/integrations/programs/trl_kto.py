"""TRL's KTOTrainer as its documentation uses it, on all weights. MODEL DATA OUTPUT"""

import sys

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import KTOConfig, KTOTrainer

import sala

sala.register()
model_path, data, output = sys.argv[1:4]
rows = load_dataset("json", data_files=f"{data}/feedback.jsonl", split="train")
rows = rows.map(lambda row: {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]})
trainer = KTOTrainer(
    model=AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32),
    args=KTOConfig(
        output_dir=output,
        max_steps=16,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=4,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        max_length=512,
    ),
    train_dataset=rows.select_columns(["prompt", "completion", "label"]),
    processing_class=AutoTokenizer.from_pretrained(model_path),
)
trainer.train()
trainer.save_model()
trainer.save_state()
