//! Rows of measurements, as a table, as CSV and as JSON.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::base::OutputOptions;
use crate::base::output::write;
use crate::harness::header::Header;

/// A column of a table.
pub struct Column<R> {
    name: &'static str,
    unit: &'static str,
    least_width: usize,
    /// Returns a row's value; `None` for a dash.
    value: fn(&R) -> Option<String>,
    /// Whether a table has the column even if no row has a value.
    is_always_shown: bool,
}

impl<R> Column<R> {
    /// Returns a column that every table has.
    pub const fn new(
        name: &'static str,
        unit: &'static str,
        least_width: usize,
        value: fn(&R) -> Option<String>,
    ) -> Self {
        Self { name, unit, least_width, value, is_always_shown: true }
    }

    /// Returns a column that a table has only if a row has a value: what a machine or a benchmark
    /// does not tell is left out.
    pub const fn if_any(
        name: &'static str,
        unit: &'static str,
        least_width: usize,
        value: fn(&R) -> Option<String>,
    ) -> Self {
        Self { is_always_shown: false, ..Self::new(name, unit, least_width, value) }
    }

    /// Returns whether a table of these rows has the column.
    pub fn is_in(&self, rows: &[R]) -> bool {
        self.is_always_shown || rows.iter().any(|row| (self.value)(row).is_some())
    }
}

/// One row of a benchmark.
pub trait Row: Sized + 'static {
    const COLUMNS: &'static [Column<Self>];

    /// How many leading columns are text, left-aligned; numbers are right-aligned.
    const TEXT_COLUMNS: usize = 0;

    /// Returns the values, one per column.
    fn cells(&self) -> Vec<String> {
        let cell = |column: &Column<Self>| (column.value)(self).unwrap_or("-".to_owned());
        Self::COLUMNS.iter().map(cell).collect()
    }
}

/// Returns a number with this many decimals.
pub fn number(value: Option<f64>, decimals: usize) -> Option<String> {
    value.map(|value| format!("{value:.decimals$}"))
}

/// A benchmark's header and rows.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report<R> {
    /// `None` before it is set.
    pub header: Option<Header>,
    /// The rows, in order.
    pub rows: Vec<R>,
    /// Whether the run has ended; `None` in files of earlier versions.
    #[serde(skip_serializing_if = "Option::is_none")]
    is_complete: Option<bool>,
    #[serde(skip)]
    layout: Layout,
}

/// Returns rows as a table.
pub fn lines<R: Row>(rows: &[R]) -> String {
    Layout::default().lines(rows)
}

impl<R: Row + Serialize> Report<R> {
    /// Returns a report without rows.
    pub fn new() -> Self {
        Self { header: None, rows: Vec::new(), is_complete: None, layout: Layout::default() }
    }

    /// Sets the header of a run that has begun: until [`finish`](Self::finish) its rows are the
    /// first ones.
    pub fn begin(&mut self, header: Header) {
        (self.header, self.is_complete) = (Some(header), Some(false));
    }

    /// Marks the rows as all of the run's, and writes the requested files, if any.
    pub fn finish(&mut self, output: Option<&OutputOptions>) -> Result<()> {
        self.is_complete = Some(true);
        output.map_or(Ok(()), |output| self.write(output))
    }

    /// Returns whether these are known to be only the first rows of a run.
    pub fn is_cut_off(&self) -> bool {
        self.is_complete == Some(false)
    }

    /// Refuses a file with only the first rows of a run.
    pub fn require_end(self, path: &Path) -> Result<Self> {
        let name = path.display();
        ensure!(!self.is_cut_off(), "{name} is of a run that did not end: run it again");
        Ok(self)
    }

    /// Reads a file that `--json` wrote.
    pub fn read(path: &Path) -> Result<Self>
    where
        R: DeserializeOwned,
    {
        let name = path.display();
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {name}"))?;
        let report: Self = serde_json::from_str(&text).with_context(|| {
            format!("{name} is not what --json of this version writes for a comparison")
        })?;
        ensure!(report.header.is_some(), "{name} has no header");
        ensure!(!report.rows.is_empty(), "{name} has no rows");
        Ok(report)
    }

    /// Adds rows, and writes the requested files, if any, so that a long run that is interrupted
    /// keeps its rows. Returns the rows' lines in the table.
    pub fn add(
        &mut self,
        rows: impl IntoIterator<Item = R>,
        output: Option<&OutputOptions>,
    ) -> Result<String> {
        let first = self.rows.len();
        self.rows.extend(rows);
        output.map_or(Ok(()), |output| self.write(output))?;
        Ok(self.layout.lines(&self.rows[first..]))
    }

