"""Runs the all-reduces of nccl-tests' own kernels, for `devcomm-bench .. --peers nccl-tests`.

The arguments are a job (JSON) and nccl-tests' program all_reduce_perf, which is started for each
kernel (-D 1 and 2) and type, on all GPUs. The first of the bench's processes prints the program's
lines after `#`, as progress, and a line of JSON for each size and kernel; times are by the host's
clock.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys

KERNELS = {"nccl-tests-lsa": 1, "nccl-tests-lsa-vector": 2}
# Its kernels add these types.
TYPES = {"f32": (4, "float"), "f16": (2, "half")}
# The bytes of an element of the others.
WIDTHS = {"bf16": 2, "f8e4m3": 1, "f8e5m2": 1, "i8": 1, "u8": 1}
WIDTHS |= {"i32": 4, "u32": 4, "f64": 8, "i64": 8, "u64": 8}


LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


def end_with_parent():
    """Makes Linux kill this process when its parent ends: the bench kills only the parent."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def steps(sizes):
    """Lists of sizes that a run takes, with the flag of their step."""
    pairs = list(zip(sizes, sizes[1:]))
    if not pairs:
        return [(sizes, ["-f", "2"])]
    factor, difference = sizes[1] // sizes[0], sizes[1] - sizes[0]
    if factor > 1 and all(a * factor == b for a, b in pairs):
        return [(sizes, ["-f", str(factor)])]
    if all(b - a == difference for a, b in pairs):
        return [(sizes, ["-i", str(difference)])]
    return [([size], ["-f", "2"]) for size in sizes]


def rows(program, job, kernel, name, sizes, step):
    """The times of all cycles, out of place, and the number of wrong elements, by size."""
    flags = {
        "-D": kernel, "-R": 2, "-g": os.environ["WORLD_SIZE"], "-b": sizes[0], "-e": sizes[-1],
        "-n": job["iters"], "-w": job["warmup"], "-c": job["check"], "-G": job["graph"],
        "-N": job["rounds"], "-a": 3, "-d": name, "-o": "sum",
    }  # fmt: skip
    command = [program, *(str(word) for pair in flags.items() for word in pair), *step]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, text=True, preexec_fn=end_with_parent)
    found, last, complete = {size: ([], None) for size in sizes}, "", False
    for line in process.stdout:
        print("#", line, end="", flush=True)
        last = line.strip() or last
        complete |= line.startswith("# Out of bounds values")
        # Size, count, type, operation and root; time, two bandwidths and #wrong; and these in place.
        words = line.split()
        if len(words) == 13 and words[2] == name and words[0].isdigit():
            times, wrong = found.setdefault(int(words[0]), ([], None))
            if words[8] != "N/A":
                wrong = (wrong or 0) + int(float(words[8]))
            found[int(words[0])] = (times + [float(words[5])], wrong)
    # The program also fails on wrong results, which here are a column of the rows.
    if process.wait() and not complete:
        sys.exit(f"all_reduce_perf -D {kernel} -d {name} has failed: {last}")
    return found


def main(job, program):
    if os.environ["RANK"] != "0":
        return
    job = json.loads(job)
    for dtype, counts in job["counts"].items():
        for variant in job["variants"]:
            if dtype not in TYPES:
                for count in counts:
                    why = "nccl-tests' kernels add f32 and f16"
                    size = WIDTHS[dtype] * count
                    row = {"variant": variant, "type": dtype, "size": size, "left_out": why}
                    print(json.dumps(row), flush=True)
                continue
            width, name = TYPES[dtype]
            for sizes, step in steps([count * width for count in counts]):
                found = rows(program, job, KERNELS[variant], name, sizes, step)
                for size in sizes:
                    times, wrong = found[size]
                    row = {"variant": variant, "type": dtype, "size": size, "wrong": wrong}
                    print(json.dumps({**row, "times_us": times[: job["rounds"]]}), flush=True)


main(*sys.argv[1:])
