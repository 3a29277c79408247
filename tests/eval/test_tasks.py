"""Every task is solved by a reader of the prompt and by nobody else, at every length; a seed determines its cases."""

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, normalizers

from sala.errors import InputError
from sala.lab.eval.documents import read_source
from sala.lab.eval.runner import Job, run_cases, run_problems
from sala.lab.eval.suite import KEY_SPECS, RULER, SHARING, Suite, reasoning_tasks
from sala.lab.eval.tasks import reasoning
from sala.lab.eval.tasks.case import Case, Frame, PromptWriter, Solution
from sala.lab.eval.tasks.counting import real_words, spread_common, spread_frequent
from sala.lab.eval.tasks.prose import write_documents
from sala.lab.eval.tasks.reading import read_passages
from sala.lab.eval.tasks.words import sample_names
from sala.lab.report.record import Log
from sala.text.tokenizer import Tokenizer
from tests.eval.oracle import StandIn, guess, solve

LENGTHS = (4_000, 32_000, 256_000)


def make_suite(directory: Path, seed: int = 0) -> Suite:
    return Suite(PromptWriter.for_model(Tokenizer.load(directory)), partial(read_source, None), seed)


@pytest.fixture(scope="module")
def suite(tiny: Path) -> Suite:
    return make_suite(tiny)


def score(llm: StandIn, jobs: list[Job[Case]], log: Path) -> list[float]:
    return [row["score"] for row in run_cases(llm, jobs, Log(log), {})]  # type: ignore[arg-type]


@pytest.mark.parametrize("task", RULER)
def test_a_reader_solves_it_and_a_guesser_does_not(task: str, suite: Suite, tiny: Path, tmp_path: Path) -> None:
    jobs = suite.ruler([task], LENGTHS, trials=4, per_text=2)
    reader = StandIn(tiny, solve)
    assert score(reader, jobs, tmp_path / "reader") == [1.0] * len(jobs)
    blind = score(StandIn(tiny, guess), jobs, tmp_path / "blind")
    assert sum(blind) / len(blind) < 0.1
    for job, prompt in zip(jobs, reader.prompts, strict=True):
        case = job.make()
        assert 0.9 * job.num_tokens <= len(case.token_ids) + case.max_tokens <= job.num_tokens
        assert prompt.startswith("<|im_start|>user\n")
    assert len({prompt[-3000:] for prompt in reader.prompts}) == len(jobs)


@pytest.mark.parametrize("preset", ["varied", "aurora"])
def test_needles_lie_where_they_should(preset: str, suite: Suite, tiny: Path, tmp_path: Path) -> None:
    depths = (0, 25, 50, 75, 100)
    jobs = suite.needle(LENGTHS, depths, trials=2, preset=preset)
    reader = StandIn(tiny, solve)
    rows = run_cases(reader, jobs, Log(tmp_path / "log"), {})  # type: ignore[arg-type]
    assert all(row["is_exact"] for row in rows)
    for row, prompt in zip(rows, reader.prompts, strict=True):
        assert row["depth_found"] == pytest.approx(row["depth"] / 100, abs=300 / row["length"])
        found = re.finditer(rf"(?<![\w-]){re.escape(row['wanted'][0])}(?![\w-])", prompt)
        distances = [abs(one.start() / len(prompt) - row["depth"] / 100) for one in found]
        assert min(distances) < 600 / row["length"]


def test_depths_share_their_text(suite: Suite) -> None:
    """The case of one depth begins as the next one does, up to its needle: nothing of it is read twice."""
    quarter, half = (suite.needle([32_000], [depth], 1)[0].make() for depth in (25, 50))
    same = np.flatnonzero(quarter.token_ids[:30_000] != half.token_ids[:30_000])[0]
    assert same == pytest.approx(0.25 * 32_000, rel=0.05)
    assert quarter.facts["question"] != half.facts["question"]
    questions = {job.make().facts["question"] for job in suite.needle([4_000], [0, 25, 50, 75, 100], 6)}
    assert len(questions) > 25


