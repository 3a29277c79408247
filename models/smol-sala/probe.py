"""Compare a student with its teacher on the teacher's own answers to held-out prompts.

python models/smol-sala/probe.py models/smol-sala/probe.json TEACHER STUDENT
"""

import argparse
import json
from pathlib import Path

from sala.backends.torch.loader import pick_device
from sala.lab.train.models import load_for_training
from sala.lab.train.probe import Probe, read_cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("probe", type=Path)
    parser.add_argument("teacher", type=Path)
    parser.add_argument("student", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--ended", action="store_true", help="also generate the student's answers (slow without a GPU)")
    options = parser.parse_args()
    device = pick_device(options.device)
    probe = Probe(read_cases(options.probe), load_for_training(options.teacher, device))
    student = load_for_training(options.student, device)
    values = probe(student)
    if options.ended:
        values["ended"] = probe.ended(student, student.config.eos_token_id[0])
    print(json.dumps(values, indent=2))


if __name__ == "__main__":
    main()
