//! Waits that something else may end, such as Ctrl-C in an interpreter of another language.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::error::{Result, StateError};

/// The pause between a wait's checks for an interrupt.
const INTERVAL: Duration = Duration::from_millis(50);

/// Returns whether the thread's waits are to end.
type Check = Rc<dyn Fn() -> bool>;

thread_local! {
    static CHECK: RefCell<Option<Check>> = const { RefCell::new(None) };
    /// When a check was last called.
    static LAST: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Replaces the thread's check until it is dropped.
struct ReplacedCheck(Option<Check>);

impl ReplacedCheck {
    fn by(check: Option<Check>) -> Self {
        Self(CHECK.replace(check))
    }
}

impl Drop for ReplacedCheck {
    fn drop(&mut self) {
        CHECK.set(self.0.take());
    }
}

/// Calls `f`. While a call of devcomm's within `f` waits on this thread, for the GPU or for other
/// ranks, it asks `is_interrupted` about every 50 ms; once that is true, the call fails with
/// [`StateError::Interrupted`]. A nested call of `interruptible` within `f` uses its own check.
///
/// Work that was enqueued goes on. A communicator is aborted when its call that creates or ends
/// something on all ranks is interrupted. A rank whose exchange with other ranks is interrupted,
/// such as a barrier or the making of a communicator, counts as lost, since the others go on
/// without it.
///
/// ```
/// use std::sync::atomic::{AtomicBool, Ordering};
/// # use devcomm_host::{Error, StateError, World, interruptible};
///
/// // A signal handler sets it.
/// static STOPS: AtomicBool = AtomicBool::new(true);
/// let world = World::simulated(2)?;
/// let run = world.run(|rank| interruptible(|| STOPS.load(Ordering::Relaxed), || rank.barrier()));
/// assert!(matches!(run, Err(Error::State(StateError::Interrupted))));
/// # Ok::<_, Error>(())
/// ```
pub fn interruptible<R>(is_interrupted: impl Fn() -> bool + 'static, f: impl FnOnce() -> R) -> R {
    let _replaced = ReplacedCheck::by(Some(Rc::new(is_interrupted)));
    f()
}

/// Calls `f`, whose waits are short and are not interrupted.
pub(crate) fn uninterrupted<R>(f: impl FnOnce() -> R) -> R {
    let _replaced = ReplacedCheck::by(None);
    f()
}

/// Returns after how long a wait of this thread pauses to [`check`].
pub(crate) fn interval() -> Duration {
    if CHECK.with_borrow(Option::is_some) { INTERVAL } else { Duration::MAX }
}

/// Returns whether [`check`] would ask now: there is a check, and none was called for an
/// [`INTERVAL`].
pub(super) fn is_due() -> bool {
    let is_due = |last: Instant| last.elapsed() >= INTERVAL;
    CHECK.with_borrow(Option::is_some) && LAST.get().is_none_or(is_due)
}

/// Fails if the calling thread's wait is interrupted. It asks at most once in an [`INTERVAL`].
///
/// # Errors
///
/// [`StateError::Interrupted`].
pub(crate) fn check() -> Result<()> {
    if !is_due() {
        return Ok(());
    }
    LAST.set(Some(Instant::now()));
    // The check may itself call devcomm.
    let check = CHECK.with_borrow(Clone::clone);
    match check.is_some_and(|check| check()) {
        true => Err(StateError::Interrupted.into()),
        false => Ok(()),
    }
}