def test_only_the_asked_of_many_needles_moves(suite: Suite, tiny: Path) -> None:
    tokenizer = Tokenizer.load(tiny)
    cases = [suite.needle([8_000], [depth], 1, num_keys=4)[0].make() for depth in (30, 60)]
    texts = [tokenizer.decode(case.token_ids.tolist()) for case in cases]
    (value,) = cases[0].solution.wanted
    assert cases[1].solution.wanted == (value,)
    assert texts[0] != texts[1]
    without = [re.sub(rf" [^.\n]*(?<!\w){value}(?!\w)[^.\n]*\.", "", text, count=1) for text in texts]
    assert without[0] == without[1]
    assert all(value not in text for text in without)


@pytest.mark.parametrize("task", SHARING)
def test_questions_share_their_text(task: str, suite: Suite, tiny: Path, tmp_path: Path) -> None:
    jobs = suite.ruler([task], [8_000], trials=2, per_text=2)
    llm = StandIn(tiny, solve)
    run_cases(llm, jobs, Log(tmp_path / "log"), {})  # type: ignore[arg-type]
    (kept,), none = llm.boundaries
    assert kept > 7_000
    assert none == ()
    assert llm.prompts[0][:7_000] == llm.prompts[1][:7_000]
    assert jobs[0].make().facts["question"] != jobs[1].make().facts["question"]


@pytest.mark.parametrize("task", RULER)
def test_the_same_seed_makes_the_same_case(task: str, tiny: Path, suite: Suite) -> None:
    (case,), (again,) = (
        [job.make() for job in one.ruler([task], [6_000], 1)] for one in (suite, make_suite(tiny, seed=0))
    )
    other = make_suite(tiny, seed=1).ruler([task], [6_000], 1)[0].make()
    assert np.array_equal(case.token_ids, again.token_ids)
    assert case.solution == again.solution
    assert not np.array_equal(case.token_ids[:4_000], other.token_ids[:4_000])


def test_a_case_does_not_depend_on_those_before_it(tiny: Path) -> None:
    alone = make_suite(tiny).ruler(["reading"], [20_000], 3)[2].make()
    shared = make_suite(tiny).ruler(["reading"], [4_000, 20_000], 3)
    after = [job.make() for job in shared][5]
    assert np.array_equal(alone.token_ids, after.token_ids)


def test_the_prompt_is_what_a_chat_would_send(tiny: Path, suite: Suite) -> None:
    tokenizer = Tokenizer.load(tiny)
    ids = suite.needle([4_000], [50], 1)[0].make().token_ids.tolist()
    text = tokenizer.decode(ids, skip_special=False)
    content, _, opening = text.removeprefix("<|im_start|>user\n").partition("<|im_end|>\n<|im_start|>assistant\n")
    whole = tokenizer.encode_chat([{"role": "user", "content": content}], add_generation_prompt=True)
    assert ids == [*whole, *tokenizer.encode(opening, bos=False)]


def test_a_template_that_begins_to_think_is_answered_without_thoughts(tiny: Path, tmp_path: Path) -> None:
    model = copy_with_thoughts(tiny, tmp_path / "model")
    case = make_suite(model).needle([2_000], [50], 1)[0].make()
    text = Tokenizer.load(model).decode(case.token_ids.tolist(), skip_special=False)
    assert re.search(r"<\|im_start\|>assistant\n<think>\n\n</think>\n\n\w[^\n]*$", text)


def test_a_model_without_a_chat_format_continues_the_text(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tiny / "tokenizer.json").read_bytes())
    tokenizer = Tokenizer.load(tmp_path)
    writer = PromptWriter.for_model(tokenizer)
    case = Suite(writer, partial(read_source, None)).needle([2_000], [50], 1)[0].make()
    assert "<|im_" not in tokenizer.decode(case.token_ids.tolist(), skip_special=False)


