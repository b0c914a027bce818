#!/bin/sh
# Runs the programs that `cargo xtask pack` put next to this script, with the packed NCCL.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)

usage() {
    echo "usage: ./run.sh list | tests [PROGRAM...] [FILTER...] | [--with COMMAND] bench BENCHMARK [ARGS...]"
    echo "       | python [ARGS...] | [--with COMMAND] EXAMPLE [ARGS...]"
    echo "--with starts the program by a command, such as --with 'compute-sanitizer --tool memcheck'"
}

list() {
    for program in "$programs"/examples/*; do
        basename "$program"
    done
    echo tests
    echo bench
}

unxz() {
    if command -v xz >/dev/null 2>&1; then
        xz -dc
    elif command -v python3 >/dev/null 2>&1; then
        python3 -c 'import lzma, shutil, sys
shutil.copyfileobj(lzma.open(sys.stdin.buffer), sys.stdout.buffer)'
    else
        echo "error: unpacking needs xz or python3" >&2
        return 1
    fi
}

# hash FILE: its SHA-256, or another checksum that this system has.
hash() {
    if command -v sha256sum >/dev/null 2>&1; then
        sha256sum <"$1"
    elif command -v shasum >/dev/null 2>&1; then
        shasum -a 256 <"$1"
    else
        cksum <"$1"
    fi | tr -cd '0-9a-f'
}

# is_whole FOLDER: whether its files have the sizes that they had when it was filled.
is_whole() {
    [ -f "$1/.sizes" ] || return 1
    (
        cd "$1"
        while read -r size name; do
            [ -f "$name" ] && [ "$(wc -c <"$name")" -eq "$size" ] || exit 1
        done <.sizes
    )
}

# provide NAME FILE COMMAND: sets $folder to a folder in the user's cache, filled once by `COMMAND FILE FOLDER`, and
# again if a file in it is truncated or missing. If the cache is not writable, $folder is a temporary folder, which is
# added to $scratch, one a line, and removed at the end.
cache="${HOME:-/nonexistent}/.cache/devcomm/packed"
# As XDG's specification says, a relative path is ignored.
case "${XDG_CACHE_HOME:-}" in /*) cache="$XDG_CACHE_HOME/devcomm/packed" ;; esac
case "${DEVCOMM_CACHE:-}" in
"") ;;
/*) cache="$DEVCOMM_CACHE/packed" ;;
*)
    echo "error: DEVCOMM_CACHE=$DEVCOMM_CACHE is a relative path; set it to an absolute path" >&2
    exit 1
    ;;
esac
scratch=
provide() {
    folder="$cache/$1-$(hash "$2")"
    ! is_whole "$folder" || return 0
    if ! mkdir -p "$cache" 2>/dev/null || ! partial=$(mktemp -d "$cache/.partial-XXXXXX" 2>/dev/null); then
        partial=$(mktemp -d)
    fi
    echo "unpacking $1 ..." >&2
    if ! "$3" "$2" "$partial"; then
        rm -rf "$partial"
        echo "error: $2 does not unpack into $partial" >&2
        exit 1
    fi
    (cd "$partial" && find . -type f ! -name .sizes -exec wc -c {} \; >.sizes)
    case $partial in
    "$cache"/*)
        # It is renamed when it is complete; another process may have been first.
        is_whole "$folder" || rm -rf "$folder" 2>/dev/null || :
        mv -T "$partial" "$folder" 2>/dev/null || :
        ;;
    esac
    if [ -d "$partial" ] && is_whole "$folder"; then
        rm -rf "$partial"
    elif [ -d "$partial" ]; then
        folder=$partial
        scratch="$scratch$partial
"
    fi
}

unpack_programs() {
    unxz <"$1" | tar -xf - -C "$2"
}

unpack_nccl() {
    mkdir "$2/lib"
    unxz <"$1" >"$2/lib/libnccl.so.2" && cp -R "$here/nccl/include" "$2/include"
}

# Sets DEVCOMM_NCCL_HOME to the packed NCCL, unless it is already set.
provide_nccl() {
    [ -z "${DEVCOMM_NCCL_HOME:-}" ] || return 0
    folder="$here/nccl"
    [ ! -f "$here/nccl/lib/libnccl.so.2.xz" ] || provide nccl "$here/nccl/lib/libnccl.so.2.xz" unpack_nccl
    export DEVCOMM_NCCL_HOME="$folder"
}

# Enables GIN with the packed plugin, unless there is an RDMA card or NCCL_RMA_PLUGIN is set.
provide_network() {
    [ -z "${NCCL_RMA_PLUGIN:-}" ] && [ -z "$(ls /sys/class/infiniband 2>/dev/null)" ] || return 0
    . "$programs/lib/network.sh"
}

run_tests() {
    provide_network
    # Without this variable the tests use simulated GPUs.
    export DEVCOMM_TEST_GPUS=1
    # The name of a test program selects that program; any other word is a filter for its tests.
    chosen=
    for word in "$@"; do
        shift
        if [ -f "$programs/tests/$word" ]; then chosen="$chosen $word"; else set -- "$@" "$word"; fi
    done
    log=$(mktemp)
    for program in "$programs"/tests/*; do
        name=$(basename "$program")
        case "$chosen " in
        " " | *" $name "*) ;;
        *) continue ;;
        esac
        echo "== $name =="
        # Each test uses all GPUs, so one runs at a time; --nocapture shows the lines "GPU-TEST name: ran".
        { "$program" --nocapture --test-threads=1 "$@" 2>&1 || echo "PROGRAM $name failed with code $?"; } | tee -a "$log"
    done
    code=0
    awk '
        # A test of several parts reports each, as "name part": it ran if one of them did.
        # Its name may have modules before it, as in module::name.
        /GPU-TEST .*: (ran|skipped)/ {
            name = $0
            sub(/.*GPU-TEST /, "", name)
            sub(/(: (ran|skipped)| ).*/, "", name)
            if (!(name in tests)) tests[name] = 0
        }
        /GPU-TEST .*: ran/ { tests[name] = 1 }
        /GPU-TEST .*: skipped/ {
            reason = $0
            sub(/.*: skipped[ (]*/, "", reason)
            sub(/\)[^)]*$/, "", reason)
            if (!(reason in known)) { known[reason] = 1; reasons = reasons (reasons == "" ? "" : "; ") reason }
        }
        /^test result: / {
            for (i = 2; i <= NF; i++) {
                if ($i == "passed;") passed += $(i - 1)
                if ($i == "failed;") failed += $(i - 1)
            }
        }
        /^PROGRAM .* failed with code / { broken++; print "failed: " $2 }
        END {
            for (name in tests) if (tests[name]) ran++; else skipped++
            # A program that crashed has reported no failing test.
            if (broken && !failed) failed = broken
            printf "\nGPU: %d run, %d skipped%s\n", ran, skipped, reasons == "" ? "" : " (" reasons ")"
            printf "%d passed, %d failed, %d skipped\n", passed - skipped, failed, skipped
            exit failed > 0
        }' "$log" || code=$?
    rm -f "$log"
    return "$code"
}