    /// Writes the requested files.
    pub fn write(&self, output: &OutputOptions) -> Result<()> {
        if let Some(path) = &output.csv {
            let mut csv = csv::Writer::from_writer(Vec::new());
            self.rows.iter().try_for_each(|row| csv.serialize(row))?;
            write(path, &String::from_utf8(csv.into_inner()?)?)?;
        }
        if let Some(path) = &output.json {
            write(path, &(serde_json::to_string_pretty(self)? + "\n"))?;
        }
        Ok(())
    }
}

/// The columns of a table whose rows come one after the other.
#[derive(Debug, Default)]
struct Layout {
    /// Which columns are shown: those in which a row had a value so far.
    shown: Vec<bool>,
    widths: Vec<usize>,
}

impl Layout {
    /// Returns the lines of these rows, after a heading if there are columns that were not shown
    /// before.
    fn lines<R: Row>(&mut self, rows: &[R]) -> String {
        let cells: Vec<Vec<String>> = rows.iter().map(Row::cells).collect();
        let was = |i| self.shown.get(i).copied().unwrap_or(false);
        let columns = R::COLUMNS.iter().enumerate();
        let shown: Vec<bool> = columns.map(|(i, column)| was(i) || column.is_in(rows)).collect();
        let mut lines = Vec::new();
        self.widths.resize(shown.len(), 0);
        for (i, (column, width)) in R::COLUMNS.iter().zip(&mut self.widths).enumerate() {
            let heading = column.least_width.max(column.name.len()).max(column.unit.len());
            let longest = cells.iter().map(|row| row[i].len()).max().unwrap_or(0);
            *width = (*width).max(heading).max(longest);
        }
        if shown != self.shown {
            self.shown = shown;
            lines.push(self.line::<R>(R::COLUMNS.iter().map(|column| column.name)));
            lines.push(self.line::<R>(R::COLUMNS.iter().map(|column| column.unit)));
        }
        lines.extend(cells.iter().map(|row| self.line::<R>(row.iter().map(String::as_str))));
        lines.join("\n")
    }

    fn line<'a, R: Row>(&self, cells: impl Iterator<Item = &'a str>) -> String {
        let mut line = String::new();
        for (i, cell) in cells.enumerate().filter(|(i, _)| self.shown[*i]) {
            let width = self.widths[i];
            line += &if i < R::TEXT_COLUMNS {
                format!(" {cell:<width$} ")
            } else {
                format!(" {cell:>width$} ")
            };
        }
        line.truncate(line.trim_end().len());
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Serialize)]
    struct Example {
        kernel: &'static str,
        us: f64,
        wrong: Option<usize>,
    }

    impl Row for Example {
        const COLUMNS: &'static [Column<Self>] = &[
            Column::new("kernel", "", 0, |row| Some(row.kernel.to_owned())),
            Column::new("time", "us", 6, |row| number(Some(row.us), 1)),
            Column::new("#wrong", "", 0, |row| row.wrong.map(|wrong| wrong.to_string())),
        ];
        const TEXT_COLUMNS: usize = 1;
    }

    #[test]
    fn rows_come_out_as_table_csv_and_json() {
        let folder = tempfile::tempdir().unwrap();
        let path = |kind: &str| folder.path().join(kind);
        let output = OutputOptions { csv: Some(path("csv")), json: Some(path("json")) };
        let mut report = Report::new();
        let row = |us, wrong| Example { kernel: "barrier", us, wrong };
        report.rows = vec![row(7.25, Some(0)), row(12.5, None)];
        report.write(&output).unwrap();
        let csv = fs::read_to_string(path("csv")).unwrap();
        assert_eq!(csv, "kernel,us,wrong\nbarrier,7.25,0\nbarrier,12.5,\n");
        let json: serde_json::Value =
            serde_json::from_str(&fs::read_to_string(path("json")).unwrap()).unwrap();
        assert_eq!(json["rows"][1]["us"], 12.5);
        assert!(json["rows"][1]["wrong"].is_null());
        let table = [
            " kernel     time  #wrong",
            "              us",
            " barrier     7.2       0",
            " barrier    12.5       -",
        ];
        assert_eq!(lines(&report.rows), table.join("\n"));
        // The next rows have no heading, unless they have more columns.
        let mut layout = Layout::default();
        assert_eq!(layout.lines(&report.rows[..1]), table[..3].join("\n"));
        assert_eq!(layout.lines(&report.rows[1..]), table[3]);
    }
}