def test_tokenizers_that_put_a_space_before_every_text(tiny: Path, tmp_path: Path) -> None:
    """What is put together from pieces has the ids of the whole."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "x": 257, "▁x": 258}
    inner = RustTokenizer(models.BPE(vocab=vocab, merges=[("▁", "x")], byte_fallback=True, unk_token=None))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text((tiny / "chat_template.jinja").read_text())
    tokenizer = Tokenizer.load(tmp_path)
    writer = PromptWriter.for_model(tokenizer)
    head, tail = writer.around(Frame("Read x.\n\n", "\n\nWhat of x?"))
    ids = [*head, *writer.ids("x is old."), *writer.ids(" So x is x."), *tail]
    content = "Read x.\n\nx is old. So x is x.\n\nWhat of x?"
    assert ids == tokenizer.encode_chat([{"role": "user", "content": content}], add_generation_prompt=True)
    opened = writer.around(Frame("", "", "x is"))[1]
    assert opened.tolist() == [*writer.around(Frame("", ""))[1], *writer.ids("x is")]
    assert writer.ids("x is")[0] == vocab["x"]


def copy_with_thoughts(tiny: Path, target: Path) -> Path:
    target.mkdir()
    for file in tiny.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    template = (target / "chat_template.jinja").read_text()
    (target / "chat_template.jinja").write_text(template.replace("assistant\\n'", "assistant\\n<think>\\n'"))
    return target


def test_texts_of_ones_own(tiny: Path, tmp_path: Path) -> None:
    """Special tokens that a file spells stay text, and what it says is in the prompt."""
    (tmp_path / "a.txt").write_text("The heron stood still. <|im_end|> It was late. </s> Nobody came. " * 40)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.md").write_text("A second file, with words of its own. " * 40)
    (tmp_path / "deep" / "c.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / ".hidden").write_text("secret " * 500)
    source = read_source(tmp_path)
    assert len(source.documents) == 2
    tokenizer = Tokenizer.load(tiny)
    suite = Suite(PromptWriter.for_model(tokenizer), lambda: source)
    ids = suite.needle([6_000], [50], 1)[0].make().token_ids.tolist()
    text = tokenizer.decode(ids, skip_special=False)
    assert "The heron stood still." in text
    assert "A second file" in text
    assert "secret" not in text
    special = [tokenizer.token_id(name) for name in ("<|im_end|>", "</s>")]
    assert [ids.count(one) for one in special] == [1, 0]


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("nowhere", None, "does not exist"),
        ("empty.txt", b"  \n", "holds no text"),
        ("picture.png", b"\x89PNG\xff\x00", "not UTF-8"),
    ],
)
def test_haystacks_that_are_none(name: str, data: bytes | None, words: str, tmp_path: Path) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=words):
        read_source(tmp_path / name)


def test_questions_of_ones_own(tiny: Path, suite: Suite, tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    lines = [
        '{"text": "Ilse keeps the book in a drawer.", "question": "Who keeps the book?", "answers": ["Ilse", "she"]}',
        '{"text": "The ferry leaves at dawn from the north pier.", "question": "When?", "answers": ["at dawn"]}',
    ]
    file.write_text("\n\n".join(lines))
    passages = read_passages(file)
    jobs = suite.ruler(["questions"], [3_000], 2, passages=passages)
    reader = StandIn(tiny, lambda text: "It is Ilse." if "who keeps" in text.lower() else "At dawn, I think")
    assert score(reader, jobs, tmp_path / "log") == [1.0, 1.0]
    assert all(passage.text in prompt for passage, prompt in zip(passages, reader.prompts, strict=True))
    for bad in (
        "{}",
        "no json",
        '{"text": "a", "question": "b", "answers": []}',
        '{"text": 1, "question": 2, "answers": ["x"]}',
    ):
        file.write_text(lines[0] + "\n" + bad)
        with pytest.raises(InputError, match=r"own\.jsonl:2"):
            read_passages(file)
    file.write_text("\n")
    with pytest.raises(InputError, match="none"):
        read_passages(file)


@pytest.mark.parametrize("task", RULER)
def test_too_short(task: str, suite: Suite) -> None:
    with pytest.raises(InputError, match="too short"):
        suite.ruler([task], [150], 1)


def test_more_needles_than_there_are(suite: Suite) -> None:
    with pytest.raises(InputError, match="hide fewer"):
        suite.needle([50_000], [50], 1, num_keys=5_000)
    with pytest.raises(InputError, match="choose from"):
        suite.ruler(["singel"], [4_000], 1)


def test_scores() -> None:
    values = Solution(("48213", "a1b2"))
    assert values.score("They are 48,213 and A1B2.") == 1.0
    assert values.score("48213") == pytest.approx(0.5, abs=0.15)
    assert values.score("") == 0.0
    names = Solution(("KELO", "RANI"), candidates=("KELO", "RANI", "TOVI", "MAVE"))
    assert names.score("rani, Kelo.") == 1.0
    assert names.score("kelo, tovi, rani, mave") == 0.5  # naming everything is no answer
    assert names.score("kelomon") == 0.0
    assert Solution(("dawn", "sunrise"), is_any=True).score("at sunrise") == 1.0


@pytest.mark.parametrize(("spread", "count"), [(spread_common, 5), (spread_frequent, 3)])
@pytest.mark.parametrize("budget", [3_000, 9_999, 60_000, 2_000_000])
def test_the_words_that_are_asked_for_stand_out(spread: object, count: int, budget: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 9, 400)
    counts = spread(lengths, budget)  # type: ignore[operator]
    used = int((counts * lengths).sum())
    assert 0.9 * budget < used <= budget
    assert counts[count - 1] > 1.5 * counts[count:].max()


def test_prose_is_varied_and_holds_no_needle() -> None:
    documents = write_documents(200)
    sentences = [one for text in documents for one in re.split(r"(?<=\.)\s+", text)]
    assert len(set(sentences)) > 0.6 * len(sentences)
    assert not re.search(r"\d|[{}|_]|\s{3}| ,|\.\.", " ".join(documents))
    assert documents == write_documents(200)
    assert len(set(documents)) == 200
    assert len(set(sample_names(5_000, np.random.default_rng(0)))) == 5_000
    assert len(real_words()) > 400
    assert all(word.isalpha() for word in real_words())
    assert set(KEY_SPECS) < set(RULER)


def test_reasoning_is_solved_by_a_reader(tiny: Path, tmp_path: Path) -> None:
    tasks = reasoning_tasks(list(reasoning.KINDS), 25, 0, [None])
    reader = StandIn(tiny, solve)
    rows = run_problems(reader, tasks, 256, Log(tmp_path / "a"), {})  # type: ignore[arg-type]
    assert all(row["is_correct"] and row["is_answered"] and not row["is_stuck"] for row in rows)
    assert len(set(reader.prompts)) > 70
    blind = run_problems(StandIn(tiny, guess), tasks, 256, Log(tmp_path / "b"), {})  # type: ignore[arg-type]
    assert sum(row["is_correct"] for row in blind) < 5
    again = reasoning_tasks(list(reasoning.KINDS), 25, 0, [None])
    assert [task.make() for task in again] == [task.make() for task in tasks]
    assert [task.make() for task in reasoning_tasks(["steps"], 5, 1, [None])] != [task.make() for task in tasks[25:30]]


NUMBER = reasoning.ReasoningProblem("?", "42")
NAME = reasoning.ReasoningProblem("?", "Ilse", ("Ilse", "Bram"))


@pytest.mark.parametrize(
    ("problem", "text", "thoughts", "verdict"),
    [
        (NUMBER, "Answer: 42", "", (True, True, False)),
        (NUMBER, "7 and 6 make 42.\nAnswer: 41", "42", (True, False, False)),
        (NUMBER, "so it is **Answer: 42.0**", "", (True, True, False)),
        (NUMBER, "It is 1,042", "", (True, False, False)),
        (NUMBER, "first 40, then 42.", "", (True, True, False)),
        (NUMBER, "Answer: I do not know", "", (False, False, False)),
        (NUMBER, "", "is it 42? or 42? or", (False, False, True)),
        (NUMBER, "Hm.", "long thoughts", (False, False, False)),
        (NUMBER, "", "", (False, False, False)),
        (NAME, "Bram is first.\nAnswer: Ilse", "", (True, True, False)),
        (NAME, "ilse", "", (True, True, False)),
        (NAME, "Answer: nobody", "", (False, False, False)),
    ],
)
def test_verdicts(
    problem: reasoning.ReasoningProblem, text: str, thoughts: str, verdict: tuple[bool, bool, bool]
) -> None:
    found = reasoning.judge(problem, text, thoughts)
    assert (found.is_answered, found.is_correct, found.is_stuck) == verdict


def test_unknown_kind() -> None:
    with pytest.raises(InputError, match="arithmetic"):
        reasoning.make("poetry", 0)
