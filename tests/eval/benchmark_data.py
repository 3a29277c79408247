"""Small data of every benchmark in the form of the published data, with texts and prompts of our own."""

import json
from pathlib import Path
from typing import Any

from sala.lab.eval.official.reading import INFINITEBENCH
from sala.lab.eval.tasks.prose import write_documents
from tests.eval.lm_eval_ruler import PROMPTS, hotpotqa, squad

FILLER = " ".join(document.replace("\n", " ") for document in write_documents(6))
LETTERS = "ABCD"


def write_data(directory: Path) -> None:
    """Write the files of all benchmarks; every right answer can be read in the text."""
    rulers = json.loads(PROMPTS.read_text("utf-8"))
    plain = {"text": "{{ context or input }}\n{{ input if context else question }}", "max_tokens": 48}
    task_prompts: dict[str, Any] = dict.fromkeys(INFINITEBENCH, plain)
    task_prompts["qa1"] = {
        "text": "{{ input }}\n{{ question }}", "before": "Where is who?\n", "max_tokens": 24,
        "shots": [{"input": "Ann is in the shed.", "question": "Where is Ann?", "target": "shed"}],
    }  # fmt: skip
    task_prompts |= {"qa8": task_prompts["qa1"], "qa19": task_prompts["qa1"]}
    choices = "".join(f"{letter}. {{{{ choices[{at}] }}}}\n" for at, letter in enumerate(LETTERS))
    task_prompts["longbench2"] = {"text": f"{{{{ context }}}}\n{{{{ question }}}}\n{choices}"}
    (directory / "prompts.json").write_text(json.dumps({**rulers, **task_prompts}))
    (directory / "squad.json").write_text(json.dumps(squad()))
    (directory / "hotpotqa.json").write_text(json.dumps(hotpotqa()))
    (directory / "needle_set.json").write_text(json.dumps(_needles()))
    (directory / "haystack").mkdir()
    (directory / "haystack" / "book.txt").write_text(FILLER)
    rows = {
        "longbench2": _longbench(), **_babilong(), **{name: _infinite(name) for name in INFINITEBENCH},
        **{f"mrcr_{count}needle": _conversations(count) for count in (2, 4, 8)},
        "graphwalks_128k_and_shorter": _graphs(), **_helmet(),
    }  # fmt: skip
    for name, lines in rows.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def hide(fact: str, number: int, size: int = 900) -> str:
    """Return prose with a fact in it."""
    text = FILLER[200 * number : 200 * number + size]
    return f"{text} FACT: {fact} {FILLER[: size // 2]}"


def _longbench() -> list[dict[str, Any]]:
    rows = []
    for at, length in enumerate(("short", "medium", "long", "short")):
        row = {f"choice_{letter}": f"place {letter.lower()}" for letter in LETTERS}
        right = LETTERS[at]
        text = hide(f"it is place {right.lower()}.", at)
        rows.append({**row, "length": length, "question": "Which is it?", "answer": right, "context": text})
    return rows


def _babilong() -> dict[str, list[dict[str, str]]]:
    """Return questions about a place, about several things, and about a way."""
    asked = {
        "qa1": ("Where is Mary?", ("garden", "kitchen", "office")),
        "qa8": ("What is Mary carrying?", ("apple,football", "milk", "nothing")),
        "qa19": ("What is the way?", ("n,w", "s,e")),
    }
    return {
        f"{task}_1k": [
            {"input": hide(f"it is in the {target}.", at), "question": question, "target": target}
            for at, target in enumerate(targets)
        ]
        for task, (question, targets) in asked.items()
    }


def _infinite(name: str) -> list[dict[str, Any]]:
    values = ("4711", "815") if name not in ("longbook_qa_eng", "longbook_sum_eng") else ("a red boat", "the mill")
    if name == "longbook_qa_chn":
        values = ("红船", "磨坊")
    rows = [
        {"context": hide(f"it is {one}.", at), "input": "What is it?", "answer": [one], "options": []}
        for at, one in enumerate(values)
    ]
    if name in ("code_debug", "longbook_choice_eng"):
        options = ["u", "v", "w", "x"]
        rows = [
            {"context": hide(f"it is {letter}.", at), "input": "Which?", "options": options, "answer": [options[at]]}
            for at, letter in enumerate(LETTERS)
        ]
    return rows


def _conversations(count: int) -> list[dict[str, Any]]:
    asked = [
        {"role": role, "content": text}
        for role, text in (("user", "Write a poem."), ("assistant", "FACT: it is Rain."))
    ]
    final = {"role": "user", "content": "Put Xy12 before the poem and write it again."}
    messages = [
        *asked,
        *({"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi."}) * count,
        final,
    ]
    row = {"prompt": json.dumps(messages), "answer": "Xy12FACT: it is Rain.", "random_string_to_prepend": "Xy12"}
    return [row]


def _graphs() -> list[dict[str, Any]]:
    text = "a1 -> b2\na1 -> c3\nc3 -> d4\n"
    return [
        {"prompt": f"{text}From a1, one step?", "answer_nodes": ["b2", "c3"], "problem_type": "bfs"},
        {"prompt": f"{text}To d4?", "answer_nodes": ["c3"], "problem_type": "parents"},
        {"prompt": f"{text}To a1?", "answer_nodes": [], "problem_type": "parents"},
    ]


def _helmet() -> dict[str, list[dict[str, Any]]]:
    documents = [{"title": "One", "text": "FACT: it is Oslo."}, {"title": "Two", "text": FILLER[:300]}]
    recall = [{"input": hide("it is 4711.", 1), "outputs": ["4711"]}]
    keys = [{"context": '{"k1": "v77", "k2": "v88"} FACT: it is v88.', "question": "k2", "answer": "v88"}]
    return {
        **{f"helmet_{name}": recall for name in ("niah_mk_2", "niah_mk_3", "niah_mv")},
        "helmet_json_kv": keys,
        "helmet_asqa": [
            {"question": "Where?", "docs": documents, "qa_pairs": [{"short_answers": ["Oslo", "Christiania"]}]}
        ],
        "helmet_qampari": [{"question": "Where?", "docs": documents, "answers": [["Oslo"]]}],
    }


def _needles() -> list[dict[str, Any]]:
    return [
        {
            "id": "1", "needle": "FACT: it is {CHAR}, who lives by the {1}.", "character_set": ["Yuki", "Stuart"],
            "task_template": "Read this.\n{haystack}\n{question}", "system_prompt": "",
            "questions": {"onehop": "Who has been to {2}?", "twohop": "Who has been to the land of {2}?"},
            "tests": {f"t{at}": {"input_args": [f"house {at}", f"town {at}"]} for at in range(3)},
        }
    ]  # fmt: skip
