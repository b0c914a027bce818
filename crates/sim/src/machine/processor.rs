//! Keeps a machine's threads on one processor while they wait for each other.
//!
//! Only one of these threads runs at a time. A switch between threads of one processor takes a
//! tenth of the time of waking a thread on another processor, above all on virtual machines.

use std::mem;

use parking_lot::Mutex;

/// The processors that a thread may run on.
#[derive(Clone, Copy)]
pub(super) struct Allowed(libc::cpu_set_t);

impl Allowed {
    /// Returns the processors that the calling thread may run on.
    pub(super) fn of_this_thread() -> Self {
        let mut allowed = Self::none();
        let size = size_of::<libc::cpu_set_t>();
        // SAFETY: the set has that size. If the call fails, the set stays empty.
        unsafe { libc::sched_getaffinity(0, size, &raw mut allowed.0) };
        allowed
    }

    fn none() -> Self {
        // SAFETY: a set is an array of bits, all of which may be zero.
        Self(unsafe { mem::zeroed() })
    }

    fn one(processor: usize) -> Self {
        let mut one = Self::none();
        // SAFETY: the number is below the size of a set, since it comes from one.
        unsafe { libc::CPU_SET(processor, &mut one.0) };
        one
    }

    fn processors(&self) -> impl Iterator<Item = usize> {
        // SAFETY: the numbers are below the size of a set.
        (0..libc::CPU_SETSIZE as usize)
            .filter(|number| unsafe { libc::CPU_ISSET(*number, &self.0) })
    }

    /// Restricts the calling thread to these processors.
    fn apply(&self) {
        let size = size_of::<libc::cpu_set_t>();
        // SAFETY: the set has that size. A failure only costs time.
        unsafe { libc::sched_setaffinity(0, size, &raw const self.0) };
    }
}

/// The number of machines on each processor.
static MACHINES: Mutex<Vec<u32>> = Mutex::new(Vec::new());

/// A machine's processor; `None` if its threads may run on only one processor anyway.
pub(super) struct Processor(Option<usize>);

impl Processor {
    /// Chooses a processor with the fewest machines of this process, preferably the caller's.
    pub(super) fn choose() -> Self {
        let allowed = Allowed::of_this_thread();
        if allowed.processors().nth(1).is_none() {
            return Self(None);
        }
        // SAFETY: the call has no arguments. Where it is not supported, it returns -1.
        let current = usize::try_from(unsafe { libc::sched_getcpu() }).ok();
        let mut machines = MACHINES.lock();
        machines.resize(libc::CPU_SETSIZE as usize, 0);
        let load = |number: &usize| (machines[*number], Some(*number) != current);
        let chosen = allowed.processors().min_by_key(load);
        chosen.into_iter().for_each(|number| machines[number] += 1);
        Self(chosen)
    }

    /// Restricts the calling thread to this processor.
    pub(super) fn stay(&self) {
        if let Some(number) = self.0 {
            Allowed::one(number).apply();
        }
    }

    /// Restricts the calling thread to this processor while it waits. Then lets it run on all of
    /// `allowed` again, so that threads that it starts inherit no restriction.
    pub(super) fn wait<R>(&self, allowed: &Allowed, wait: impl FnOnce() -> R) -> R {
        self.stay();
        let result = wait();
        if self.0.is_some() {
            allowed.apply();
        }
        result
    }
}

impl Drop for Processor {
    fn drop(&mut self) {
        if let Some(number) = self.0 {
            MACHINES.lock()[number] -= 1;
        }
    }
}
