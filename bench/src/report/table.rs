//! A table in Markdown.

use std::fmt;

/// A cell without a value.
pub const NONE: &str = "-";

/// Columns: a heading, and a cell for each row.
#[derive(Default)]
pub struct Table(Vec<(String, Vec<String>)>);

impl Table {
    /// Adds a column, unless no row has a value.
    pub fn column(&mut self, heading: impl Into<String>, cells: Vec<String>) {
        if cells.iter().any(|cell| cell != NONE) {
            self.0.push((heading.into(), cells));
        }
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = |cells: Vec<&str>| writeln!(f, "| {} |", cells.join(" | "));
        line(self.0.iter().map(|(heading, _)| heading.as_str()).collect())?;
        line(self.0.iter().map(|_| "---").collect())?;
        let rows = self.0.first().map_or(0, |(_, cells)| cells.len());
        (0..rows).try_for_each(|row| line(self.0.iter().map(|(_, c)| c[row].as_str()).collect()))
    }
}

/// A number, or [`NONE`].
pub fn number(value: Option<f64>, digits: usize) -> String {
    value.map_or(NONE.to_owned(), |value| format!("{value:.digits$}"))
}
