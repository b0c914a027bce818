//! The seam of the typed layer's waits, used as that layer does.

use core::panic::Location;

use cuda_std::mem;
use cuda_std::prelude::*;
use devcomm_types::{WaitFor, WaitKind};

use super::WAITS;
use crate::{Error, LaunchConfig, Simulator, Waiting};

/// Waits until a word is not 0; says whether it is.
fn until_set(word: *const u32, index: u32, timed: bool) -> bool {
    loop {
        // SAFETY: the kernels below pass words of their buffers.
        let seen = unsafe { mem::load_volatile(word) };
        let what = WaitFor {
            kind: WaitKind::Poll,
            index,
            context: 0,
            peer: -1,
            wanted: 1,
            seen: seen.into(),
        };
        let deadline = timed.then_some(0);
        let over = seen != 0 || (WAITS.poll)(&what, deadline, Location::caller());
        if over {
            (WAITS.end)();
            return seen != 0;
        }
    }
}

/// Thread `i` waits for word `i`, and sets word `i + 1`.
#[kernel]
unsafe fn passes_on(words: *mut u32, starts: bool) {
    let i = thread::index_1d() as usize;
    // SAFETY: the buffer has a word a thread and one more.
    unsafe {
        if i > 0 || !starts {
            until_set(words.add(i), i as u32, false);
        }
        mem::store(words.add(i + 1), 1);
    }
}

fn simulator(seed: Option<u64>, watch: bool) -> Simulator {
    let builder = Simulator::builder().step_limit(100_000).watch(watch);
    seed.map_or(builder, |seed| builder.seed(seed)).build().unwrap()
}

#[test]
fn threads_that_wait_for_each_other_in_a_row_all_pass() {
    for watch in [true, false] {
        for seed in std::iter::once(None).chain((0..20).map(Some)) {
            let sim = simulator(seed, watch);
            let words = sim.buffer::<u32>(0, 129).unwrap();
            words.write(&[0; 129]).unwrap();
            // SAFETY: the buffer has a word a thread and one more.
            unsafe { sim.launch(passes_on, LaunchConfig::new(2, 64), |_| (&words, true)) }.unwrap();
            assert_eq!(words.read()[1..], [1; 128]);
        }
    }
}

#[test]
fn polls_in_vain_are_a_deadlock_after_a_few_looks_and_have_names() {
    for watch in [true, false] {
        let sim = simulator(None, watch);
        let words = sim.buffer::<u32>(0, 129).unwrap();
        words.write(&[0; 129]).unwrap();
        // SAFETY: as above; nobody starts, which is reported.
        let result =
            unsafe { sim.launch(passes_on, LaunchConfig::new(2, 64), |_| (&words, false)) };
        let Err(Error::Deadlock(stall)) = result else { panic!("{result:?}") };
        assert_eq!(stall.threads(), 128);
        assert!(stall.waiters.iter().all(|w| matches!(w.what, Waiting::For(_))));
        assert!(stall.waiters[0].at.unwrap().file().ends_with("tests.rs"));
    }
}

/// Thread 0 waits for a word with a timeout, then sets the other's; both note what their wait gave.
#[kernel]
unsafe fn times_out(words: *mut u32) {
    let i = thread::thread_idx_x() as usize;
    // SAFETY: the buffer has four words.
    unsafe {
        let set = until_set(words.add(i), i as u32, i == 0);
        if i == 0 {
            mem::store(words.add(1), 1);
        }
        mem::store(words.add(2 + i), 10 + u32::from(set));
    }
}

#[test]
fn a_poll_with_a_timeout_is_over_when_nothing_else_can_go_on() {
    for watch in [true, false] {
        for seed in std::iter::once(None).chain((0..20).map(Some)) {
            let sim = simulator(seed, watch);
            let words = sim.buffer::<u32>(0, 4).unwrap();
            words.write(&[0; 4]).unwrap();
            // SAFETY: the buffer has four words.
            unsafe { sim.launch(times_out, LaunchConfig::new(1, 2), |_| (&words,)) }.unwrap();
            assert_eq!(words.read(), [0, 1, 10, 11]);
        }
    }
}
