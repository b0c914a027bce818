//! The flight recorder: the last operations of each rank, which say where a rank is when a job
//! hangs. Each operation is also a span of `tracing`.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::fmt;
use std::io::Write;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use devcomm_types::{Dim3, LaunchConfig};
use parking_lot::Mutex;
use tracing::span::EnteredSpan;

use crate::machine::NamedOperation;

/// How many operations of a rank are kept.
const KEPT: usize = 100;

/// The recorders of this process.
static RECORDERS: Mutex<Vec<Weak<Recorder>>> = Mutex::new(Vec::new());

/// An operation of a rank.
pub(crate) enum Operation {
    /// A call of NCCL, with its terms, such as count and type, if it has any.
    Nccl(Cow<'static, str>),
    /// The launch of a kernel.
    Launch { kernel: &'static str, grid: Dim3, block: Dim3 },
    /// The launch of a graph with this number of nodes.
    Graph(usize),
    /// An exchange of bytes on the hosts: the rank's call, and the number of ranks.
    Exchange(String, usize),
    /// The wait for the other ranks that are left after a loss.
    Survivors,
    /// The wait for the other ranks' functions to end.
    Finish,
    /// A wait for a stream.
    Wait { stream: usize },
    /// A wait for an event.
    Event { event: usize },
    /// A wait for the last operation of a non-blocking communicator.
    Ready,
}

impl Operation {
    pub(crate) fn launch(kernel: &'static str, config: &LaunchConfig) -> Self {
        Self::Launch { kernel, grid: config.grid, block: config.block }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nccl(call) => f.write_str(call),
            Self::Launch { kernel, grid, block } => {
                write!(f, "launch of {kernel}, {grid} blocks of {block} threads")
            }
            Self::Graph(nodes) => write!(f, "launch of a graph of {nodes} nodes"),
            Self::Exchange(call, ranks) => write!(f, "exchange of {ranks} ranks for {call}"),
            Self::Survivors => f.write_str("wait for the ranks that are left"),
            Self::Finish => f.write_str("end of the rank's function, wait for other ranks"),
            Self::Wait { stream } => write!(f, "wait for stream {stream:#x}"),
            Self::Event { event } => write!(f, "wait for event {event:#x}"),
            Self::Ready => f.write_str("wait until the communicator is ready"),
        }
    }
}

/// The last operations of a rank.
#[derive(Default)]
pub(crate) struct Recorder {
    /// The owner of the operations: `rank 3 of 8`.
    owner: Mutex<String>,
    entries: Mutex<Entries>,
}

#[derive(Default)]
struct Entries {
    /// The number of operations so far.
    count: u64,
    /// The last of them.
    last: VecDeque<Entry>,
}

struct Entry {
    operation: Operation,
    began: Instant,
    took: Option<Duration>,
}

impl Recorder {
    pub(crate) fn new() -> Arc<Self> {
        let recorder = Arc::new(Self::default());
        let mut recorders = RECORDERS.lock();
        recorders.retain(|other| other.strong_count() > 0);
        recorders.push(Arc::downgrade(&recorder));
        recorder
    }

    pub(crate) fn rename(&self, owner: String) {
        *self.owner.lock() = owner;
    }

    /// Records an operation, which ends when the result is dropped.
    pub(crate) fn begin(&self, operation: Operation) -> InProgress<'_> {
        let owner = self.owner.lock();
        let span = tracing::debug_span!("operation", rank = owner.as_str(), what = %operation);
        drop(owner);
        let named = NamedOperation::begin(&operation);
        let mut entries = self.entries.lock();
        if entries.last.len() == KEPT {
            entries.last.pop_front();
        }
        entries.count += 1;
        entries.last.push_back(Entry { operation, began: Instant::now(), took: None });
        let (number, _span) = (entries.count, span.entered());
        InProgress { recorder: self, number, _named: named, _span }
    }

    /// Prints the operations to the standard error.
    pub(crate) fn print(&self) {
        // The ranks of a job share the standard error, so this is one write. It may be closed.
        let _ = std::io::stderr().write_all(self.to_string().as_bytes());
    }
}

/// One line per operation, oldest first.
impl fmt::Display for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let entries = self.entries.lock();
        let (kept, count) = (entries.last.len(), entries.count);
        writeln!(f, "{}: the last {kept} of {count} operations", self.owner.lock())?;
        let numbers = 1 + count - kept as u64..;
        for (number, Entry { operation, began, took }) in numbers.zip(&entries.last) {
            let ago = began.elapsed();
            write!(f, "  {number:>8}  {ago:>10.3?} ago  {operation}: ")?;
            match took {
                Some(took) => writeln!(f, "returned after {took:.3?}")?,
                None => writeln!(f, "has not returned")?,
            }
        }
        Ok(())
    }
}

/// An operation that has not ended.
pub(crate) struct InProgress<'a> {
    recorder: &'a Recorder,
    number: u64,
    _named: NamedOperation,
    _span: EnteredSpan,
}

impl Drop for InProgress<'_> {
    fn drop(&mut self) {
        let mut entries = self.recorder.entries.lock();
        // Operations may nest, and the oldest may be gone.
        let later = (entries.count - self.number) as usize;
        let at = entries.last.len().checked_sub(later + 1);
        if let Some(entry) = at.and_then(|at| entries.last.get_mut(at)) {
            entry.took = Some(entry.began.elapsed());
        }
    }
}

/// Prints the operations of all ranks of this process.
pub(crate) fn print_all() {
    let recorders: Vec<_> = RECORDERS.lock().iter().filter_map(Weak::upgrade).collect();
    recorders.iter().for_each(|recorder| recorder.print());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_hundred_operations_are_kept_with_what_has_not_returned() {
        let recorder = Recorder::new();
        recorder.rename("rank 3".to_owned());
        let first = recorder.begin(Operation::Nccl("ncclCommFinalize".into()));
        for number in 0..KEPT - 1 {
            recorder.begin(Operation::Exchange(format!("call {number}"), 8));
        }
        let text = recorder.to_string();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "rank 3: the last 100 of 100 operations");
        assert!(
            lines[1].contains(" 1 ") && lines[1].ends_with("ncclCommFinalize: has not returned")
        );
        assert!(lines[100].contains("exchange of 8 ranks for call 98: returned after"), "{text}");

        let config = LaunchConfig::new(8, 256);
        let launch = recorder.begin(Operation::launch("lsa_allreduce", &config));
        // It is not among the last any more.
        drop(first);
        let text = recorder.to_string();
        assert!(text.contains("  2  ") && !text.contains("ncclCommFinalize"), "{text}");
        let last = text.lines().last().unwrap();
        assert!(last.contains(" 101 "), "{text}");
        assert!(
            last.ends_with("launch of lsa_allreduce, 8 blocks of 256 threads: has not returned"),
            "{text}"
        );
        drop(launch);
        assert!(!recorder.to_string().contains("has not returned"));
    }
}
