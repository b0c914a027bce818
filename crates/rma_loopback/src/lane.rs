//! A lane: the ordered queue of all operations into one rank.
//!
//! A thread that puts into the rank enqueues here, under a lock, on the rank's one stream for data
//! and signals. So a signal follows everything put before it, by any context and rank: every signal
//! is strong. An operation that cannot be enqueued yet (no free slot, queue depth reached, a
//! pending host step) holds back later ones, in order; every thread that calls progress advances
//! it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::channel::Channel;
use crate::config::Config;
use crate::driver::Device;
use crate::error::Result;
use crate::transfer::{HostStep, IssueResult, Transfer};

/// The queue of operations into a rank.
pub(crate) struct Lane {
    channel: Arc<Channel>,
    config: Config,
    queue: Mutex<Queue>,
    /// Whether operations are pending; a cheap test.
    waiting: AtomicBool,
}

struct Queue {
    /// Not or not completely enqueued. Bounded by NCCL: each context has a fixed number of requests
    /// per peer.
    transfers: VecDeque<Transfer>,
    /// The host step of the first one, once the stream has passed the mark.
    step: Option<(u64, HostStep)>,
    accepted: u64,
    issued: u64,
    /// The connection has failed: nothing more is enqueued.
    cancelled: bool,
}

impl Lane {
    pub(crate) fn new(device: &Device, config: Config) -> Result<Self> {
        let queue = Queue {
            transfers: VecDeque::with_capacity(config.depth as usize),
            step: None,
            accepted: 0,
            issued: 0,
            cancelled: false,
        };
        Ok(Self {
            channel: Arc::new(Channel::new(device)?),
            config,
            queue: Mutex::new(queue),
            waiting: AtomicBool::new(false),
        })
    }

    /// Accepts a transfer; returns its sequence number.
    pub(crate) fn submit(&self, transfer: Transfer) -> Result<u64> {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.transfers.push_back(transfer);
        queue.accepted += 1;
        let sequence = queue.accepted;
        self.drain(&mut queue)?;
        Ok(sequence)
    }

    /// Whether the transfer with this number is complete.
    pub(crate) fn done(&self, sequence: u64) -> bool {
        self.channel.done() >= sequence
    }

    /// Sequence number of the last transfer.
    pub(crate) fn accepted(&self) -> u64 {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).accepted
    }

    /// Makes progress on pending transfers.
    pub(crate) fn progress(&self) -> Result<()> {
        if !self.waiting.load(Ordering::Acquire) {
            return Ok(());
        }
        // The thread that holds the lock does the same.
        let Ok(mut queue) = self.queue.try_lock() else { return Ok(()) };
        self.drain(&mut queue)
    }

    /// Queries the driver for a failed transfer, if any is in flight.
    pub(crate) fn check(&self) -> Result<()> {
        let Ok(queue) = self.queue.try_lock() else { return Ok(()) };
        let idle = self.channel.done() >= queue.accepted;
        drop(queue);
        if idle { Ok(()) } else { self.channel.is_idle().map(|_| ()) }
    }

    /// Drops pending transfers of all ranks: from now on the host accesses no memory of a transfer
    /// and enqueues nothing.
    pub(crate) fn cancel(&self) {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.cancelled = true;
        queue.transfers.clear();
        queue.step = None;
    }

    /// Whether the stream is idle without an error.
    pub(crate) fn is_idle(&self) -> Result<bool> {
        self.channel.is_idle()
    }

    /// Synchronises the stream. Returns whether nothing is left in it or pending.
    pub(crate) fn synchronize(&self) -> bool {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        self.channel.synchronize() && queue.transfers.is_empty()
    }

    fn drain(&self, queue: &mut Queue) -> Result<()> {
        if queue.cancelled {
            return Ok(());
        }
        let channel = &self.channel;
        let mut entered = None;
        while let Some(first) = queue.transfers.front_mut() {
            if let Some((mark, _)) = queue.step
                && !channel.passed(mark)
            {
                break;
            }
            if queue.issued - channel.done() >= self.config.depth {
                break;
            }
            if entered.is_none() {
                entered = Some(channel.device.enter()?);
            }
            let next = queue.issued + 1;
            if let Some((_, step)) = queue.step.take() {
                if first.step(step, channel, next)? {
                    queue.issued = next;
                    queue.transfers.pop_front();
                }
                continue;
            }
            match first.issue(channel, &self.config, next)? {
                IssueResult::Whole => {
                    queue.issued = next;
                    queue.transfers.pop_front();
                }
                IssueResult::Until { mark, step } => queue.step = Some((mark, step)),
                IssueResult::NoSlot => break,
            }
        }
        self.waiting.store(!queue.transfers.is_empty(), Ordering::Release);
        Ok(())
    }
}
