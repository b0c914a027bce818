//! Kernels whose waits an abort ends, in the simulator: all threads leave, and say what they waited for.

use devcomm::{WaitFor, WaitKind};
use devcomm_device_tests::kernels::RAISES;
use devcomm_device_tests::{Machine, Setup, Simulated, TestKernel, kernels};

const THREADS: usize = 64;

/// Runs a stuck kernel whose flag is raised while it runs, and one whose flag is raised before, and checks what each leaves: no thread passes
/// the wait, and `right` holds for all that blocks 0 and 1 have noted in each rank but the last; `warps` of them note something.
fn is_ended<K: TestKernel>(
    kernel: K,
    n: u32,
    setup: &Setup,
    warps: usize,
    right: impl Fn(u32, u32, &WaitFor, &Simulated) -> bool,
) {
    for seed in 0..24 {
        let machine = if seed % 8 == 7 {
            Simulated::preempting(3, 3, seed)
        } else {
            let (ranks, team) = [(2, 2), (3, 3), (4, 4)][seed as usize % 3];
            Simulated::teams(ranks, team, seed)
        };
        for before in [false, true] {
            let ended = machine.run_to_its_end(kernel, setup, n | RAISES, before);
            let ranks = machine.ranks() - 1;
            for (rank, (out, records)) in ended.out.iter().zip(&ended.records).enumerate() {
                if rank == ranks {
                    assert!(records.is_empty(), "{records:?}");
                    continue;
                }
                assert!(out[..2 * THREADS].iter().all(|&step| step == 2), "rank {rank}: {out:?}");
                assert_eq!(records.len(), warps, "rank {rank}: {records:?}");
                for (block, thread, wait) in records {
                    assert!(right(*block, *thread, wait, &machine), "{block} {thread} {wait:?}");
                }
            }
        }
    }
}

fn setup() -> Setup {
    Setup { lsa_barriers: 6, ..Setup::new(3, THREADS as u32) }
}

fn with_gin() -> Setup {
    let setup = Setup::with_gin(3, THREADS as u32);
    Setup { world_barriers: 3, hybrid_barriers: 3, va: true, ..setup }
}

/// The last rank, which never comes.
fn absent(machine: &Simulated) -> i32 {
    machine.ranks() as i32 - 1
}

#[test]
fn at_a_barrier_of_blocks() {
    is_ended(kernels::stuck_lsa, 0, &setup(), 2, |block, _, wait, _| {
        wait.kind == WaitKind::LsaBarrier && wait.index == block
    });
}

#[test]
fn at_a_barrier_of_blocks_names_the_rank_that_did_not_come() {
    for seed in 0..20 {
        let machine = Simulated::new(4, seed);
        let ended = machine.run_to_its_end(kernels::stuck_lsa, &setup(), RAISES, false);
        // Who of the block notes last may be one that waits for a rank that has left by then.
        let peers = ended.records.iter().flatten().map(|(.., wait)| wait.peer);
        assert!(peers.clone().all(|peer| (0..4).contains(&peer)));
        assert!(peers.into_iter().any(|peer| peer == 3), "{:?}", ended.records);
    }
}

#[test]
fn at_barriers_of_warps() {
    is_ended(kernels::stuck_lsa, 1, &setup(), 4, |block, thread, wait, _| {
        wait.kind == WaitKind::LsaBarrier && wait.index == 2 * block + thread / 32
    });
}

#[test]
fn in_the_middle_of_a_loop() {
    let machine = Simulated::new(3, 5);
    let ended = machine.run_to_its_end(kernels::stuck_in_a_loop, &setup(), RAISES, false);
    for rank in 0..2 {
        assert!(ended.out[rank][..2 * THREADS].iter().all(|&step| step == 2));
        assert!(!ended.records[rank].is_empty());
    }
}

#[test]
fn in_ll_all_to_all() {
    let setup = Setup { ll: (3, 1, 8), ..setup() };
    is_ended(kernels::stuck_lsa, 2, &setup, 4, |_, _, wait, _| {
        wait.kind == WaitKind::LlA2a && wait.index == 0 && wait.wanted == 2
    });
}

#[test]
fn in_a_poll_of_the_kernel() {
    is_ended(kernels::stuck_lsa, 3, &setup(), 2, |_, thread, wait, _| {
        wait.kind == WaitKind::Poll && thread == 0
    });
}

#[test]
fn for_signals_and_counters() {
    let kinds = [(WaitKind::Signal, 3), (WaitKind::VaSignal, 4), (WaitKind::Counter, 5)];
    for (n, (kind, wanted)) in kinds.into_iter().enumerate() {
        is_ended(kernels::stuck_gin, n as u32, &with_gin(), 2, |_, thread, wait, _| {
            (wait.kind, wait.wanted, wait.seen, thread) == (kind, wanted, 0, 0)
        });
    }
}

#[test]
fn for_a_shadow() {
    is_ended(kernels::stuck_gin, 3, &with_gin(), 2, |_, thread, wait, _| {
        wait.kind == WaitKind::Signal && thread == 0
    });
}

#[test]
fn at_a_barrier_over_the_network() {
    is_ended(kernels::stuck_gin, 4, &with_gin(), 2, |block, _, wait, machine| {
        wait.kind == WaitKind::GinBarrier
            && wait.index == block
            && wait.peer <= absent(machine)
            && wait.wanted == 1
    });
}

#[test]
fn at_a_hybrid_barrier() {
    for n in [5, 6] {
        is_ended(kernels::stuck_gin, n, &with_gin(), 2, |block, _, wait, _| match wait.kind {
            WaitKind::GinBarrier | WaitKind::LsaBarrier => wait.index == block,
            // A rank that all others have met, and that flushes for the fence.
            kind => n == 6 && kind == WaitKind::Request,
        });
    }
}
