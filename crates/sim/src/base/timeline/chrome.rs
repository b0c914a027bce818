//! Writes a timeline as a Chrome trace, which Perfetto and `chrome://tracing` open. Its processes
//! are ranks, its threads are rows, and its microseconds are rounds.

use std::fmt::{self, Write};

use super::{Record, Row};
use crate::base::error::Site;

/// Text as a JSON string.
struct Json<'a>(&'a str);

impl fmt::Display for Json<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char('"')?;
        for char in self.0.chars() {
            match char {
                '"' | '\\' => write!(f, "\\{char}")?,
                ..' ' => write!(f, "\\u{:04x}", char as u32)?,
                _ => f.write_char(char)?,
            }
        }
        f.write_char('"')
    }
}

/// A name and a value in JSON.
type Field<'a> = (&'a str, &'a dyn fmt::Display);

/// Returns a JSON object.
fn object(fields: &[Field<'_>]) -> String {
    let fields = fields.iter().map(|(name, value)| format!("\"{name}\":{value}"));
    format!("{{{}}}", fields.collect::<Vec<_>>().join(","))
}

/// Returns an event's arguments: its location in the source.
fn arguments(at: Option<Site>) -> String {
    at.map_or("{}".to_owned(), |at| object(&[("at", &Json(&at.to_string()))]))
}

/// Returns the trace as JSON.
pub(super) fn trace(record: &Record) -> String {
    let rows = record.rows();
    // A row that is not found is one whose spans were left out; what refers to it goes to row 0.
    let number = |rank: usize, row: &Row| {
        rows.binary_search_by(|(other, name)| (other, name).cmp(&(&rank, row))).unwrap_or(0)
    };
    let mut events = Vec::new();
    // The format's kinds of events: M names a row, X is a span, s and f are the start and the end
    // of an arrow, and i is an instant.
    let mut event = |kind, fields: &[Field<'_>]| {
        let kind: &dyn fmt::Display = &Json(kind);
        events.push(object(&[&[("ph", kind)], fields].concat()));
    };
    let mut named = None;
    for (index, (rank, row)) in rows.iter().enumerate() {
        let mut name = |what, name: &str| {
            let (what, name) = (Json(what), object(&[("name", &Json(name))]));
            event("M", &[("pid", rank), ("tid", &index), ("name", &what), ("args", &name)]);
        };
        if named.replace(*rank) != Some(*rank) {
            name("process_name", &format!("rank {rank}"));
        }
        name("thread_name", &row.to_string());
    }
    for span in &record.spans {
        let (tid, length) = (number(span.rank, &span.row), span.end - span.begin);
        let category = Json(if span.waits { "wait" } else { "run" });
        let place: [Field<'_>; 4] =
            [("pid", &span.rank), ("tid", &tid), ("ts", &span.begin), ("dur", &length)];
        let (name, at) = (Json(&span.name), arguments(span.at));
        let what: [Field<'_>; 3] = [("name", &name), ("cat", &category), ("args", &at)];
        event("X", &[&place[..], &what[..]].concat());
    }
    for (id, message) in record.messages.iter().enumerate() {
        let ((rank, row), to) = (&message.from, message.to);
        let (from, target) = (number(*rank, row), number(to, &Row::Network));
        let (posted, arrived) = (message.posted, message.arrived);
        let (name, network) = (Json(&message.name), Json("network"));
        let at = arguments(Some(message.at));
        let what: [Field<'_>; 2] = [("name", &name), ("cat", &network)];
        let start: [Field<'_>; 3] = [("pid", rank), ("tid", &from), ("ts", &posted)];
        let end: [Field<'_>; 3] = [("pid", &to), ("tid", &target), ("ts", &arrived)];
        let flow: [Field<'_>; 2] = [("id", &id), ("bp", &Json("e"))];
        let slice: [Field<'_>; 2] = [("dur", &1), ("args", &at)];
        event("X", &[&end[..], &what[..], &slice[..]].concat());
        event("s", &[&start[..], &what[..], &flow[..1]].concat());
        event("f", &[&end[..], &what[..], &flow[..]].concat());
    }
    if let Some((time, error)) = &record.failure {
        let (name, global) = (Json(error), Json("g"));
        event("i", &[("pid", &0), ("tid", &0), ("ts", time), ("name", &name), ("s", &global)]);
    }
    let mut fields = vec![("traceEvents", format!("[\n{}\n]", events.join(",\n")))];
    if record.is_cut {
        fields.push(("note", Json("the end of the run is left out").to_string()));
    }
    let fields: Vec<Field<'_>> =
        fields.iter().map(|(name, value)| (*name, value as &dyn fmt::Display)).collect();
    object(&fields) + "\n"
}