with=
if [ "${1:-}" = --with ] && [ $# -ge 2 ]; then
    with=$2
    shift 2
fi
case ${1:-} in
"")
    usage
    exit 1
    ;;
-h | --help)
    usage
    exit 0
    ;;
esac
task=$1
shift
provide programs "$here/programs.tar.xz" unpack_programs
programs=$folder
code=0
case $task in
list) list ;;
tests)
    provide_nccl
    run_tests "$@" || code=$?
    ;;
python)
    # Python with the packed wheel; `python tests [GPUS]` runs its tests on GPUs.
    if [ ! -d "$programs/python/devcomm" ]; then
        echo "error: the pack has no wheel: \`cargo xtask pack --wheel FILE\` adds it" >&2
        exit 1
    fi
    provide_nccl
    export PYTHONPATH="$programs/python${PYTHONPATH:+:$PYTHONPATH}"
    if [ "${1:-}" = tests ]; then
        export DEVCOMM_TEST_KERNELS="$programs/kernels"
        set -- -m torch.distributed.run --nproc-per-node "${2:-2}" -m pytest -x -p no:cacheprovider \
            "$programs/python/tests/test_gpus.py"
    fi
    python3 "$@" || code=$?
    ;;
*)
    case $task in
    bench) program="$programs/bench/devcomm-bench" ;;
    *) program="$programs/examples/$task" ;;
    esac
    if [ ! -f "$program" ]; then
        echo "error: there is no example '$task'; there are:" >&2
        list >&2
        exit 1
    fi
    provide_nccl
    case $task in
    # C++ programs are linked with NCCL, and do not load the GIN plugin themselves.
    cpp_*)
        export LD_LIBRARY_PATH="$DEVCOMM_NCCL_HOME/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
        provide_network
        ;;
    esac
    # $with is not quoted, so that it becomes several words.
    [ -n "$scratch" ] || exec $with "$program" "$@"
    $with "$program" "$@" || code=$?
    ;;
esac
printf %s "$scratch" | while IFS= read -r folder; do rm -rf "$folder"; done
exit "$code"
