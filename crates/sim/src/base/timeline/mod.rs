//! The timeline of a run: what ran, waited and sent, when.
//!
//! Its time is counted in rounds of the GPUs: in a round every ready block runs for a turn and the
//! network delivers, or an operation of a stream ends. It shows order and overlap, not a GPU's
//! durations, and is the same for the same settings.

mod chrome;
mod svg;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use crate::base::error::{Error, Result, Site};

/// The maximum number of spans and messages of a timeline; later ones are left out.
const MOST: usize = 1 << 18;

/// A row of a rank, in the order of rows.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Row {
    /// A host thread.
    Host(Rc<str>),
    /// A stream, by the number that [`Timeline::stream`] gives it.
    Stream(usize),
    /// A kernel's block.
    Block(&'static str, u32),
    /// The operations that the rank's kernels send over the network, and those that arrive.
    Network,
}

/// The activity of a row from one time to another.
#[derive(Debug)]
pub(crate) struct Span {
    pub(crate) rank: usize,
    pub(crate) row: Row,
    pub(crate) begin: u64,
    pub(crate) end: u64,
    pub(crate) name: String,
    /// Whether the row only waited.
    pub(crate) waits: bool,
    pub(crate) at: Option<Site>,
}

/// An operation of the network, from the block that posted it to another rank.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) from: (usize, Row),
    pub(crate) posted: u64,
    pub(crate) to: usize,
    pub(crate) arrived: u64,
    pub(crate) name: String,
    pub(crate) at: Site,
}

/// The data that a timeline has recorded.
#[derive(Debug, Default)]
struct Record {
    spans: Vec<Span>,
    messages: Vec<Message>,
    /// The error that ended the kernels, and when.
    failure: Option<(u64, String)>,
    /// Whether something was left out.
    is_cut: bool,
}

/// Records a timeline, if a file for it is given.
#[derive(Debug, Default)]
pub(crate) struct Timeline {
    path: Option<PathBuf>,
    now: Cell<u64>,
    record: RefCell<Record>,
    /// The rank and the handle of each stream with an operation, in the order of their first ones.
    streams: RefCell<Vec<(usize, u64)>>,
}

/// Checks that a timeline can be written to a file, which it creates.
pub(crate) fn check(path: &Path) -> Result<()> {
    let opened = OpenOptions::new().create(true).append(true).open(path);
    opened.map(drop).map_err(|error| {
        Error::Settings(format!("the timeline cannot be written to {}: {error}", path.display()))
    })
}

impl Timeline {
    pub(crate) fn new(path: Option<&Path>) -> Self {
        Self { path: path.map(Path::to_owned), ..Self::default() }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.path.is_some()
    }

    /// Returns the number of the round.
    pub(crate) fn now(&self) -> u64 {
        self.now.get()
    }

    /// Begins the next round.
    pub(crate) fn tick(&self) {
        self.now.set(self.now.get() + 1);
    }

    /// Returns the row of a rank's stream. Streams are numbered in the order of their first
    /// operations. A handle stands for one stream, since handles are never reused.
    pub(crate) fn stream(&self, rank: usize, handle: u64) -> Row {
        let mut streams = self.streams.borrow_mut();
        if !streams.contains(&(rank, handle)) {
            streams.push((rank, handle));
        }
        let mut of_rank = streams.iter().filter(|(other, _)| *other == rank);
        Row::Stream(of_rank.position(|(_, other)| *other == handle).unwrap_or(0))
    }

    /// Records a span that ends now.
    pub(crate) fn span(&self, span: impl FnOnce(u64) -> Span) {
        self.record(|record, now| record.spans.push(span(now)));
    }

    /// Records spans that have ended.
    pub(crate) fn extend(&self, spans: impl IntoIterator<Item = Span>) {
        spans.into_iter().for_each(|span| self.span(|_| span));
    }

    /// Records a message that has arrived now.
    pub(crate) fn message(&self, message: impl FnOnce(u64) -> Message) {
        self.record(|record, now| record.messages.push(message(now)));
    }

    fn record(&self, add: impl FnOnce(&mut Record, u64)) {
        if !self.is_on() {
            return;
        }
        let mut record = self.record.borrow_mut();
        if record.spans.len() + record.messages.len() < MOST {
            add(&mut record, self.now());
        } else {
            record.is_cut = true;
        }
    }

    /// Records the error that ends the kernels.
    pub(crate) fn fail(&self, error: &str) {
        let now = self.now();
        self.record.borrow_mut().failure.get_or_insert_with(|| (now, error.to_owned()));
    }

    /// Writes the timeline so far, with the spans that are still going on: a picture if the file's
    /// name ends in `.svg`, otherwise a Chrome trace.
    pub(crate) fn write(&self, going_on: Vec<Span>) {
        let Some(path) = &self.path else { return };
        let mut record = self.record.borrow_mut();
        let ended = record.spans.len();
        record.spans.extend(going_on);
        let text = match path.extension().is_some_and(|extension| extension == "svg") {
            true => svg::picture(&record),
            false => chrome::trace(&record),
        };
        record.spans.truncate(ended);
        // A rename replaces the file as a whole: the program may be reading what an earlier failure
        // wrote.
        let partial = path.with_added_extension("partial");
        let written = fs::write(&partial, text).and_then(|()| fs::rename(&partial, path));
        if let Err(error) = written {
            tracing::error!("the timeline is not written to {}: {error}", path.display());
        }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(name) => write!(f, "host, {name}"),
            Self::Stream(number) => write!(f, "stream {number}"),
            Self::Block(kernel, index) => write!(f, "{kernel}, block {index}"),
            Self::Network => f.write_str("network"),
        }
    }
}

impl Record {
    /// Returns the rows of the ranks, in order.
    fn rows(&self) -> Vec<(usize, Row)> {
        let spans = self.spans.iter().map(|span| (span.rank, span.row.clone()));
        let arrivals = self.messages.iter().map(|message| (message.to, Row::Network));
        let rows: BTreeSet<_> = spans.chain(arrivals).collect();
        rows.into_iter().collect()
    }

    /// Returns the last time.
    fn end(&self) -> u64 {
        let spans = self.spans.iter().map(|span| span.end);
        let messages = self.messages.iter().map(|message| message.arrived);
        let failure = self.failure.iter().map(|(time, _)| *time);
        spans.chain(messages).chain(failure).max().unwrap_or(0)
    }
}
