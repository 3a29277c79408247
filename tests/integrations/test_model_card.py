"""The examples of the model's card, copied with only the model's path changed: transformers and SGLang."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, normalizers

from sala.cli import run
from tests.integrations.test_sglang import CONFIG, SOURCE

pytest.importorskip("transformers")

TRANSFORMERS = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

model_path = "openbmb/MiniCPM-SALA"
tokenizer = AutoTokenizer.from_pretrained(model_path)
model = AutoModelForCausalLM.from_pretrained(model_path, trust_remote_code=True, device_map="auto")
model.eval()

prompts = ["My name is", "The capital of China is"]
with torch.no_grad():
    inputs = tokenizer(prompts, return_tensors="pt").to(model.device)
    outputs = model.generate(**inputs)
output_texts = tokenizer.batch_decode(outputs)
print(output_texts)
"""
SGLANG = r"""
# Activate environment
source sglang_minicpm_sala_env/bin/activate

# Launch Inference Server (Replace MODEL_PATH with actual path)
MODEL_PATH=/path/to/your/MiniCPM-SALA

python3 -m sglang.launch_server \
    --model ${MODEL_PATH} \
    --trust-remote-code \
    --disable-radix-cache \
    --attention-backend minicpm_flashinfer \
    --chunked-prefill-size 8192 \
    --max-running-requests 32 \
    --skip-server-warmup \
    --port 31111 \
    --dense-as-sparse
"""
# The modules of SGLang 0.5.23 that the plug-in meets before the model is loaded, and their ways of parsing flags.
STAND_IN = {
    "launch_server.py": """
import argparse, json, os
from importlib.metadata import entry_points
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs

for point in entry_points(group="sglang.srt.plugins"):
    point.load()()
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
for target, hook in HookRegistry.hooks:
    if target == "sglang.srt.server_args.ServerArgs.add_cli_args":
        hook(None, parser)
print(json.dumps(vars(parser.parse_args()) | {"variables": {**os.environ}}))
""",
    "srt/server_args.py": """
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", "--model", required=True)
        parser.add_argument("--attention-backend", choices=["minicpm_flashattn", "minicpm_flashinfer"])
        for name in ("--chunked-prefill-size", "--max-running-requests", "--port"):
            parser.add_argument(name, type=int)
        for name in ("--trust-remote-code", "--disable-radix-cache", "--skip-server-warmup"):
            parser.add_argument(name, action="store_true")
""",
    "srt/plugins/hook_registry.py": """
from enum import Enum

HookType = Enum("HookType", ["AFTER", "AROUND"])


class HookRegistry:
    hooks = []

    @classmethod
    def register(cls, target, hook, hook_type):
        cls.hooks.append((target, hook))
""",
    "srt/configs/minicpm.py": CONFIG,
    "srt/models/minicpm.py": SOURCE,
}


def test_transformers(tiny: Path, tmp_path: Path) -> None:
    """As transformers demands, both prompts have the same number of tokens, or the shorter one is padded.

    The tokenizer is loaded without `trust_remote_code`: transformers asks, and nobody answers.
    """
    for name in ("alike", "padded"):
        assert run(["export", str(tiny), "-o", str(tmp_path / name)]) == 0
    tokenizer = Tokenizer.from_file(str(tmp_path / "alike" / "tokenizer.json"))
    tokenizer.normalizer = normalizers.Replace("The capital of China", "My name")
    tokenizer.save(str(tmp_path / "alike" / "tokenizer.json"))
    settings = tmp_path / "padded" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "pad_token": "</s>", "padding_side": "left"}))
    code = TRANSFORMERS.replace("openbmb/MiniCPM-SALA", "alike")
    code += TRANSFORMERS.replace("openbmb/MiniCPM-SALA", "padded").replace('"pt")', '"pt", padding=True)')
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, stdin=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    alike, padded = map(ast.literal_eval, re.findall(r"\[['\"].*\]$", ended.stdout, re.MULTILINE))
    assert [len(text) > len("<s>My name is") for text in alike] == [True, True]
    assert "The capital of China is" in padded[1]


def test_sglang(tmp_path: Path) -> None:
    """SGLang needs a GPU: what stands in for it parses the same flags and prints what it gets, with our plug-in."""
    for name, text in STAND_IN.items():
        file = tmp_path / "modules" / "sglang" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    activate = tmp_path / "sglang_minicpm_sala_env" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f"PATH={Path(sys.executable).parent}:$PATH\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "modules"), *filter(None, sys.path)])}
    ended = subprocess.run(
        ["bash", "-ec", SGLANG.replace("/path/to/your/MiniCPM-SALA", "/models/mine")],
        capture_output=True, text=True, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(ended.stdout)
    assert found.pop("variables")["SGLANG_MINICPM_DENSE_AS_SPARSE"] == "1"
    assert found == {
        "model_path": "/models/mine", "trust_remote_code": True, "disable_radix_cache": True,
        "attention_backend": "minicpm_flashinfer", "chunked_prefill_size": 8192, "max_running_requests": 32,
        "skip_server_warmup": True, "port": 31111,
    }  # fmt: skip
