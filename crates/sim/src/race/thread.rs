//! A thread's clock.

use cuda_std::arch::{Engine, Scope};

use super::clock::{Agent, Clock};
use super::memo::Memo;
use super::sync::{Position, Release};
use crate::base::error::Site;

/// The detector's state of a running thread.
pub(crate) struct ThreadClock {
    pub(super) here: Position,
    /// The accesses that happened before the thread's next access, without the thread's own.
    pub(super) clock: Clock,
    /// The time of the thread's accesses; it advances when the thread releases what it has done,
    /// and at the first access after others have got to know that its reads have ended.
    pub(super) time: u32,
    /// Whether others have got to know since the thread's last access that its reads have ended.
    pub(super) has_met: bool,
    /// The time up to which the clock has all threads of the block.
    pub(super) all: u32,
    /// The clocks that the thread's fences have released, by scope: later writes carry them.
    pub(super) released: Vec<(Scope, Clock)>,
    /// The releases that the thread's relaxed reads have seen, with the words: a fence, or an
    /// acquiring read of the same word, acquires them.
    pub(super) found: Vec<(usize, Release)>,
    /// The unit that makes the next accesses.
    pub(super) engine: Engine,
    /// The number of the asynchronous copy that makes them; 0 for others.
    pub(super) copy: u8,
    /// The number of groups committed so far, by [`group_of`].
    pub(super) groups: [u32; 3],
    /// The last bulk copy from shared memory: the group that it will be in, and its line.
    pub(super) bulk: Option<(u32, Site)>,
    /// A cache of accesses that the clock has.
    pub(super) memo: Memo,
}

impl Default for ThreadClock {
    fn default() -> Self {
        Self {
            here: Position { gpu: 0, agent: Agent::default() },
            clock: Clock::default(),
            time: 1,
            has_met: false,
            all: 0,
            released: Vec::new(),
            found: Vec::new(),
            engine: Engine::Thread,
            copy: 0,
            groups: [0; 3],
            bulk: None,
            memo: Memo::default(),
        }
    }
}
