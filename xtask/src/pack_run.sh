#!/bin/sh
# Runs what `cargo xtask pack` put beside this script, with the NCCL that was packed with it.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)

usage() {
    echo "usage: ./run.sh list | tests [PROGRAM...] [FILTER...] | bench BENCHMARK [ARGS...] | EXAMPLE [ARGS...]"
}

list() {
    for program in "$here"/examples/*; do
        [ ! -f "$program" ] || basename "$program"
    done
    [ ! -d "$here/tests" ] || echo tests
    [ ! -d "$here/bench" ] || echo bench
}

unpack() {
    if command -v xz >/dev/null 2>&1; then
        xz -dc
    elif command -v python3 >/dev/null 2>&1; then
        python3 -c 'import lzma, shutil, sys
shutil.copyfileobj(lzma.open(sys.stdin.buffer), sys.stdout.buffer)'
    else
        echo "error: unpacking NCCL needs xz or python3" >&2
        return 1
    fi
}

# Names the packed NCCL in DEVCOMM_NCCL_HOME, unpacked into the user's cache once. Where nothing can be kept, $scratch
# names a folder to be removed at the end.
scratch=
provide_nccl() {
    [ -z "${DEVCOMM_NCCL_HOME:-}" ] || return 0
    export DEVCOMM_NCCL_HOME="$here/nccl"
    packed="$here/nccl/lib/libnccl.so.2.xz"
    [ -f "$packed" ] || return 0

    cache="${DEVCOMM_CACHE:-${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}/devcomm}/packed"
    DEVCOMM_NCCL_HOME="$cache/nccl-$(cksum <"$packed" | tr ' ' '-')"
    [ ! -d "$DEVCOMM_NCCL_HOME" ] || return 0
    if ! mkdir -p "$cache" 2>/dev/null || ! partial=$(mktemp -d "$cache/.partial-XXXXXX" 2>/dev/null); then
        partial=$(mktemp -d)
        scratch=$partial
    fi
    echo "unpacking NCCL ..." >&2
    mkdir "$partial/lib"
    if ! unpack <"$packed" >"$partial/lib/libnccl.so.2"; then
        rm -rf "$partial"
        echo "error: $packed does not unpack into $partial" >&2
        exit 1
    fi
    cp -R "$here/nccl/include" "$partial/include"
    if [ -n "$scratch" ]; then
        DEVCOMM_NCCL_HOME=$scratch
    else
        # Renamed when whole; another process may have been first.
        mv -T "$partial" "$DEVCOMM_NCCL_HOME" 2>/dev/null || rm -rf "$partial"
    fi
}

# Gives kernels a network (GIN) where there is no RDMA card and no other plugin is named.
provide_network() {
    [ -z "${NCCL_RMA_PLUGIN:-}" ] && [ -z "$(ls /sys/class/infiniband 2>/dev/null)" ] || return 0
    . "$here/lib/network.sh"
}

run_tests() {
    if [ ! -d "$here/tests" ]; then
        echo "error: no tests were packed" >&2
        return 1
    fi
    provide_network
    # A program's name chooses that program; anything else is a filter for the tests in it.
    chosen=
    for word in "$@"; do
        shift
        if [ -f "$here/tests/$word" ]; then chosen="$chosen $word"; else set -- "$@" "$word"; fi
    done
    log=$(mktemp)
    for program in "$here"/tests/*; do
        name=$(basename "$program")
        case "$chosen " in
        " " | *" $name "*) ;;
        *) continue ;;
        esac
        echo "== $name =="
        # Each test takes all GPUs, so one at a time; uncaptured, because of the lines that say what ran.
        { "$program" --nocapture --test-threads=1 "$@" 2>&1 || echo "PROGRAM $name failed with code $?"; } | tee -a "$log"
    done
    code=0
    awk '
        # A test of several parts reports each, as "name part": it ran if one of them did.
        /GPU-TEST [^:]*: / {
            name = $0
            sub(/.*GPU-TEST /, "", name)
            sub(/[ :].*/, "", name)
            if (!(name in tests)) tests[name] = 0
        }
        /GPU-TEST [^:]*: ran/ { tests[name] = 1 }
        /GPU-TEST [^:]*: skipped/ {
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
            # A program that died has reported no failing test.
            if (broken && !failed) failed = broken
            printf "\nGPU: %d run, %d skipped%s\n", ran, skipped, reasons == "" ? "" : " (" reasons ")"
            printf "%d passed, %d failed, %d skipped\n", passed - skipped, failed, skipped
            exit failed > 0
        }' "$log" || code=$?
    rm -f "$log"
    return "$code"
}

if [ $# -eq 0 ]; then
    usage
    exit 1
fi
task=$1
shift
code=0
case $task in
list) list ;;
-h | --help) usage ;;
tests)
    provide_nccl
    run_tests "$@" || code=$?
    ;;
*)
    case $task in
    bench) program="$here/bench/devcomm-bench" ;;
    *) program="$here/examples/$task" ;;
    esac
    if [ ! -f "$program" ]; then
        echo "error: there is no example '$task'; there are:" >&2
        list >&2
        exit 1
    fi
    provide_nccl
    # For the programs that are linked with NCCL.
    export LD_LIBRARY_PATH="$DEVCOMM_NCCL_HOME/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    [ -n "$scratch" ] || exec "$program" "$@"
    "$program" "$@" || code=$?
    ;;
esac
[ -z "$scratch" ] || rm -rf "$scratch"
exit "$code"
