//! Heartbeats: each process says at intervals that it runs. A process that sends nothing for
//! [`LIMIT`], or for a shorter deadline, counts as lost, such as a stopped one, whose connection
//! stays open. Without a deadline none does, so that a process can be stopped in a debugger.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The time for which a process may send nothing. Even in a busy process, the thread that sends
/// heartbeats can run.
pub(super) const LIMIT: Duration = Duration::from_secs(20);
/// The interval, unless the deadline is short.
const INTERVAL: Duration = Duration::from_secs(1);
/// The fewest intervals of a deadline.
const INTERVALS: u32 = 4;

/// Number of intervals in which a peer has said nothing. Intervals, not time: none pass while this
/// process itself is stopped. The count orders no other memory.
#[derive(Default)]
pub(super) struct Silence(AtomicU32);

impl Silence {
    /// Ends the silence: the peer has sent something.
    pub(super) fn end(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// Notes that an interval has passed. Returns why the peer counts as lost, if it has been
    /// silent too long.
    pub(super) fn grow(&self, deadline: Option<Duration>) -> Option<String> {
        self.grow_to(LIMIT, deadline)
    }

    /// Does the same as [`grow`](Self::grow) for a process that may be silent for `limit`.
    pub(super) fn grow_to(&self, limit: Duration, deadline: Option<Duration>) -> Option<String> {
        let silent = interval(deadline) * (self.0.fetch_add(1, Ordering::Relaxed) + 1);
        let limit = deadline?.min(limit);
        (silent > limit).then(|| {
            format!(
                "nothing was heard from it for {:.0} s: its process may be stopped, or its host \
                 down",
                limit.as_secs_f64()
            )
        })
    }
}

/// Returns the time between two heartbeats of a process.
pub(super) fn interval(deadline: Option<Duration>) -> Duration {
    deadline.map_or(INTERVAL, |deadline| (deadline / INTERVALS).min(INTERVAL))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_lost_once_it_was_silent_for_the_deadline_or_for_the_limit() {
        let silence = Silence::default();
        let deadline = Some(Duration::from_secs(2));
        let grow = || silence.grow(deadline);
        assert!((0..4).all(|_| grow().is_none()));
        assert!(grow().unwrap().contains("for 2 s"));
        silence.end();
        assert!((0..4).all(|_| grow().is_none()));
        silence.end();
        let seconds = 1 + LIMIT.as_secs();
        let lost = (1..).find(|_| silence.grow(Some(Duration::from_secs(600))).is_some());
        assert_eq!(lost, Some(seconds));
        assert!((0..10_000).all(|_| silence.grow(None).is_none()));
        assert_eq!(interval(Some(Duration::from_secs(600))), INTERVAL);
    }

    #[test]
    fn a_peer_that_may_be_silent_for_longer_is_lost_after_the_deadline_alone() {
        let (silence, deadline) = (Silence::default(), Some(Duration::from_secs(600)));
        let lost = (1..).find(|_| silence.grow_to(Duration::MAX, deadline).is_some());
        assert_eq!(lost, Some(601));
    }
}
