//! Tests of the GPUs: several grids on several GPUs at once.

mod communicators;
mod schedules;

use std::cell::RefCell;
use std::rc::Rc;

use cuda_std::atomic::{Atomic, Order, Scope};
use cuda_std::prelude::*;

use super::*;
use crate::base::owner::Owner;
use crate::memory::{Allocation, GpuSet};
use crate::race::{MAX_BLOCKS, Races};

/// Returns one machine that runs in fixed order, and ten with seeds.
fn machines(gpus: usize, multiprocessors: u32) -> impl Iterator<Item = Rc<Gpus>> {
    let seeds = std::iter::once(None).chain((0..10).map(Some));
    seeds.map(move |seed| {
        let machine = Simulation::new(gpus).multiprocessors(multiprocessors).step_limit(1 << 20);
        let machine = Simulation { seed, time_limit: None, ..machine };
        Gpus::new(&machine, Rc::new(Memory::new(Races::default())))
    })
}

/// Zeroed 32-bit words that all GPUs can access.
struct Words(Allocation);

impl Words {
    fn new(gpus: &Gpus, len: usize) -> Self {
        let owner = Owner::Buffer { id: 0, rank: 0 };
        let memory = Allocation::single(&gpus.memory, GpuSet::all(), 4 * len, owner).unwrap();
        memory.zero(0);
        Self(memory)
    }

    fn word(&self, i: usize) -> Word {
        Word(self.0.part(0).cast::<u32>().wrapping_add(i))
    }

    fn read(&self) -> Vec<u32> {
        words(&self.0, 0)
    }
}

/// Returns the words of one rank's part of an allocation.
fn words(memory: &Allocation, part: usize) -> Vec<u32> {
    let word = |i| memory.part(part).cast::<u32>().wrapping_add(i);
    // SAFETY: the words are within the part, and no kernel runs now.
    (0..memory.lens()[part] / 4).map(|i| unsafe { word(i).read() }).collect()
}

#[derive(Clone, Copy)]
struct Word(*mut u32);

impl Word {
    fn atomic(&self) -> &Atomic<u32> {
        // SAFETY: the test makes words only of memory that outlives the grid.
        unsafe { Atomic::from_ptr(self.0) }
    }

    fn set(self, value: u32) {
        self.atomic().store(value, Order::Release, Scope::Sys);
    }

    fn add(self) -> u32 {
        self.atomic().fetch_add(1, Order::AcqRel, Scope::Sys)
    }

    /// Polls until the word is at least `least`.
    fn wait(self, least: u32) {
        while self.atomic().load(Order::Acquire, Scope::Sys) < least {}
    }
}

fn grid(gpu: usize, blocks: u32, threads: u32, body: impl Fn() + 'static) -> Launch {
    Launch {
        kernel: "test",
        package: "tests",
        gpu,
        grid: [blocks, 1, 1],
        block: [threads, 1, 1],
        max_threads: 1024,
        cluster: 1,
        previous: None,
        dynamic_shared: 0,
        cooperative: false,
        arguments: Rc::default(),
        body: Rc::new(body),
    }
}

/// Runs until no progress is possible.
fn run_until_idle(gpus: &Gpus) -> Step {
    loop {
        match gpus.step() {
            Step::Progress => {}
            step => return step,
        }
    }
}

#[track_caller]
fn finish(gpus: &Gpus) {
    let step = run_until_idle(gpus);
    assert!(matches!(step, Step::Idle), "{step:?}");
}

#[test]
fn two_grids_of_one_gpu_that_signal_each_other_overlap_where_both_fit() {
    for gpus in machines(1, 2) {
        let words = Words::new(&gpus, 2);
        let (a, b) = (words.word(0), words.word(1));
        let one = move || {
            a.add();
            b.wait(1024);
        };
        let other = move || {
            a.wait(2048);
            b.add();
        };
        let first = gpus.launch(grid(0, 2, 1024, one)).unwrap();
        let second = gpus.launch(grid(0, 1, 1024, other)).unwrap();
        finish(&gpus);
        assert!(gpus.is_done(first) && gpus.is_done(second));
        assert_eq!(words.read(), [2048, 1024]);
    }
}

#[test]
fn two_grids_that_do_not_fit_together_get_no_further() {
    for gpus in machines(1, 1) {
        let words = Words::new(&gpus, 1);
        let word = words.word(0);
        let first = gpus.launch(grid(0, 2, 1024, move || word.wait(1))).unwrap();
        let second = gpus.launch(grid(0, 1, 32, move || word.set(1))).unwrap();
        let step = run_until_idle(&gpus);
        assert!(matches!(step, Step::Spinning), "{step:?}");
        assert!(!gpus.is_done(first) && !gpus.is_done(second));
        let stall = gpus.stall();
        assert_eq!((stall.threads(), &stall.pending[..]), (2048, &[1][..]));
        // The host writes the word that the first grid waits for.
        // SAFETY: a word of the buffer, and no kernel runs now.
        unsafe { word.0.write(1) };
        gpus.progress();
        finish(&gpus);
        assert!(gpus.is_done(first) && gpus.is_done(second));
    }
}

