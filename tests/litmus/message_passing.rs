//! Message passing: a thread writes a message and then a flag, another one reads the flag and, if
//! it is set, the message. The right forms never miss the message. Without one part of them, an
//! atomic message is missed in some order, and one that is not atomic is a race.

use cuda_std::atomic::{AtomicU32, Order, Scope, fence};
use cuda_std::prelude::*;
use devcomm::Simulation;

use crate::{Args, all_but, outcomes, report};

/// How a form writes and reads the flag.
#[derive(Clone, Copy)]
struct Form {
    store: Order,
    load: Order,
    scope: Scope,
    /// The scopes of a fence before the store, and of one after the load.
    fences: [Option<Scope>; 2],
}

/// The first three are right; each of the others lacks one thing.
const FORMS: [Form; 10] = {
    use Order::{Acquire, Relaxed, Release};
    use Scope::{Cta, Gpu, Sys};
    let relaxed = Form { store: Relaxed, load: Relaxed, scope: Gpu, fences: [None; 2] };
    [
        Form { store: Release, load: Acquire, ..relaxed },
        Form { fences: [Some(Gpu); 2], ..relaxed },
        Form { load: Acquire, scope: Sys, fences: [Some(Sys), None], ..relaxed },
        relaxed,
        Form { load: Acquire, ..relaxed },
        Form { store: Release, ..relaxed },
        Form { fences: [None, Some(Gpu)], ..relaxed },
        Form { fences: [Some(Gpu), None], ..relaxed },
        Form { fences: [Some(Cta), Some(Gpu)], ..relaxed },
        Form { fences: [Some(Gpu), Some(Cta)], ..relaxed },
    ]
};
const RIGHT: u32 = 3;
const ALL: u32 = FORMS.len() as u32;
/// The scope of the flag's accesses includes one of the two threads only.
const NARROW: u32 = ALL;

fn form(number: u32) -> Form {
    let narrow = Form { scope: Scope::Cta, ..FORMS[0] };
    FORMS.get(number as usize).copied().unwrap_or(narrow)
}

/// Block 0 calls `store`, and block 1 calls `load`. The outcome is the flag and the message.
///
/// # Safety
///
/// As for kernels with [`Args`].
unsafe fn pass((words, results, number): Args, store: fn(*mut u32), load: fn(*mut u32) -> u32) {
    let Form { store: set, load: get, scope, fences: [before, after] } = form(number);
    // SAFETY: the test passes a message, a flag and results for this thread.
    unsafe {
        let flag = AtomicU32::from_ptr(words.add(4));
        if thread::block_idx_x() == 0 {
            store(words);
            if let Some(scope) = before {
                fence(Order::AcqRel, scope);
            }
            flag.store(1, set, scope);
            return;
        }
        let is_set = flag.load(get, scope);
        if let Some(scope) = after {
            fence(Order::AcqRel, scope);
        }
        mem::store(results, is_set);
        if is_set == 1 {
            mem::store(results.add(1), load(words));
        }
    }
}

#[kernel]
unsafe fn pass_an_atomic(words: *mut u32, results: *mut u32, form: u32) {
    // SAFETY: the test passes the words and results that the kernel uses.
    unsafe {
        pass(
            (words, results, form),
            |words| mem::store_ordered(words, 1, Order::Relaxed, Scope::Gpu),
            |words| mem::load_ordered(words, Order::Relaxed, Scope::Gpu),
        );
    }
}

#[kernel]
unsafe fn pass_a_word(words: *mut u32, results: *mut u32, form: u32) {
    // SAFETY: the kernel's contract; the races are what the test is for.
    unsafe {
        pass((words, results, form), |words| mem::store(words, 1), |words| mem::load(words));
    }
}

#[test]
fn a_message_arrives_with_its_flag_and_each_part_of_the_protocol_is_needed() {
    for form in 0..ALL {
        // The message is 0 if the flag is not set, since it is not read then.
        let mut expected = all_but(2, &[[0, 1], [1, 0]]);
        if form >= RIGHT {
            expected.insert([1, 0]);
        }
        assert_eq!(outcomes::<pass_an_atomic, 2>(2, form), expected, "form {form}");
    }
}

#[test]
fn a_plain_message_needs_the_same_or_it_is_a_race() {
    for form in 0..RIGHT {
        let arrives = all_but(2, &[[0, 1], [1, 0]]);
        assert_eq!(outcomes::<pass_a_word, 2>(2, form), arrives, "form {form}");
    }
    for form in RIGHT..=NARROW {
        let report = report(Simulation::new(1).weak(true), |gpu| {
            let (words, results) = (gpu.buffer(&[0; 16])?, gpu.buffer(&[0; 2])?);
            gpu.launch(pass_a_word::args(&words, &results, form).grid(2).block(1))
        });
        // The race is on the message, or on the flag if its scope excludes the other thread.
        let element = if form == NARROW { 4 } else { 0 };
        let race = format!("a race on element {element} of `words` (buffer ");
        assert!(report.contains(&race), "form {form}: {report}");
        assert!(report.contains("message_passing.rs:"), "form {form}: {report}");
    }
}
