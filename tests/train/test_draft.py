"""Training draft heads: the loss follows the chain of drafts as the engine makes them, and a head learns."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sala.backends.torch.batch import pack
from sala.backends.torch.draft_head import Drafter, HeadCache
from sala.backends.torch.executor import TorchExecutor
from sala.checkpoint.draft_exit import read_config as read_exit
from sala.checkpoint.draft_head import DraftHeadConfig, read_config
from sala.config import SalaConfig
from sala.errors import InputError
from sala.lab.draft import evaluate
from sala.lab.draft import train as draft
from sala.lab.draft.answers import AnsweredPrompt, PromptRecord, frequent_tokens, read_prompts, write_answers
from sala.lab.draft.objective import DraftObjective
from sala.lab.draft.train import AnswerRows, DraftTraining, new_head
from sala.lab.finetune.dialogues import BadData
from sala.lab.train.loop import OutOfTime
from sala.lab.train.models import load_for_training
from sala.lab.train.steps import collate
from sala.llm import LLM
from sala.protocol import Options, Plan, Row, Sampling
from tests.command import sala
from tests.golden import checkpoint

WINDOW = 20


def random_head(config: DraftHeadConfig) -> Any:
    torch.manual_seed(3)
    head = new_head(config, np.arange(config.draft_vocab_size), 0)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return head


def test_the_chain_in_training_is_the_one_that_drafts() -> None:
    """At each position the states of a chain in training are those with which the engine's head drafts."""
    path = checkpoint("block16")
    model_config = SalaConfig.load(path)
    config = DraftHeadConfig.of(model_config, draft_vocab_size=model_config.vocab_size, window=WINDOW, num_first=3)
    head = random_head(config)
    model = load_for_training(path, torch.device("cpu"))
    objective = DraftObjective(head, model, num_steps=3)
    tokens = torch.randint(0, 256, (70,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        states, _ = objective.observe(tokens, [30, 40])
        chain = objective.chain(tokens, states, [30, 40])
    drafted: list[torch.Tensor] = []
    llm = LLM(path, ctx=256)
    executor = llm.engine.executor
    assert isinstance(executor, TorchExecutor)
    drafter = Drafter(head.eval(), executor.model, HeadCache(config, 8, 1, 16, torch.float32, torch.device("cpu")))
    output = head.output
    head.output = lambda *some: drafted.append(output(*some)) or drafted[-1]
    document = tuple(tokens[30:].tolist())
    for at in (1, 5, 19, 20, 21, 22, 24, 37):  # the document's token that was sampled last; around the window
        drafted.clear()
        with torch.inference_mode():
            drafter.cache.last[0] = 0
            executor.clear_state(0)
            features = drafter.features()
            pages = tuple(range(5))
            batch = pack(Plan((Row(document[:at], 0, pages, 0, 1 << 30),)), executor.device, features=features)
            executor.forward(batch, executor.cache)
            drafter.follow(batch, features, batch.lengths)
            row = Row(document[at : at + 1], at, pages, 0, 1 << 30, Sampling(temperature=0))
            # The drafts are the document's own tokens, as in training.
            follow = iter(document[at + 1 : at + 3])
            drafter._sample = lambda *_, follow=follow: [next(follow, 0)]  # type: ignore[method-assign,misc]
            drafter.draft(Plan((row,)), 3, lambda plan: pack(plan, executor.device))
        for step in range(3):
            want = chain[step][30 + at + step]
            torch.testing.assert_close(drafted[step][0], want, atol=2e-4, rtol=2e-4, msg=f"token {at}, step {step}")


def data(path: Path, count: int = 24) -> Path:
    file = path / "data.jsonl"
    prompts = [{"messages": [{"role": "user", "content": f"Question {number}?"}]} for number in range(count - 2)]
    records = [*prompts, {"prompt": "Hello"}, {"text": "abc " * 60}]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def test_a_head_learns_to_draft(tiny: Path, tmp_path: Path) -> None:
    """Interrupted and resumed; afterwards most drafts are accepted on what was learned, and answers are the same."""
    options = {"row": 128, "epochs": 12.0, "batch": 4, "lr": 1e-2, "chain": 2, "max_tokens": 60, "temperature": 0.0}
    job = DraftTraining(
        tiny, data(tmp_path), tmp_path / "head", tmp_path / "work", "cpu", **options, minutes=0.0,  # type: ignore[arg-type]
        sizes={"window": 64, "draft_vocab_size": 128},
    )  # fmt: skip
    with pytest.raises(OutOfTime):
        job.run(lambda *_: None)
    answers = (tmp_path / "work" / "answers.jsonl").read_text()
    lines: list[Any] = []
    replace(job, minutes=None).run(lambda *news: lines.append(news))
    assert (tmp_path / "work" / "answers.jsonl").read_text() == answers  # none was written again
    assert read_config(tmp_path / "head").window == 64
    losses = [json.loads(line) for line in (tmp_path / "work" / "draft" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1]["agreed 1"] > 0.3
    settings = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
    plain, llm = LLM(tiny, ctx=512), LLM(tiny, ctx=512, speculate="head", draft_head=tmp_path / "head", num_draft=2)
    llm.engine.speculation._is_measured = False
    for number in range(4):
        messages = [{"role": "user", "content": f"Question {number}?"}]
        assert llm.chat(messages, **settings).token_ids == plain.chat(messages, **settings).token_ids
    assert llm.engine.speculation.tokens_per_round > 1.3
    assert llm.engine.speculation.by_position[0][1] > llm.engine.speculation.by_position[1][1] > 0


def test_an_exit_learns_to_draft(tiny: Path, tmp_path: Path) -> None:
    options: Any = {"row": 128, "epochs": 8.0, "lr": 1e-2, "max_tokens": 60, "temperature": 0.0, "exit_layers": 1}
    work = tmp_path / "work"
    DraftTraining(tiny, data(tmp_path), tmp_path / "exit", work, "cpu", **options).run(lambda *_: None)
    assert read_exit(tmp_path / "exit").num_layers == 1
    losses = [json.loads(line) for line in (work / "draft" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1]["agreed 1"] > 0.2
    llm = LLM(tiny, ctx=512, speculate="layers", draft_head=tmp_path / "exit", num_draft=2)
    llm.engine.speculation._is_measured = False
    llm.chat([{"role": "user", "content": "Question 1?"}], temperature=0, max_tokens=60, ignore_eos=True)
    assert llm.engine.speculation.acceptance > 0.1
    with pytest.raises(InputError, match="does not go together with window"):
        DraftTraining(
            tiny, data(tmp_path), tmp_path / "x", work, "cpu", sizes={"window": 9}, exit_layers=1
        ).run(lambda *_: None)  # fmt: skip


def test_answers_are_written_once(tiny: Path, tmp_path: Path) -> None:
    llm, file = LLM(tiny, ctx=256), tmp_path / "answers.jsonl"
    prompts = read_prompts(data(tmp_path, 6), llm, 100)
    assert [one.is_answered for one in prompts] == [True] * 5 + [False]
    sampling = Sampling(max_tokens=5, ignore_eos=True)
    first = write_answers(llm, prompts[:3], file, sampling, 100, lambda *_: None)
    with file.open("a") as handle:
        handle.write("[4, [1, 2")  # a run that was killed
    seen: list[int] = []
    rows = write_answers(llm, prompts, file, sampling, 100, lambda done, _: seen.append(done))
    assert rows[:3] == first
    assert seen in ([4, 5, 6], [5, 6])
    assert all(len(row.tokens) == row.start + 5 for row in rows[:5])
    assert rows[5] == AnsweredPrompt(prompts[5].ids, 1, "text")


def test_bad_data_is_named(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    lines = ['{"messages": 3}', "nothing", '{"prompt": "' + "long " * 100 + '"}', '{"text": ""}']
    file.write_text("\n".join([*lines, '{"prompt": "' + "long " * 50_000 + '"}']) + "\n")
    with pytest.raises(BadData) as found:
        read_prompts(file, LLM(tiny, ctx=256), 100)
    assert [problem.line for problem in found.value.problems] == [1, 2, 3, 4, 5]
    assert "raise --row (100)" in found.value.problems[4].text


def test_long_texts_are_cut_to_a_row(tiny: Path, tmp_path: Path) -> None:
    """Also a text that is far longer than the context with which the model answers."""
    file, llm = tmp_path / "long.jsonl", LLM(tiny, ctx=64)
    text = "A long text. " * 20_000
    file.write_text(json.dumps({"text": text}) + "\n")
    (prompt,) = read_prompts(file, llm, 64)
    assert list(prompt.ids) == llm.tokenizer.encode(text)[:64]
    with pytest.raises(InputError, match="fills 1 rows"):
        AnswerRows([AnsweredPrompt(tuple(range(200)), 1, "text")], 128, 0, is_held_out=False)


def test_the_vocabulary_has_the_most_frequent_tokens() -> None:
    rows = [AnsweredPrompt((9, 9, 9, 5, 5, 3), 3, ""), AnsweredPrompt((7, 5, 3, 6), 1, "")]
    assert frequent_tokens(rows, 20, 3).tolist() == [3, 5, 6]
    assert frequent_tokens(rows, 20, 5).tolist() == [0, 1, 3, 5, 6]
    assert PromptRecord((1,), True, "").is_answered


def test_the_report_is_split_by_kind_and_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against counting chains one by one: a draft counts where all before it in its chain were right."""
    monkeypatch.setattr(draft, "LENGTHS", (8, 32))
    rng, num_steps = np.random.default_rng(4), 3
    kinds = [*"ab" * 200]
    made: list[Any] = []
    answers = [AnsweredPrompt(tuple(rng.integers(9, size=37).tolist()), 5, kind) for kind in kinds]
    rows = AnswerRows(answers, 50, 0, True)

    class Objective:
        num_steps = 3

        def guesses(self, tokens: torch.Tensor, lengths: list[int]) -> Any:
            made.append([rng.random(len(tokens)) < 0.7 for _ in range(num_steps)])
            return [tokens + torch.from_numpy(~right) for right in made[-1]], tokens

    report = draft.agreement(Objective(), rows, torch.device("cpu"))  # type: ignore[arg-type]
    want: dict[tuple[str, int], Any] = {}
    for number, right in enumerate(made):
        starts = np.flatnonzero(collate([rows(number)], "documents").main.numpy() > 0)
        groups = rows.groups(number)
        for start in starts:
            asked, agreed = want.setdefault(groups[start], np.zeros((2, num_steps), np.int64))
            for step in range(min(num_steps, 50 - start)):
                asked[step] += 1
                if not right[step][start + step]:
                    break
                agreed[step] += 1
    assert set(want) == {("a", 8), ("a", 32), ("b", 8), ("b", 32)}
    assert {(one.kind, one.length): (*one.asked, *one.agreed) for one in report} == {
        group: (*asked, *agreed) for group, (asked, agreed) in want.items()
    }
    assert draft.total(report)["agreed 1"] == pytest.approx(0.7, abs=0.15)


@pytest.mark.parametrize("mode", ["lookup", "auto"])
def test_an_evaluation_learns_from_all_questions(mode: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed is one run of drafting, as in a server: `auto` does not begin anew with every question."""
    opened: list[bool] = []
    wrapped = evaluate.open_speculation
    monkeypatch.setattr(evaluate, "open_speculation", lambda *some: opened.append(some[3]) or wrapped(*some))
    options = Options(model=str(tiny), device="cpu", ctx=512, speculate=mode)
    record = evaluate.evaluate(options, {"chat": ["Hello", "Hello there"]}, [16, 32], 4, lambda *_: None)
    assert record["equal answers"]
    assert sorted(opened) == [False] * 4 + [True]


def test_the_commands(tiny: Path, tmp_path: Path) -> None:
    options = ["--row", "64", "--epochs", "1", "--max-tokens", "16", "--vocabulary", "64", "--window", "32"]
    trained = sala(
        "draft", "train", "-m", str(tiny), "--data", str(data(tmp_path)), "-o", str(tmp_path / "head"), *options
    )
    assert trained.returncode == 0, trained.stderr
    assert "in texts that were not learned" in trained.stdout
    assert re.search(r"^ *(chat|text) +256 +\d+ +\d+% \d+% \d+% \d+%$", trained.stdout, re.MULTILINE), trained.stdout
    sizes = ["--lengths", "64", "--prompts", "1", "--max-tokens", "12", "--num-draft", "2"]
    without = sala("draft", "eval", "-m", str(tiny), *sizes, "-o", str(tmp_path / "none.json"))
    assert "has no draft head" in without.stderr
    assert "%" not in without.stderr  # nothing was measured before
    head = ["--draft-head", str(tmp_path / "head")]
    record = tmp_path / "record.json"
    done = sala("draft", "eval", "-m", str(tiny), *head, *sizes, "-o", str(record))
    assert done.returncode == 0, done.stderr
    table = json.loads(record.read_text())
    assert table["equal answers"] is True
    assert {row["kind"] for row in table["rows"]} == {"chat", "facts", "copying", "code", "stories"}
    assert all(1 <= row["tokens per round"] <= 3 for row in table["rows"])
    again = sala("draft", "eval", "-m", str(tiny), *head, *sizes, "-o", str(record))
    assert "exists already" in again.stderr
