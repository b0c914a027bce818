//! Tests of schedules: what each of them finds, and that it ends.

use std::collections::BTreeSet;

use cuda_std::mem;

use super::*;
use crate::base::schedule::{Choice, Lag};

impl Word {
    fn load(self) -> u32 {
        // SAFETY: the word outlives the grid; races are what these tests are for.
        unsafe { mem::load(self.0) }
    }

    fn store(self, value: u32) {
        // SAFETY: the word is one of the test's, which outlives the run.
        unsafe { mem::store(self.0, value) }
    }
}

/// Returns a machine without detection of races: each access is a step.
fn machine(simulation: Simulation) -> Rc<Gpus> {
    let simulation = simulation.races(false).step_limit(1 << 20).checked().unwrap();
    Gpus::new(&simulation, Rc::new(Memory::new(Races::default())))
}

/// Calls `run` once for each sequence of choices, and returns the results.
fn explore<T>(simulation: &Simulation, run: impl Fn(&Gpus) -> T) -> Vec<T> {
    let (mut choices, mut results) = (Vec::new(), Vec::new());
    loop {
        let gpus = machine(simulation.clone().choices(&choices));
        results.push(run(&gpus));
        let made = gpus.activity().choices;
        let next = made.iter().rposition(|Choice { taken, of }| taken + 1 < *of);
        let Some(next) = next else { return results };
        choices = made[..next].iter().map(|choice| choice.taken).collect();
        choices.push(made[next].taken + 1);
    }
}

/// Adds 1 to a word by a load and a store, in each of `blocks` blocks; returns the sum.
fn lost_update(gpus: &Gpus, blocks: u32) -> u32 {
    let words = Words::new(gpus, 1);
    let word = words.word(0);
    gpus.launch(grid(0, blocks, 1, move || word.store(word.load() + 1))).unwrap();
    finish(gpus);
    words.read()[0]
}

#[test]
fn all_interleavings_of_two_threads_run_once_each() {
    // Each of two threads has two steps, so there are 4 choose 2 orders.
    let sums = explore(&Simulation::new(1), |gpus| lost_update(gpus, 2));
    assert_eq!(sums.len(), 6);
    assert_eq!(sums.iter().filter(|sum| **sum == 2).count(), 2);
    // With three threads there are 6! / (2! 2! 2!) orders.
    let sums = explore(&Simulation::new(1), |gpus| lost_update(gpus, 3));
    assert_eq!((sums.len(), BTreeSet::from_iter(sums)), (90, [1, 2, 3].into()));
}

#[test]
fn a_limit_of_preemptions_leaves_the_orders_with_fewer_ones() {
    let sums = |limit| explore(&Simulation::new(1).preemptions(limit), |gpus| lost_update(gpus, 2));
    assert_eq!(sums(0), [2, 2]);
    // Each thread may also be preempted by the other one after its load.
    assert_eq!(BTreeSet::from_iter(sums(1)), [1, 2].into());
    assert_eq!((sums(1).len(), sums(2).len()), (4, 6));
}

/// Runs a thread that stores a value and then a flag, or the flag first, and a thread that waits
/// for the flag. Returns the value that the second thread sees.
fn message(gpus: &Gpus, flag_first: bool) -> u32 {
    let words = Words::new(gpus, 3);
    let (value, flag, seen) = (words.word(0), words.word(1), words.word(2));
    let body = move || {
        if thread::block_idx_x() == 1 {
            flag.wait(1);
            seen.store(value.load());
        } else if flag_first {
            flag.set(1);
            value.store(7);
        } else {
            value.store(7);
            flag.set(1);
        }
    };
    gpus.launch(grid(0, 2, 1, body)).unwrap();
    finish(gpus);
    words.read()[2]
}

#[test]
fn a_search_of_a_protocol_that_polls_ends_and_finds_the_wrong_order() {
    let explored = |flag_first| explore(&Simulation::new(1), |gpus| message(gpus, flag_first));
    let (right, wrong) = (explored(false), explored(true));
    assert!(right.iter().all(|seen| *seen == 7));
    assert_eq!(BTreeSet::from_iter(wrong), [0, 7].into());
}

#[test]
fn choices_of_another_program_are_refused() {
    let gpus = machine(Simulation::new(1).choices(&[0, 9]));
    let words = Words::new(&gpus, 1);
    let word = words.word(0);
    gpus.launch(grid(0, 2, 1, move || word.store(word.load() + 1))).unwrap();
    let Step::Failed(error) = run_until_idle(&gpus) else { panic!("it ran") };
    let text = error.to_string();
    assert!(text.contains("choice 1 is 9, but there are only 2 alternatives"), "{text}");
}

/// Runs a program in which block 0 loads a value twice, after many other steps, and block 1 changes
/// it at once. Returns whether block 0 saw two values: for that it must run far ahead, and then be
/// preempted between its two loads.
fn depth_2(gpus: &Gpus) -> bool {
    let words = Words::new(gpus, 3);
    let (other, value, found) = (words.word(0), words.word(1), words.word(2));
    let body = move || {
        if thread::block_idx_x() == 1 {
            return value.store(1);
        }
        (0..100).for_each(|i| other.store(i));
        let before = value.load();
        (0..20).for_each(|i| other.store(i));
        found.store(u32::from(value.load() != before));
    };
    gpus.launch(grid(0, 2, 1, body)).unwrap();
    finish(gpus);
    words.read()[2] == 1
}

