"""A dense model through all kinds of stages to a hybrid that answers; stopped, changed, repeated on the way."""

import json
import random
import shutil
import time
from pathlib import Path

import pytest

from sala.backends.torch.model import LightningMixer, SparseMixer
from sala.config import SalaConfig
from sala.errors import CheckpointError, SalaError
from sala.lab.train.convert import TrainingJob
from sala.lab.train.loop import OutOfTime, Progress
from sala.lab.train.models import load_for_training
from sala.llm import LLM
from sala.protocol import Sampling
from tests.train.dense import write_dense_model

SHORT = "seq_len = 64\nbatch_rows = 2\nwarmup_steps = 1\n"
RECIPE = f"""
seed = 1

[sparse]
kernel_size = 8
kernel_stride = 4
block_size = 16
window_size = 32
topk = 4
dense_len = 128

[[stage]]
name = "write"
kind = "sample"
num_rows = 6
batch_rows = 4
seq_len = 48
topics = "topics.txt"
[[stage.prompts]]
templates = ["", "Write about {{topic}}."]
[[stage.prompts]]
is_chat = false
templates = ["The {{topic}}"]

[[stage]]
name = "align"
kind = "align"
steps = 8
save_every = 3
lr = 1e-2
{SHORT}
[[stage.data]]
path = "text.jsonl"
[[stage.data]]
kind = "samples"
path = "write"

[[stage]]
name = "choose"
kind = "select"
num_layers = 2
keep_ends = false
haystack = "text.jsonl"
recall_len = 600
recall_rows = 1
tasks = ["task.jsonl"]

[[stage]]
name = "settle"
kind = "align"
mixers = "sparse"
steps = 3
{SHORT}
[[stage.data]]
path = "text.jsonl"

[[stage]]
name = "distil"
kind = "distil"
seq_len = 1024
batch_rows = 2
micro_rows = 1
steps = 2
learns = ["mixers", "mlps", "norms"]
mlp_rank = 4
answer_weight = 0.5
[[stage.data]]
kind = "needle"
path = "text.jsonl"
num_keys = 2
[[stage.data]]
path = "text.jsonl"

[[stage]]
name = "tune"
kind = "distil"
seq_len = 256
batch_rows = 1
steps = 2
bits = 4
group_size = 32
mlp_rank = 4
mlp_lr_scale = 0.5
teacher_window = 128
is_sparse = true
checkpointing = true
[[stage.data]]
path = "text.jsonl"

[[stage]]
name = "talk"
kind = "train"
packing = "documents"
steps = 2
learns = ["attention"]
{SHORT}
[[stage.data]]
kind = "chat"
path = "chat.jsonl"
"""
STAGES = ["01-write", "02-align", "03-choose", "04-settle", "05-distil", "06-tune", "07-talk"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe, its data and a dense model."""
    base = tmp_path_factory.mktemp("convert")
    rng = random.Random(0)
    words = "the ship sails over a calm sea while tea and bread wait in some old harbour town".split()  # noqa: SIM905
    texts = [" ".join(rng.choice(words) for _ in range(250)) + ". The end. " for _ in range(30)]
    (base / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (base / "topics.txt").write_text("tea\nships\n")
    question = {"context": "Two and two is", "choices": ["four", "five"], "gold": 0}
    (base / "task.jsonl").write_text(f"{json.dumps(question)}\n" * 3)
    messages = [{"role": "user", "content": "Tea?"}, {"role": "assistant", "content": "Yes, with bread."}]
    (base / "chat.jsonl").write_text(f"{json.dumps({'messages': messages})}\n" * 8)
    (base / "recipe.toml").write_text(RECIPE)
    write_dense_model(base / "dense", "qwen2")
    return base


def run(base: Path, work: str, output: str, note=lambda stage, news: None, minutes: float | None = None) -> None:
    TrainingJob(base / "recipe.toml", base / output, base / work, "cpu", note, minutes).convert(base / "dense")


@pytest.fixture(scope="module")
def converted(base: Path) -> Path:
    run(base, "work", "hybrid")
    return base / "hybrid"


def stop_at(name: str, step: int):
    def note(stage: str, news: Progress | str) -> None:
        if stage == name and isinstance(news, Progress) and news.step >= step:
            raise KeyboardInterrupt

    return note


def test_the_result_is_a_hybrid_that_answers(converted: Path) -> None:
    config = SalaConfig.load(converted)
    assert len(config.sparse_layers) == len(config.lightning_layers) == 2
    kinds = [type(layer.self_attn) for layer in load_for_training(converted, _cpu()).model.layers]
    assert kinds == [SparseMixer if i in config.sparse_layers else LightningMixer for i in range(4)]
    with LLM(converted, device="cpu", ctx=512) as llm:
        answer = llm.chat([{"role": "user", "content": "Tea? " * 30}], Sampling(max_tokens=8, temperature=0.0))
        assert 1 <= len(answer.token_ids) <= 8


def _cpu():
    import torch

    return torch.device("cpu")


def test_every_stage_left_its_traces(base: Path, converted: Path) -> None:
    work = base / "work"
    assert sorted(path.name for path in work.iterdir() if path.name[0].isdigit()) == STAGES
    for stage in (*STAGES[1:2], *STAGES[3:]):
        steps = [json.loads(line)["step"] for line in (work / stage / "metrics.jsonl").read_text().splitlines()]
        assert steps == sorted(steps)
        assert (work / stage / "model" / "config.json").is_file()
    chosen = json.loads((work / "03-choose" / "layers.json").read_text())
    assert tuple(chosen["kept"]) == SalaConfig.load(converted).sparse_layers
    assert (work / "01-write" / "samples.npz").is_file()
    first, *_, last = [json.loads(x) for x in (work / "02-align" / "metrics.jsonl").read_text().splitlines()]
    assert last["error"] < first["error"]


def test_attention_layers_can_learn_alone(base: Path, converted: Path) -> None:
    before, after = (load_for_training(base / "work" / stage / "model", _cpu()) for stage in STAGES[-2:])
    pairs = zip(before.named_parameters(), after.parameters(), strict=True)
    changed = {name for (name, old), new in pairs if not old.equal(new)}
    attention = tuple(f"model.layers.{index}.self_attn." for index in before.config.sparse_layers)
    assert changed
    assert all(name.startswith(attention) for name in changed)


def test_stopped_conversions_go_on(base: Path, converted: Path) -> None:
    for name, step in (("align", 4), ("choose", 2), ("distil", 2)):
        with pytest.raises(KeyboardInterrupt):
            run(base, "again", "second", stop_at(name, step))
        assert not (base / "second").exists()
    with pytest.raises(OutOfTime):
        run(base, "again", "second", minutes=0.0)
    begun = []
    run(base, "again", "second", lambda stage, news: begun.append(stage))
    assert "align" not in begun
    for file in ("model.safetensors", "config.json"):
        assert (base / "second" / file).read_bytes() == (converted / file).read_bytes()


def test_a_finished_conversion_is_only_copied(base: Path, converted: Path) -> None:
    heard: list[str] = []
    began = time.time_ns()
    run(base, "work", "third", lambda stage, news: heard.append(stage))
    assert set(heard) <= {"recipe"}
    assert all(file.stat().st_mtime_ns < began for file in (base / "work" / "05-distil" / "model").iterdir())
    assert (base / "third" / "model.safetensors").read_bytes() == (converted / "model.safetensors").read_bytes()


def test_what_exists_is_not_touched(base: Path, converted: Path) -> None:
    with pytest.raises(CheckpointError, match="exists already"):
        run(base, "work", "hybrid")


def test_a_changed_recipe_is_refused(base: Path, converted: Path) -> None:
    changed = base / "changed.toml"
    changed.write_text(RECIPE.replace("lr = 1e-2", "lr = 2e-2"))
    with pytest.raises(SalaError, match="stage align of the recipe has changed"):
        TrainingJob(changed, base / "fourth", base / "work", "cpu", lambda stage, news: None).convert(base / "dense")
    assert not (base / "fourth").exists()


def test_a_stage_that_diverged_can_be_begun_again(base: Path, converted: Path) -> None:
    """Removing a stage's directory is all it takes: those before it stay, those after it wait for it."""
    work = base / "partial"
    shutil.copytree(base / "work", work)
    for stage in STAGES[5:]:
        shutil.rmtree(work / stage)
    heard: list[str] = []
    run(base, "partial", "fifth", lambda stage, news: heard.append(stage))
    assert set(heard) - {"recipe"} == {"tune", "talk"}
    assert (base / "fifth" / "model.safetensors").read_bytes() == (converted / "model.safetensors").read_bytes()