#[test]
fn one_gpu_is_in_its_second_grid_while_another_is_in_its_first() {
    for gpus in machines(2, 1) {
        let words = Words::new(&gpus, 2);
        let (a, b) = (words.word(0), words.word(1));
        let slow = gpus.launch(grid(1, 4, 64, move || a.wait(2))).unwrap();
        for i in 1..=2 {
            let next = gpus.launch(grid(0, 1, 1, move || a.set(i))).unwrap();
            while !gpus.is_done(next) {
                assert!(matches!(gpus.step(), Step::Progress));
            }
            assert!(i == 2 || !gpus.is_done(slow));
        }
        gpus.launch(grid(0, 1, 1, move || b.set(1))).unwrap();
        finish(&gpus);
        assert_eq!(words.read(), [2, 1]);
    }
}

#[test]
fn a_cooperative_grid_or_a_cluster_waits_until_all_of_it_fits() {
    for (i, gpus) in machines(1, 2).enumerate() {
        let words = Words::new(&gpus, 2);
        let (start, arrived) = (words.word(0), words.word(1));
        gpus.launch(grid(0, 1, 1024, move || start.wait(1))).unwrap();
        let together = move || {
            arrived.add();
            arrived.wait(4 * 1024);
        };
        let (cooperative, cluster) = [(true, 1), (false, 4)][i % 2];
        let whole = Launch { cooperative, cluster, ..grid(0, 4, 1024, together) };
        gpus.launch(whole).unwrap();
        assert!(matches!(run_until_idle(&gpus), Step::Spinning));
        let stall = gpus.stall();
        assert_eq!((stall.threads(), &stall.pending[..]), (1024, &[4][..]));
        // SAFETY: a word of the buffer, and no kernel runs now.
        unsafe { start.0.write(1) };
        gpus.progress();
        finish(&gpus);
        assert_eq!(words.read()[1], 4 * 1024);
    }
    let gpus = machines(1, 2).next().unwrap();
    let too_large = Launch { cooperative: true, ..grid(0, 5, 1024, || {}) };
    let error = gpus.launch(too_large).unwrap_err().to_string();
    assert!(error.contains("at most 4 of them are resident on a GPU"), "{error}");
}

#[test]
fn shared_memory_limits_how_many_blocks_are_on_a_multiprocessor() {
    let gpus = machines(1, 1).next().unwrap();
    let half = Launch { dynamic_shared: 100 << 10, ..grid(0, 3, 32, thread::sync_threads) };
    assert_eq!(gpus.resident(0, 32, half.dynamic_shared), 2);
    let words = Words::new(&gpus, 1);
    let start = words.word(0);
    gpus.launch(Launch { body: Rc::new(move || start.wait(1)), ..half }).unwrap();
    assert!(matches!(run_until_idle(&gpus), Step::Spinning));
    assert_eq!((gpus.stall().threads(), &gpus.stall().pending[..]), (64, &[1][..]));
    gpus.reset();
    finish(&gpus);
}

#[test]
fn grids_and_blocks_have_three_dimensions() {
    for gpus in machines(1, 132) {
        let seen = Rc::new(RefCell::new(Vec::new()));
        let note = Rc::clone(&seen);
        let body = move || {
            let (t, b) = (thread::thread_idx(), thread::block_idx());
            // Lanes are also counted x first.
            // SAFETY: all lanes of a warp call it.
            let lane = unsafe { warp::shuffle_idx(thread::index_in_block(), 0) } % 32;
            note.borrow_mut().push(([b.x, b.y, b.z], [t.x, t.y, t.z], lane));
        };
        let launch = Launch { grid: [2, 3, 2], block: [4, 2, 8], ..grid(0, 1, 1, body) };
        gpus.launch(launch).unwrap();
        finish(&gpus);
        let mut seen = seen.take();
        assert_eq!(seen.len(), 12 * 64);
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 12 * 64);
        assert_eq!(seen.last(), Some(&([1, 2, 1], [3, 1, 7], 0)));
    }
}

