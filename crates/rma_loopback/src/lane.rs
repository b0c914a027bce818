//! All that goes into one rank, in one order.
//!
//! Whoever puts into the rank enqueues here, under a lock, on the one stream of the rank that
//! carries data and signals. So a signal is behind all that was put before it, by whatever context
//! and rank: every signal is a strong one. An operation that cannot go on the stream yet (no slot,
//! too many on the way, a step that the host has to do) keeps later ones waiting, in order; every
//! thread that asks for progress moves it on.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::channel::Channel;
use crate::config::Config;
use crate::driver::Device;
use crate::error::Result;
use crate::transfer::{Issued, Step, Transfer};

/// The way into a rank.
pub(crate) struct Lane {
    channel: Arc<Channel>,
    config: Config,
    queue: Mutex<Queue>,
    /// Something waits: cheap to ask.
    waiting: AtomicBool,
}

struct Queue {
    /// Not on the stream, or not whole. NCCL bounds it: each context has a fixed number of requests
    /// for each peer.
    transfers: VecDeque<Transfer>,
    /// What the host does, for the first of them, when the stream has passed the mark.
    step: Option<(u64, Step)>,
    accepted: u64,
    issued: u64,
    /// The connection has failed: nothing more is issued.
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

    /// Takes a transfer, and returns its sequence number.
    pub(crate) fn submit(&self, transfer: Transfer) -> Result<u64> {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.transfers.push_back(transfer);
        queue.accepted += 1;
        let sequence = queue.accepted;
        self.drain(&mut queue)?;
        Ok(sequence)
    }

    /// Whether the transfer of this number is complete.
    pub(crate) fn done(&self, sequence: u64) -> bool {
        self.channel.done() >= sequence
    }

    /// The number of the last transfer.
    pub(crate) fn accepted(&self) -> u64 {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).accepted
    }

    /// Moves on what waits.
    pub(crate) fn progress(&self) -> Result<()> {
        if !self.waiting.load(Ordering::Acquire) {
            return Ok(());
        }
        // Whoever holds the lock does the same.
        let Ok(mut queue) = self.queue.try_lock() else { return Ok(()) };
        self.drain(&mut queue)
    }

    /// Asks the driver whether a transfer has failed, if one is on the way.
    pub(crate) fn check(&self) -> Result<()> {
        let Ok(queue) = self.queue.try_lock() else { return Ok(()) };
        let idle = self.channel.done() >= queue.accepted;
        drop(queue);
        if idle { Ok(()) } else { self.channel.is_idle().map(|_| ()) }
    }

    /// Drops what waits, of whatever rank: from now on the host looks at no memory of a transfer,
    /// and puts nothing on the stream.
    pub(crate) fn cancel(&self) {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.cancelled = true;
        queue.transfers.clear();
        queue.step = None;
    }

    /// Whether nothing is on the stream, and nothing failed there.
    pub(crate) fn is_idle(&self) -> Result<bool> {
        self.channel.is_idle()
    }

    /// Waits for what is on the stream. Whether nothing is left, nor waits.
    pub(crate) fn settle(&self) -> bool {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        self.channel.settle() && queue.transfers.is_empty()
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
                Issued::Whole => {
                    queue.issued = next;
                    queue.transfers.pop_front();
                }
                Issued::Until { mark, step } => queue.step = Some((mark, step)),
                Issued::NoSlot => break,
            }
        }
        self.waiting.store(!queue.transfers.is_empty(), Ordering::Release);
        Ok(())
    }
}
