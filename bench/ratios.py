"""Recomputes the ratios of docs/measurements.md from the files of rows, and compares.

    python3 bench/ratios.py docs/measurements docs/measurements.md

It shares no code with `devcomm-bench report`. The exit status is 1 if a figure differs.
"""

import glob
import json
import math
import os
import re
import statistics
import sys

# The default variant of each benchmark, and its competitors.
COLLECTIVE = ("rust-ops", {"nccl", "nccl-sym"})
PRODUCT = ("rust", {"cublaslt"})
FUSED = ("rust", {"nccl", "nccl-sym", "torch-fused"})
SHOTS = {"torch-one-shot", "torch-two-shot"}
ROLES = {
    "all-reduce": (
        "rust-ops",
        {"nccl", "nccl-sym", "flashinfer", "vllm", "nccl-tests-lsa", "nccl-tests-lsa-vector"}
        | SHOTS,
    ),
    "all-gather": COLLECTIVE,
    "reduce-scatter": COLLECTIVE,
    "broadcast": COLLECTIVE,
    "all-to-all": COLLECTIVE,
    "all-to-all-v": COLLECTIVE,
    "rmsnorm-allreduce": ("rust-ops", {"nccl", "nccl-sym", "flashinfer"}),
    "launch": COLLECTIVE,
    "barrier": ("rust", {"nccl", "nccl-sym"}),
    "put": ("rust", {"nccl", "nccl-sym"}),
    "signal": ("rust", {"nccl", "nccl-sym"}),
    "twins": ("rust", {"cpp"}),
    "p2p": (None, set()),
    "gemm": PRODUCT,
    "grouped-gemm": ("rust", {"cublaslt", "cublas-grouped"}),
    "gemm-ladder": PRODUCT,
    "gemm-allreduce": ("rust", {"nccl", "nccl-sym"} | SHOTS),
    "gemm-reduce-scatter": FUSED,
    "allgather-gemm": FUSED,
    "ep": ("rust", {"nccl", "nccl-sym", "nccl-alltoall", "nccl-ep-ll", "nccl-ep-ht"}),
}
CASE_KEYS = ["size", "count", "type", "redop", "m", "n", "k", "tokens", "hidden", "l2", "in_place"]


def cases(rows):
    """Yields rows that ran together: a case ends where a key changes or a variant comes again."""
    case = []
    for row in rows:
        changes = case and any(case[-1].get(key) != row.get(key) for key in CASE_KEYS)
        variants = [other["variant"] for other in case]
        returns = row["variant"] in variants and variants[-1] != row["variant"]
        if changes or returns:
            yield case
            case = []
        case.append(row)
    if case:
        yield case


def plan(row):
    text = row.get("asked") or row.get("algorithm") or ""
    return re.split("[,(]", text)[0].strip()


def noise_of(row, key):
    """The noise of a time in percent; files of earlier versions have one for both times."""
    between = row.get("between_noise_percent") if key == "between_us" else None
    return (row.get("noise_percent") if between is None else between) or 0


def ratios(path):
    """Maps each plan and number of a case to its ratio and noise, in the order of the file."""
    with open(path) as file:
        content = json.load(file)
    if any(row.get("wrong") for row in content["rows"]):
        sys.exit(f"{path} has wrong results")
    found = {}
    benchmark = content["header"]["command"][1]
    default, competitors = ROLES[benchmark]
    for at, case in enumerate(cases(content["rows"])):
        for key, after in (("time_us", ""), ("between_us", " after another kernel")):
            timed = [row for row in case if row.get(key) is not None]
            theirs = [row for row in timed if row["variant"] in competitors]
            ours = [row for row in timed if row["variant"] == default]
            # A time after another kernel that is lost in its noise may be the shortest.
            if not theirs or any(row[key] <= 0 for row in theirs + ours):
                continue
            best = min(theirs, key=lambda row: row[key])
            for row in ours:
                noise = max(noise_of(row, key), noise_of(best, key)) / 100
                label = (plan(row) if len(ours) > 1 else "") + after
                found[label.strip(), at] = [row[key] / best[key], noise]
    return found


def figures(folder, stem):
    """Returns a line of the page's cells for each plan: cases, mean, worst, above 1, ties."""
    first = ratios(f"{folder}/{stem}.json")
    starts = [ratios(path) for path in glob.glob(f"{folder}/{glob.escape(stem)}-start*.json")]
    plans = {}
    for key in first:
        values = [run[key][0] for run in [first, *starts]]
        noise = max(run[key][1] for run in [first, *starts])
        value = statistics.median(values)
        if len(values) >= 3:
            tie = min(values) <= 1 <= max(values)
        else:
            tie = abs(value - 1) < max(0.03, noise)
        plans.setdefault(key[0], []).append((value, tie))
    lines = []
    for of_plan in plans.values():
        values = [value for value, _ in of_plan]
        mean = math.exp(sum(map(math.log, values)) / len(values))
        above, ties = sum(value > 1 for value in values), sum(tie for _, tie in of_plan)
        lines.append([str(len(values)), f"{mean:.3f}", f"{max(values):.3f}", str(above), str(ties)])
    return lines or [["-"] * 5]


def main(folder, page):
    stems = (os.path.basename(path)[: -len(".json")] for path in glob.glob(f"{folder}/*.json"))
    expected = {stem: figures(folder, stem) for stem in stems if "-start" not in stem}
    written = {stem: [] for stem in expected}
    with open(page) as file:
        for line in file:
            link = re.search(r"\[rows\]\([^)]*?([^/)]+)\.json\)", line)
            if link:
                cells = [cell.strip() for cell in line.split("|")][5:10]
                cells[2] = cells[2].split(" ")[0]
                written.setdefault(link[1], []).append(cells)
    wrong = [stem for stem in sorted(written) if written[stem] != expected.get(stem)]
    for stem in wrong:
        print(f"{stem}: the page has {written[stem]}, the rows {expected.get(stem)}")
    print(f"{len(expected)} files, {len(wrong)} differ")
    return bool(wrong) or not expected


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
