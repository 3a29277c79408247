"""Mixed load with faults against a real server with a tiny random model, for an hour.

    python benchmarks/chaos.py [--minutes 60] [--pause 1.0] [--ends 3] [--output chaos.json]

Clients with several keys ask in all APIs (long prompts, streams, tools, schemas), leave, send invalid bodies, download,
load and switch models, while workers are killed, the disk is full or read-only and the clock jumps; at the end the
server is ended by SIGTERM, SIGKILL and the loss of its device, and started again. Every answer is compared with the one
of the quiet server, and twelve times everything is counted while all clients pause.
Results go to chaos.json beside this file; the exit code is 1 if anything was wrong, or if memory, open files or threads
(outside pools, which fill) of the server were beyond ± 5 % at the counts, and by more than one; for --smoke only if
anything was wrong. Where user namespaces are available, the disk is a real one of 64 MB.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
NUM_COUNTS = 12
sys.path.insert(0, str(HERE.parent))

from tests.chaos.run import Plan, chaos, find_unsteady  # noqa: E402
from tests.chaos.server import own_namespace  # noqa: E402

SMOKE = Plan(load_s=4, pause_s=0.1, fault_s=0.4, hold_s=0.4, rest_s=0.3, counts_at=(2.0, 4.0), num_ends=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two requests of a client")
    parser.add_argument("--ends", type=int, default=3, help="how often the server is ended in each way")
    parser.add_argument("--output", type=Path, default=HERE / "chaos.json")
    parser.add_argument("--smoke", action="store_true", help="seconds instead of an hour, every fault once")
    parser.add_argument("--log", type=Path, help="where to keep the log of the server")
    options = parser.parse_args()
    own_namespace()
    seconds = 60 * options.minutes
    counts_at = tuple(seconds * number / NUM_COUNTS for number in range(1, NUM_COUNTS + 1))
    plan = Plan(load_s=seconds, pause_s=options.pause, counts_at=counts_at, num_ends=options.ends)
    with tempfile.TemporaryDirectory() as directory:
        results = chaos(Path(directory), SMOKE if options.smoke else plan)
        if options.log is not None:
            shutil.copyfile(Path(directory) / "server.log", options.log)
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))
    problems = []
    if results["wrong"]:
        problems.append(f"{len(results['wrong'])} answers or counts are wrong; see `wrong` in {options.output}")
    if unsteady := [] if options.smoke else find_unsteady(results["counts"]):
        problems.append(f"not within ± 5 %: {', '.join(unsteady)}; see `counts` in {options.output}")
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
