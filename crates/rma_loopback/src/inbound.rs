//! The ordered queue of all operations into one rank.
//!
//! A thread that puts into the rank leaves the operation here. The rank's own progress thread
//! enqueues it on the rank's one stream for data and signals, after its next pass over NCCL's
//! queues, so that no two threads call the driver for one GPU. A signal follows everything put
//! before it, by any context and rank: every signal is strong. An operation that cannot be enqueued
//! yet (no free slot, queue depth reached, a step that the host must do first) delays all later
//! ones; every call of `progress` retries it.
//!
//! Operations of one pass, and those that come while the stream is busy, form a [`Group`], whose
//! words one call of the driver enqueues.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::config::Config;
use crate::driver::Device;
use crate::error::Result;
use crate::group::Group;
use crate::stream::TrackedStream;
use crate::transfer::{HostStep, IssueResult, Transfer};

/// The maximum number of groups in the stream: a second one is ready when the first one ends.
const GROUPS: usize = 2;
/// The number of times that other ranks find operations waiting before one of them enqueues these:
/// the rank's own progress thread has ended, or has not started yet.
const PATIENCE: u32 = 1000;

/// The queue of operations into a rank.
pub(crate) struct InboundQueue {
    pub(crate) stream: Arc<TrackedStream>,
    config: Config,
    arrived: Mutex<Arrived>,
    /// Held by the thread that calls the driver. Taken before `arrived`.
    state: Mutex<State>,
    /// Whether operations are pending; read without a lock.
    waiting: AtomicBool,
    /// The number of times that other ranks have found operations waiting since the last progress.
    overlooked: AtomicU32,
}

/// Transfers that no thread has begun to enqueue.
#[derive(Default)]
struct Arrived {
    transfers: Vec<Transfer>,
    /// The number of transfers so far, and so the sequence number of the last.
    accepted: u64,
    /// The connection has failed: nothing more is accepted.
    cancelled: bool,
}

struct State {
    /// Transfers not completely enqueued yet. NCCL bounds their number: each context has a fixed
    /// number of requests per peer.
    transfers: VecDeque<Transfer>,
    /// The host step of the first transfer, to be run once the stream has passed the mark.
    step: Option<(u64, HostStep)>,
    /// The number of transfers completely enqueued, of which the stream has completed some or all.
    issued: u64,
    /// The last transfer of each group in the stream.
    groups: Vec<u64>,
}

impl InboundQueue {
    pub(crate) fn new(device: &Device, config: Config) -> Result<Self> {
        let state = State {
            transfers: VecDeque::with_capacity(config.depth as usize),
            step: None,
            issued: 0,
            groups: Vec::with_capacity(GROUPS),
        };
        Ok(Self {
            stream: Arc::new(TrackedStream::new(device)?),
            config,
            arrived: Mutex::default(),
            state: Mutex::new(state),
            waiting: AtomicBool::new(false),
            overlooked: AtomicU32::new(0),
        })
    }

    fn arrived(&self) -> MutexGuard<'_, Arrived> {
        self.arrived.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accepts a transfer; returns its sequence number.
    pub(crate) fn submit(&self, transfer: Transfer) -> u64 {
        let mut arrived = self.arrived();
        if !arrived.cancelled {
            arrived.transfers.push(transfer);
            self.waiting.store(true, Ordering::Release);
        }
        arrived.accepted += 1;
        arrived.accepted
    }

    /// Returns whether the transfer with this number is complete.
    pub(crate) fn done(&self, sequence: u64) -> bool {
        self.stream.done() >= sequence
    }

    /// Returns the sequence number of the last transfer.
    pub(crate) fn accepted(&self) -> u64 {
        self.arrived().accepted
    }

    /// Makes progress on pending transfers.
    pub(crate) fn progress(&self) -> Result<()> {
        if !self.waiting.load(Ordering::Acquire) {
            return Ok(());
        }
        self.overlooked.store(0, Ordering::Relaxed);
        // Otherwise the thread that holds the lock makes progress.
        let Ok(mut state) = self.state.try_lock() else { return Ok(()) };
        self.enqueue_pending(&mut state)
    }

    /// Makes progress in the thread of another rank, if this rank's own thread has made none while
    /// others have called this [`PATIENCE`] times.
    pub(crate) fn progress_for_absent(&self) -> Result<()> {
        let is_absent = self.waiting.load(Ordering::Acquire)
            && self.overlooked.fetch_add(1, Ordering::Relaxed) >= PATIENCE;
        if is_absent { self.progress() } else { Ok(()) }
    }

    /// Queries the driver for a failed transfer, if any is in flight.
    pub(crate) fn check(&self) -> Result<()> {
        if self.done(self.accepted()) { Ok(()) } else { self.stream.is_idle().map(|_| ()) }
    }

    /// Drops pending transfers of all ranks: from now on the host accesses no memory of a transfer
    /// and enqueues nothing.
    pub(crate) fn cancel(&self) {
        let (mut state, mut arrived) = (self.state(), self.arrived());
        arrived.cancelled = true;
        arrived.transfers.clear();
        state.transfers.clear();
        state.step = None;
    }

    /// Returns whether nothing is pending, nor in the stream, for which it waits
    /// ([`TrackedStream::ends`]).
    pub(crate) fn ends(&self) -> bool {
        // No lock is held while it waits.
        let is_empty = self.state().transfers.is_empty() && self.arrived().transfers.is_empty();
        is_empty && self.stream.ends()
    }

    fn enqueue_pending(&self, state: &mut State) -> Result<()> {
        // The flag is cleared before `arrived` is locked, and `submit` sets it under that lock: so
        // it is set again for each transfer that the next line does not take.
        self.waiting.store(false, Ordering::Relaxed);
        state.transfers.extend(self.arrived().transfers.drain(..));
        let stream = &self.stream;
        let done = stream.done();
        state.groups.retain(|last| *last > done);
        let (mut entered, mut group) = (None, Group::default());
        while let Some(first) = state.transfers.front_mut() {
            let is_stepping = match &state.step {
                Some((mark, _)) if !stream.passed(*mark) => break,
                step => step.is_some(),
            };
            let in_stream = state.issued - stream.done();
            // A host step, which adds no group, is run also if the stream has all groups.
            if in_stream >= self.config.depth || state.groups.len() >= GROUPS && !is_stepping {
                break;
            }
            if entered.is_none() {
                entered = Some(stream.device.enter()?);
            }
            let next = state.issued + 1;
            if let Some((_, step)) = state.step.take() {
                if first.step(step, stream, next)? {
                    state.issued = next;
                    state.transfers.pop_front();
                }
                continue;
            }
            match first.issue(stream, &self.config, &mut group)? {
                IssueResult::Whole => {
                    state.issued = next;
                    state.transfers.pop_front();
                    if !group.end_transfer(next) {
                        state.groups.extend(group.enqueue(stream)?);
                    }
                }
                IssueResult::Until { mark, step } => state.step = Some((mark, step)),
                IssueResult::NoSlot => break,
            }
        }
        state.groups.extend(group.enqueue(stream)?);
        if !state.transfers.is_empty() {
            self.waiting.store(true, Ordering::Release);
        }
        Ok(())
    }
}
