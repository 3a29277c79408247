"""`sala estimate`: what a context costs, and what fits into this machine."""

import json
from typing import Annotated

import typer

from sala.cli import settings as s


def estimate(
    model: Annotated[str | None, typer.Argument(help="Checkpoint directory.", envvar="SALA_MODEL")] = None,
    ctx: Annotated[int, typer.Option(parser=s.count, metavar="COUNT", help="Tokens of a sequence, e.g. 1m.")] = 131072,
    batch: Annotated[int, typer.Option(help="Sequences at a time.", min=1)] = 1,
    bits: Annotated[int | None, typer.Option(help="Weights quantized to 4 or 8 bits.")] = None,
    snapshots: Annotated[int, typer.Option(help="States kept for reuse.", min=0)] = 1,
    memory: Annotated[
        int | None, typer.Option(parser=s.count, metavar="COUNT", help="Bytes to fit into, e.g. 24G.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    import psutil

    from sala.checkpoint.names import count_parameters, expected_tensors
    from sala.checkpoint.reader import Checkpoint
    from sala.cli.show import size
    from sala.config import SalaConfig
    from sala.errors import InputError
    from sala.memory import ELEMENT_BYTES, longest
    from sala.memory import estimate as compute

    if bits not in (None, 4, 8):
        raise InputError("bits", f"is {bits}", "use 4 or 8")
    path = s.find_model(model)
    config = SalaConfig.load(path)
    parameters = count_parameters(expected_tensors(config))
    settings = {"batch": batch, "bits": bits, "num_snapshots": snapshots, "element_bytes": ELEMENT_BYTES[config.dtype]}
    if config.quantization is not None:
        with Checkpoint(path) as checkpoint:
            settings["stored_bytes"] = checkpoint.nbytes
    needed = compute(config, parameters, ctx, **settings)  # type: ignore[arg-type]
    free = int(psutil.virtual_memory().available) if memory is None else memory
    most = longest(config, parameters, free, **settings)
    parts = {
        "weights": needed.weights,
        "pages": needed.pages,
        "states": needed.states,
        "snapshots": needed.snapshots,
        "activations": needed.activations,
        "runtime": needed.runtime,
        "total": needed.total,
    }
    if as_json:
        print(
            json.dumps(
                {"ctx": ctx, "batch": batch, **parts, "available": free, "fits": needed.total <= free, "longest": most}
            )
        )
        return
    print(f"{batch} sequence(s) of {ctx:,} tokens")
    for name, count in parts.items():
        print(f"  {name:<12} {size(count):>12}")
    verdict = "fits into" if needed.total <= free else "does NOT fit into"
    print(f"{verdict} the {size(free)} available; the longest context that does: {most:,} tokens")
