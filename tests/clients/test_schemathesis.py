"""Schemathesis against what the server says about itself, with data that fits the schema and data that does not.

A run that passes writes its counts to `benchmarks/schemathesis.json`, from which the documentation takes them.
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.conftest import Environment

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance", "negative_data_rejection", "unsupported_method",
)  # fmt: skip
NUM_EXAMPLES = 200
LIMIT_S = 3600
RESULTS = Path(__file__).parents[2] / "benchmarks" / "schemathesis.json"
pytestmark = pytest.mark.timeout(LIMIT_S)
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")


def test_schemathesis(install: Callable[..., Environment], tiny_address: str, tmp_path: Path) -> None:
    environment = install("schemathesis")
    words = environment.run(
        "st", "run", f"{tiny_address}/openapi.json", "--mode", "all", "--phases", "examples,coverage,fuzzing",
        "--checks", ",".join(CHECKS), "--max-examples", str(NUM_EXAMPLES), "--request-timeout", "30", "--no-color",
        "--continue-on-failure", "--seed", "1", "--report", "ndjson", "--report-ndjson-path", str(tmp_path / "events"),
        limit_s=LIMIT_S,
    )  # fmt: skip
    generated = int(re.search(r"(\d+) generated", words)[1])
    positive, operations, statuses = count(tmp_path / "events")
    by_path = {path: positive[f"POST {path}"] for path in GENERATING}
    chats = by_path["/v1/chat/completions"]
    assert generated > 1000
    assert chats[200] > 0.5 * chats.total() > 20
    found = {
        "version": environment.run("st", "--version").split()[-1],
        "examples": NUM_EXAMPLES,
        "operations": operations,
        "requests": generated,
        "statuses": {f"{first}xx": total for first, total in sorted(statuses.items())},
        "accepted": {path: [one[200], one.total()] for path, one in by_path.items()},
    }
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


def count(report: Path) -> tuple[dict[str, Counter[int]], int, Counter[int]]:
    """Return how often each status answered random requests that fit the schema, by operation.

    Also the number of operations that were tried, and the first digits of all statuses.
    """
    found: dict[str, Counter[int]] = {}
    labels: set[str] = set()
    statuses: Counter[int] = Counter()
    for event in map(json.loads, report.read_text().splitlines()):
        scenario = event.get("ScenarioFinished", {})
        if not scenario:
            continue
        recorder = scenario["recorder"]
        labels.add(recorder["label"])
        interactions = recorder.get("interactions", {})
        answers = [one["response"] for one in interactions.values() if one.get("response")]
        statuses.update(answer["status_code"] // 100 for answer in answers)
        if scenario["phase"] != "fuzzing":
            continue
        counter = found.setdefault(recorder["label"], Counter())
        for number, case in recorder.get("cases", {}).items():
            response = interactions.get(number, {}).get("response")
            if response and case["value"]["meta"]["generation"]["mode"] == "positive":
                counter[response["status_code"]] += 1
    return found, len(labels), statuses