#[test]
fn pct_finds_an_error_of_depth_2_within_few_runs() {
    let runs = |n: u64, simulation: &dyn Fn(u64) -> Simulation| {
        (0..n).position(|seed| depth_2(&machine(simulation(seed))))
    };
    let found = runs(40, &|seed| Simulation::new(1).seed(seed).pct(2).pct_steps(125));
    assert!(found.is_some());
    // Priorities that do not change, and fair orders, do not find it.
    assert_eq!(runs(40, &|seed| Simulation::new(1).seed(seed).pct(1)), None);
    assert_eq!(runs(40, &|seed| Simulation::new(1).seed(seed).preempt(true)), None);
}

#[test]
fn threads_that_poll_do_not_starve_the_others() {
    // The threads poll by atomic loads, by a lock that they take and release, and by plain loads.
    let lock = |lock: Word, ready: Word| loop {
        if lock.atomic().swap(1, Order::AcqRel, Scope::Sys) == 0 {
            let is_ready = ready.load() == 1;
            lock.set(0);
            if is_ready {
                break;
            }
        }
    };
    for seed in 0..4 {
        for simulation in [
            Simulation::new(1).seed(seed).pct(3),
            Simulation::new(1).seed(seed).lag(Lag::ALL[seed as usize % 4]),
            Simulation::new(1).choices(&[]),
        ] {
            let gpus = machine(simulation);
            let words = Words::new(&gpus, 3);
            let (flag, taken, ready) = (words.word(0), words.word(1), words.word(2));
            let body = move || match thread::block_idx_x() {
                0 => flag.wait(1),
                1 => while flag.load() == 0 {},
                2 => lock(taken, ready),
                _ => {
                    flag.set(1);
                    ready.store(1);
                }
            };
            gpus.launch(grid(0, 4, 4, body)).unwrap();
            finish(&gpus);
        }
    }
}

#[test]
fn threads_that_wait_for_each_other_are_found_with_every_schedule() {
    let schedules = [
        Simulation::new(1).seed(3).pct(3),
        Simulation::new(1).choices(&[]),
        Simulation::new(1).seed(1).lag(Lag::Thread),
        Simulation::new(1).seed(1).lag(Lag::Rank),
    ];
    for simulation in schedules {
        let gpus = machine(simulation.clone());
        let half = || {
            if thread::thread_idx_x() < 40 {
                thread::sync_threads();
            } else {
                // SAFETY: the divergence is intended; the simulator detects it.
                unsafe { warp::sync() };
            }
        };
        gpus.launch(grid(0, 1, 64, half)).unwrap();
        let step = run_until_idle(&gpus);
        assert!(matches!(step, Step::Stuck), "{simulation}: {step:?}");
        let text = Error::Deadlock(gpus.stall()).to_string();
        assert!(text.contains("40 threads wait for sync_threads, at "), "{simulation}: {text}");
        assert!(text.contains("24 threads wait for the lanes"), "{simulation}: {text}");
        // A value that no thread stores.
        let gpus = machine(simulation.clone());
        let never = Words::new(&gpus, 1);
        let word = never.word(0);
        gpus.launch(grid(0, 2, 32, move || word.wait(1))).unwrap();
        let end = loop {
            match gpus.step() {
                Step::Progress | Step::Spinning => {}
                end => break end,
            }
        };
        let Step::Failed(error) = end else { panic!("{simulation}: {end:?}") };
        let text = error.to_string();
        assert!(text.contains("32 threads wait for a value that it polls"), "{simulation}: {text}");
    }
}

#[test]
fn a_late_thread_runs_when_nothing_else_can() {
    for seed in 0..20 {
        for lag in Lag::ALL {
            let gpus = machine(Simulation::new(2).seed(seed).lag(lag));
            let order = Rc::new(RefCell::new(Vec::new()));
            for gpu in 0..2 {
                let order = Rc::clone(&order);
                let body = move || {
                    for _ in 0..3 {
                        thread::sync_threads();
                    }
                    let (block, tid) = (thread::block_idx_x(), thread::thread_idx_x());
                    order.borrow_mut().push((gpu, block, tid));
                };
                gpus.launch(grid(gpu, 3, 64, body)).unwrap();
            }
            finish(&gpus);
            let order = order.borrow();
            let (gpu, block, tid) = order[order.len() - 1];
            let is_late = |other: &(usize, u32, u32)| match lag {
                Lag::Rank => other.0 == gpu,
                Lag::Block => (other.0, other.1) == (gpu, block),
                Lag::Warp => (other.0, other.1, other.2 / 32) == (gpu, block, tid / 32),
                Lag::Thread => *other == (gpu, block, tid),
            };
            let late = order.iter().filter(|thread| is_late(thread)).count();
            let last = order.iter().rev().take_while(|thread| is_late(thread)).count();
            assert_eq!((late, order.len()), (last, 384), "{lag}, seed {seed}");
        }
    }
}
