//! The ordered queue of all operations into one rank.
//!
//! Operations are queued here, under a lock. `progress` enqueues them on the rank's one stream for
//! data and signals; NCCL calls it after each pass over its queues. So a signal follows everything
//! put before it, by any context and rank: every signal is strong. An operation that cannot be
//! enqueued yet (no free slot, queue depth reached, a step that the host must do first) delays all
//! later ones; every call of `progress` retries it.
//!
//! Operations of one pass, and those that come while the stream is busy, form a [`Group`], whose
//! words one call of the driver enqueues.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::config::Config;
use crate::driver::Device;
use crate::error::Result;
use crate::group::Group;
use crate::stream::TrackedStream;
use crate::transfer::{HostStep, IssueResult, Transfer};

/// Groups in the stream, at most: the next one is there when one has ended.
const GROUPS: usize = 2;

/// The queue of operations into a rank.
pub(crate) struct InboundQueue {
    stream: Arc<TrackedStream>,
    config: Config,
    state: Mutex<State>,
    /// Whether operations are pending; read without the lock.
    waiting: AtomicBool,
}

struct State {
    /// Transfers not completely enqueued yet. NCCL bounds their number: each context has a fixed
    /// number of requests per peer.
    transfers: VecDeque<Transfer>,
    /// The host step of the first transfer, to be run once the stream has passed the mark.
    step: Option<(u64, HostStep)>,
    accepted: u64,
    issued: u64,
    /// The last transfer of each group in the stream.
    groups: Vec<u64>,
    /// The connection has failed: nothing more is enqueued.
    cancelled: bool,
}

impl InboundQueue {
    pub(crate) fn new(device: &Device, config: Config) -> Result<Self> {
        let state = State {
            transfers: VecDeque::with_capacity(config.depth as usize),
            step: None,
            accepted: 0,
            issued: 0,
            groups: Vec::with_capacity(GROUPS),
            cancelled: false,
        };
        Ok(Self {
            stream: Arc::new(TrackedStream::new(device)?),
            config,
            state: Mutex::new(state),
            waiting: AtomicBool::new(false),
        })
    }

    /// Accepts a transfer; returns its sequence number. The next call of `progress` enqueues it,
    /// with those that have come by then.
    pub(crate) fn submit(&self, transfer: Transfer) -> u64 {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // When cancelled, nothing more is enqueued.
        if !state.cancelled {
            state.transfers.push_back(transfer);
            self.waiting.store(true, Ordering::Release);
        }
        state.accepted += 1;
        state.accepted
    }

    /// Whether the transfer with this number is complete.
    pub(crate) fn done(&self, sequence: u64) -> bool {
        self.stream.done() >= sequence
    }

    /// Sequence number of the last transfer.
    pub(crate) fn accepted(&self) -> u64 {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).accepted
    }

    /// Makes progress on pending transfers.
    pub(crate) fn progress(&self) -> Result<()> {
        if !self.waiting.load(Ordering::Acquire) {
            return Ok(());
        }
        // Otherwise the thread that holds the lock makes progress.
        let Ok(mut state) = self.state.try_lock() else { return Ok(()) };
        self.enqueue_pending(&mut state)
    }

    /// Queries the driver for a failed transfer, if any is in flight.
    pub(crate) fn check(&self) -> Result<()> {
        let Ok(state) = self.state.try_lock() else { return Ok(()) };
        let idle = self.stream.done() >= state.accepted;
        drop(state);
        if idle { Ok(()) } else { self.stream.is_idle().map(|_| ()) }
    }

    /// Drops pending transfers of all ranks: from now on the host accesses no memory of a transfer
    /// and enqueues nothing.
    pub(crate) fn cancel(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.cancelled = true;
        state.transfers.clear();
        state.step = None;
    }

    /// Whether the stream is idle; an error if one of its operations has failed.
    pub(crate) fn is_idle(&self) -> Result<bool> {
        self.stream.is_idle()
    }

    /// Synchronises the stream. Returns whether nothing is left in it or pending.
    pub(crate) fn synchronize(&self) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.stream.synchronize() && state.transfers.is_empty()
    }

    fn enqueue_pending(&self, state: &mut State) -> Result<()> {
        if state.cancelled || state.transfers.is_empty() {
            return Ok(());
        }
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
                    if !group.has_whole(next) {
                        state.groups.extend(group.enqueue(stream)?);
                    }
                }
                IssueResult::Until { mark, step } => state.step = Some((mark, step)),
                IssueResult::NoSlot => break,
            }
        }
        state.groups.extend(group.enqueue(stream)?);
        self.waiting.store(!state.transfers.is_empty(), Ordering::Release);
        Ok(())
    }
}
