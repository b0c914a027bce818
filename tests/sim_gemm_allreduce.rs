//! The fused product and all-reduce, run by the simulator.

#[path = "../examples/gemm_allreduce/problem.rs"]
#[allow(dead_code, reason = "the example uses all of it")]
mod problem;
#[path = "../examples/gemm_allreduce/simulated.rs"]
mod simulated;

use devcomm::kernels::GemmForm;
use devcomm::sim::Simulator;
use problem::Problem;
use simulated::{check, products};

const FORMS: [GemmForm; 2] = [GemmForm::Wgmma, GemmForm::Mma];

fn problem(m: usize, n: usize, k: usize) -> Problem {
    Problem { m, n, k, seed: 3 }
}

/// Below a fragment, across tiles, ragged on all sides; pitches that are odd, even, and whole vectors.
const SHAPES: [(usize, usize, usize); 6] =
    [(1, 1, 8), (7, 64, 8), (64, 7, 64), (130, 33, 40), (17, 264, 72), (200, 130, 136)];

fn is_right_on(ranks: usize) {
    let sim = Simulator::new(ranks).unwrap();
    for form in FORMS {
        for (m, n, k) in SHAPES {
            check(&sim, form, problem(m, n, k), 3).unwrap();
        }
    }
}

#[test]
fn is_right_on_one_rank() {
    is_right_on(1);
}

#[test]
fn is_right_on_two_ranks() {
    is_right_on(2);
}

#[test]
fn is_right_on_three_ranks() {
    is_right_on(3);
}

#[test]
fn is_right_on_four_ranks() {
    is_right_on(4);
}

#[test]
fn is_right_whatever_the_order_in_which_threads_run() {
    for seed in 0..4 {
        let sim = Simulator::builder().ranks(3).seed(seed).build().unwrap();
        for form in FORMS {
            check(&sim, form, problem(140, 300, 24), 2).unwrap();
        }
    }
}

#[test]
fn is_right_when_threads_are_interrupted_anywhere() {
    let sim = Simulator::builder().ranks(2).seed(1).preempt(true).build().unwrap();
    for form in FORMS {
        check(&sim, form, problem(70, 20, 8), 1).unwrap();
    }
}

/// More stages than shared memory has, so that each is filled again while slower lanes may still read it.
#[test]
fn a_stage_is_not_filled_again_before_all_have_read_it() {
    for seed in 0..4 {
        let sim = Simulator::builder().ranks(1).seed(seed).build().unwrap();
        for form in FORMS {
            check(&sim, form, problem(70, 40, 328), 1).unwrap();
        }
    }
}

#[test]
fn one_block_is_enough_for_many_tiles() {
    let sim = Simulator::new(2).unwrap();
    for form in FORMS {
        check(&sim, form, problem(300, 520, 16), 1).unwrap();
    }
}

#[test]
fn launches_follow_each_other_without_a_reset() {
    let sim = Simulator::new(2).unwrap();
    let problem = problem(129, 40, 32);
    for form in FORMS {
        for (launch, ranks) in
            products(&sim, form, problem, 2, 4, false).unwrap().iter().enumerate()
        {
            for c in ranks {
                let wrong = problem.count_wrong(0..2, c, problem.all());
                assert_eq!(wrong, 0, "{form:?}, launch {launch}");
            }
        }
    }
}

#[test]
fn alone_each_rank_has_its_own_product() {
    let sim = Simulator::new(2).unwrap();
    for form in FORMS {
        for (m, n, k) in SHAPES {
            let problem = problem(m, n, k);
            let results = products(&sim, form, problem, 2, 1, true).unwrap();
            for (rank, c) in results[0].iter().enumerate() {
                let wrong = problem.count_wrong(rank..rank + 1, c, problem.all());
                assert_eq!(wrong, 0, "{form:?}, {problem:?}, rank {rank}");
            }
        }
    }
}