#[test]
fn what_no_gpu_takes_is_refused() {
    let gpus = machines(2, 132).next().unwrap();
    let valid = || grid(0, 1, 1, || {});
    for (launch, why) in [
        (Launch { gpu: 2, ..valid() }, "there is no GPU 2"),
        (Launch { grid: [1, 0, 1], ..valid() }, "a grid without blocks"),
        (Launch { grid: [1, 1 << 16, 1], ..valid() }, "at most [2147483647, 65535, 65535] are"),
        (Launch { block: [32, 32, 2], ..valid() }, "blocks of 2048 threads"),
        (Launch { block: [1, 1, 65], ..valid() }, "at most [1024, 1024, 64] are"),
        (Launch { dynamic_shared: 228 << 10, ..valid() }, "dynamic shared memory"),
        (Launch { cluster: 2, ..grid(0, 3, 1, || {}) }, "3 blocks in x"),
    ] {
        let error = gpus.launch(launch).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    finish(&gpus);
}

#[test]
fn memory_may_be_of_any_gpus() {
    let memory = Memory::new(Races::default());
    let owner = Owner::Buffer { id: 0, rank: 0 };
    let at = |address: usize| std::ptr::without_provenance_mut(address);
    memory.insert(at(4096), 64, [5, 0, 3, 4].into_iter().collect(), owner);
    memory.insert(at(8192), 64, GpuSet::all(), owner);
    // The second lookup finds the result of the first one in the cache.
    for _ in 0..2 {
        let may = |address| (0..8).filter(|gpu| memory.contains(*gpu, address, 64)).collect();
        let (some, all): (Vec<u32>, Vec<u32>) = (may(4096), may(8192));
        assert_eq!((&some[..], all.len()), (&[0, 3, 4, 5][..], 8));
    }
    assert!(!memory.contains(0, 4096, 65) && memory.is_live(4096, 64));
    memory.remove(4096);
    assert!(!memory.contains(0, 4096, 1) && !memory.is_live(4096, 1));
}

#[test]
fn a_failure_ends_all_grids_and_the_next_ones_run() {
    for gpus in machines(2, 132) {
        let words = Words::new(&gpus, 2);
        let (never, ran) = (words.word(0), words.word(1));
        let waits = gpus.launch(grid(1, 2, 64, move || never.wait(1))).unwrap();
        let wrong = Launch { kernel: "wrong", ..grid(0, 1, 1, || panic!("on purpose")) };
        gpus.launch(wrong).unwrap();
        let step = run_until_idle(&gpus);
        let Step::Failed(Error::Panic { kernel: "wrong", .. }) = step else { panic!("{step:?}") };
        assert!(gpus.is_done(waits));
        gpus.launch(grid(1, 2, 64, move || ran.set(1))).unwrap();
        finish(&gpus);
        assert_eq!(words.read(), [0, 1]);
    }
}

#[test]
fn a_report_of_several_kernels_says_which_thread_is_of_which() {
    let gpus = machines(4, 132).next().unwrap();
    let stuck = || {
        if thread::thread_idx_x() == 0 {
            // SAFETY: the divergence is intended; the simulator detects it.
            unsafe { warp::sync() };
        } else {
            thread::sync_threads();
        }
    };
    let of_two = move || {
        let _ = Thread::current().block().grid.communicator.set([3, 2].into());
        stuck();
    };
    gpus.launch(Launch { kernel: "one", ..grid(2, 1, 2, of_two) }).unwrap();
    gpus.launch(Launch { kernel: "other", ..grid(3, 1, 2, stuck) }).unwrap();
    assert!(matches!(run_until_idle(&gpus), Step::Stuck));
    let text = Error::Deadlock(gpus.stall()).to_string();
    assert!(text.starts_with("deadlock"), "{text}");
    assert!(text.contains("\n  rank 2 (rank 1 of its communicator) block 0 of one: 1 thread"));
    assert!(text.contains("\n  rank 3 block 0 of other: 1 thread waits for sync_threads, at "));
}

#[test]
fn a_choice_is_the_first_or_a_function_of_the_seed() {
    let choices = |gpus: Rc<Gpus>| [0; 100].map(|_| gpus.choose(5));
    let (once, again) = (machines(1, 1).map(choices), machines(1, 1).map(choices));
    let (once, again): (Vec<_>, Vec<_>) = (once.collect(), again.collect());
    assert_eq!(once, again);
    assert_eq!(once[0], [0; 100]);
    assert!(once[1..].iter().all(|choices| (0..5).all(|choice| choices.contains(&choice))));
}

#[test]
fn a_grid_after_another_takes_over_its_warps() {
    let gpus = machines(1, 132).next().unwrap();
    let mut kept = 0;
    for i in 0..3 {
        gpus.launch(grid(0, 8, 256, thread::sync_threads)).unwrap();
        finish(&gpus);
        let warps = gpus.scheduler.borrow().idle_warps();
        assert!(i == 0 || warps == kept, "{warps} warps, {kept} before");
        kept = warps;
    }
    assert_eq!(kept, 64);
}

#[test]
fn more_blocks_than_the_detection_of_races_can_tell_apart_are_refused() {
    for (races, refused) in [(true, true), (false, false)] {
        let memory = Rc::new(Memory::new(Races::new(races, false, 0)));
        let gpus = Gpus::new(&Simulation::new(1).races(races), memory);
        let checked = gpus.check(&grid(0, MAX_BLOCKS + 1, 1, || {}));
        assert_eq!(matches!(checked, Err(Error::Launch { .. })), refused);
        assert!(gpus.check(&grid(0, MAX_BLOCKS, 1, || {})).is_ok());
    }
}
