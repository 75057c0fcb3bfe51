#!/usr/bin/env python3
"""LocalSvd against FullSvd on traces: at the same epsilon, and at the same output error.

    benchmarks/equal_error.py TRACE... [--epsilon E] [--fallback] [-- REPLAY_OPTION...]

For every head, the epsilon at which LocalSvd has FullSvd's output error is found by bisection on a grid of eighths of an
octave. Without --fallback states never go dense and ranks are compared, with it bytes. Options behind `--` go to
LocalSvd's replay. Prints a Markdown table. Needs build/release/examples/replay (./run build).
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile

STEPS = 8  # of an octave
WIDEST = 6 * STEPS  # epsilon from 2^-6 to 2^6 times the given one, below 1
REPLAY = os.path.join(os.path.dirname(__file__), "..", "build", "release", "examples", "replay")


def main():
    given = sys.argv[1:]
    more = []
    if "--" in given:
        more = given[given.index("--") + 1 :]
        given = given[: given.index("--")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", metavar="TRACE")
    parser.add_argument("--epsilon", type=float, default=1e-2)
    parser.add_argument("--fallback", action="store_true", help="let states go dense, compare bytes")
    arguments = parser.parse_args(given)
    size = "bytes_mean" if arguments.fallback else "rank_mean"

    @functools.lru_cache(maxsize=None)
    def heads(trace, policy, step):
        with tempfile.NamedTemporaryFile(suffix=".json") as report:
            command = [REPLAY, trace, "--policy", policy, "--json", report.name]
            command += ["--epsilon", repr(arguments.epsilon * 2 ** (step / STEPS))]
            command += [] if arguments.fallback else ["--no-dense-fallback"]
            command += more if policy == "local-svd" else []
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            return json.load(open(report.name))["traces"][0]["per_head"]

    print("| trace | head | FullSvd: %s | error | same epsilon: %s | error | recompressed | equal error: epsilon | %s | compaction time |"
          % (("bytes", "bytes", "bytes") if arguments.fallback else ("rank", "rank", "rank")))
    print("|---|---|---|---|---|---|---|---|---|---|")
    for trace in arguments.traces:
        name = os.path.basename(trace).rsplit(".", 1)[0]
        for head, full in enumerate(heads(trace, "full-svd", 0)):
            error = lambda step: heads(trace, "local-svd", step)[head]["output_error_rms"]
            same = heads(trace, "local-svd", 0)[head]
            # The largest epsilon whose error is at most FullSvd's.
            low, high = -WIDEST, WIDEST
            while arguments.epsilon * 2 ** (high / STEPS) >= 1:
                high -= 1
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if error(middle) <= full["output_error_rms"] else (low, middle)
            equal = heads(trace, "local-svd", low)[head]
            missed = "" if error(low) <= full["output_error_rms"] else " (not reached)"
            shown = "%.2f" % full["ratio_mean"] if arguments.fallback else "%.1f" % full["rank_mean"]
            print("| %s | %d | %s | %.2e | x %.2f | x %.2f | %.0f %% | %.2e | x %.2f%s | x %.2f |"
                  % (name, head, shown, full["output_error_rms"], same[size] / full[size],
                     same["output_error_rms"] / full["output_error_rms"],
                     100 * same["recompressions"] / max(1, same["compactions"]),
                     arguments.epsilon * 2 ** (low / STEPS), equal[size] / full[size], missed,
                     equal["ns_per_token_compaction"] / full["ns_per_token_compaction"]), flush=True)


if __name__ == "__main__":
    main()
