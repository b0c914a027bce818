//! Host threads: what each knows of the GPUs' work, which is before all work that it starts.
//!
//! A thread learns what it has waited for (streams, events), and what is known to the threads with
//! which it meets: at messages and rendezvous, at NCCL's calls that wait for all ranks, and at the
//! start and the end of threads. The threads of one GPU, all of one rank, share what they know.

use std::cell::{Cell, RefCell};

use litemap::LiteMap;

use super::ops::Sequence;
use super::{Clock, Races};
use crate::base::ids::ClientId;

/// An event that orders the work of a host thread with that of other threads.
#[derive(Clone, Copy, Debug)]
pub(crate) enum HostEvent {
    /// The start of the thread, by this thread; `None` if the starting thread is not a client.
    Start(Option<ClientId>),
    /// The sending or receiving of a message.
    Message,
    /// A wait, perhaps a past one, for something that the machine does not see.
    Unseen,
    /// The end of the thread.
    End,
}

/// The host threads of a machine.
#[derive(Default)]
pub(super) struct Hosts {
    threads: RefCell<LiteMap<ClientId, HostThread>>,
    /// The accesses of host threads by GPU, and what is known to the threads of the GPU.
    gpus: RefCell<LiteMap<usize, Sequence>>,
    /// What was known to threads that have sent messages.
    messages: RefCell<Clock>,
    /// The thread whose call is executed.
    current: Cell<Option<ClientId>>,
}

#[derive(Default)]
struct HostThread {
    clock: Clock,
    /// The GPU whose context is current.
    gpu: Option<usize>,
}

impl Races {
    /// Executes a part of a call of a host thread, with this GPU's context.
    pub(crate) fn as_host<R>(
        &self,
        id: ClientId,
        gpu: Option<usize>,
        part: impl FnOnce() -> R,
    ) -> R {
        if self.on {
            let mut threads = self.hosts.threads.borrow_mut();
            threads.entry(id).or_default().gpu = gpu;
        }
        self.hosts.current.set(Some(id));
        let result = part();
        self.hosts.current.set(None);
        result
    }

    /// Returns what the calling host thread knows.
    pub(crate) fn host(&self) -> Clock {
        match self.hosts.current.get() {
            Some(id) => self.known_to(id),
            None => self.known_to_all(),
        }
    }

    /// Returns the host thread whose call is executed.
    pub(crate) fn current_host(&self) -> Option<ClientId> {
        self.hosts.current.get()
    }

    /// Orders the calling host thread after everything in `clock`.
    pub(crate) fn host_learns(&self, clock: &Clock) {
        if let Some(id) = self.hosts.current.get() {
            self.thread_learns(id, clock);
        }
    }

    /// Orders a host thread after everything in `clock`.
    pub(crate) fn thread_learns(&self, id: ClientId, clock: &Clock) {
        if !self.on {
            return;
        }
        let mut threads = self.hosts.threads.borrow_mut();
        let thread = threads.entry(id).or_default();
        self.joins.join(&mut thread.clock, clock);
        if let Some(gpu) = thread.gpu {
            let mut gpus = self.hosts.gpus.borrow_mut();
            let sequence = gpus.entry(gpu).or_insert_with(|| self.sequence());
            self.joins.join(&mut sequence.clock.borrow_mut(), clock);
        }
    }

    /// Performs an operation of the calling host thread that completes at once.
    pub(crate) fn host_op<R>(&self, gpu: usize, access: impl FnOnce() -> R) -> R {
        let known = self.host();
        let mut run = {
            let mut gpus = self.hosts.gpus.borrow_mut();
            let sequence = gpus.entry(gpu).or_insert_with(|| self.sequence());
            self.start(sequence, gpu, &known)
        };
        let result = self.within(&mut run, access);
        let ended = self.end(run);
        if let Some(sequence) = self.hosts.gpus.borrow().get(&gpu) {
            self.joins.join(&mut sequence.clock.borrow_mut(), &ended);
        }
        self.host_learns(&ended);
        result
    }

    /// Records an event of a host thread between two calls.
    pub(crate) fn host_event(&self, id: ClientId, event: HostEvent) {
        if !self.on {
            return;
        }
        match event {
            HostEvent::Start(by) => {
                let known = by.map_or_else(|| self.known_to_all(), |by| self.known_to(by));
                self.thread_learns(id, &known);
            }
            HostEvent::Message => {
                let known = self.known_to(id);
                let mut messages = self.hosts.messages.borrow_mut();
                self.joins.join(&mut messages, &known);
                self.thread_learns(id, &messages);
            }
            // The thread may have waited for any other thread, and any other thread for this one.
            HostEvent::Unseen => {
                self.all_learn(&self.known_to(id));
                self.thread_learns(id, &self.known_to_all());
            }
            // Any other thread may wait for this end (`JoinHandle::join`).
            HostEvent::End => {
                let known = self.known_to(id);
                self.hosts.threads.borrow_mut().remove(&id);
                self.all_learn(&known);
            }
        }
    }

    fn known_to(&self, id: ClientId) -> Clock {
        let threads = self.hosts.threads.borrow();
        let Some(HostThread { clock, gpu }) = threads.get(&id) else { return Clock::default() };
        let mut known = clock.clone();
        let gpus = self.hosts.gpus.borrow();
        if let Some(sequence) = gpu.and_then(|gpu| gpus.get(&gpu)) {
            self.joins.join(&mut known, &sequence.clock.borrow());
        }
        known
    }

    fn known_to_all(&self) -> Clock {
        let mut known = Clock::default();
        for (_, thread) in self.hosts.threads.borrow().iter() {
            self.joins.join(&mut known, &thread.clock);
        }
        for (_, sequence) in self.hosts.gpus.borrow().iter() {
            self.joins.join(&mut known, &sequence.clock.borrow());
        }
        known
    }

    fn all_learn(&self, clock: &Clock) {
        for (_, thread) in self.hosts.threads.borrow_mut().iter_mut() {
            self.joins.join(&mut thread.clock, clock);
        }
    }
}
