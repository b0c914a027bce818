//! The kernels for GIN, run by the simulator: what the examples check, in many orders of threads and deliveries.
#![allow(clippy::duplicate_mod, reason = "each example includes what they share")]

#[allow(dead_code, reason = "a program of its own")]
#[path = "../examples/gin_alltoall.rs"]
mod gin_alltoall;
#[allow(dead_code, reason = "a program of its own")]
#[path = "../examples/gin_put_signal.rs"]
mod gin_put_signal;
#[allow(dead_code, reason = "a program of its own")]
#[path = "../examples/hybrid_allreduce.rs"]
mod hybrid_allreduce;
#[allow(dead_code, reason = "a program of its own")]
#[path = "../examples/hybrid_alltoall.rs"]
mod hybrid_alltoall;

/// Ranks, and how many of them reach each other by load and store.
const WORLDS: [(usize, usize); 9] =
    [(1, 1), (2, 2), (2, 1), (3, 3), (3, 1), (4, 2), (4, 4), (6, 3), (6, 2)];

/// Runs an example's simulation in every world, each with sizes and orders of its own, and once with switches at any access.
macro_rules! in_every_world {
    ($example:ident, $iterations:expr) => {
        for (i, (ranks, team)) in WORLDS.into_iter().enumerate() {
            for preempt in [false, true] {
                if preempt && ranks > 3 {
                    continue; // Slow.
                }
                let iterations = if preempt { 2 } else { $iterations };
                let seed = 1000 * i as u64;
                let options =
                    $example::gin::Options { sim: None, team: None, iterations, seed, preempt };
                $example::simulate(ranks, team, &options).unwrap();
            }
        }
    };
}

#[test]
fn every_throw_of_a_ping_pong_arrives() {
    in_every_world!(gin_put_signal, 30);
}

#[test]
fn every_message_of_an_all_to_all_arrives() {
    in_every_world!(gin_alltoall, 30);
}

#[test]
fn every_message_of_a_hybrid_all_to_all_arrives() {
    in_every_world!(hybrid_alltoall, 30);
}

#[test]
fn a_hybrid_all_reduce_sums_over_all_teams() {
    in_every_world!(hybrid_allreduce, 30);
}
