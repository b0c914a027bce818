//! Rows of measurements, as a table, as CSV and as JSON.

use std::fmt::Display;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use comfy_table::{CellAlignment, ColumnConstraint, Table, presets};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::documents::write;
use crate::header::Header;
use crate::options::OutputOptions;

/// One row of a benchmark.
pub trait Row: Serialize {
    /// The names of the columns and their units.
    const COLUMNS: &'static [(&'static str, &'static str)];

    /// How many leading columns are text, left-aligned; numbers are right-aligned.
    const TEXT_COLUMNS: usize;

    /// The values, one per column.
    fn cells(&self) -> Vec<String>;

    /// Whether a table of these rows has the column.
    fn has_column(_rows: &[Self], _column: &str) -> bool
    where
        Self: Sized,
    {
        true
    }
}

/// A benchmark's header and rows.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report<R> {
    /// `None` before it is set.
    pub header: Option<Header>,
    /// The rows, in order.
    pub rows: Vec<R>,
}

impl<R: Row> Report<R> {
    /// A report without rows.
    pub fn new() -> Self {
        Self { header: None, rows: Vec::new() }
    }

    /// Sets the header.
    pub fn set_header(&mut self, header: Header) {
        self.header = Some(header);
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

    /// The rows as a table.
    pub fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        table.set_header(R::COLUMNS.iter().map(|(name, _)| *name));
        table.add_row(R::COLUMNS.iter().map(|(_, unit)| *unit));
        for row in &self.rows {
            table.add_row(row.cells());
        }
        for column in table.column_iter_mut().skip(R::TEXT_COLUMNS) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        for (column, (name, _)) in table.column_iter_mut().zip(R::COLUMNS) {
            if !R::has_column(&self.rows, name) {
                column.set_constraint(ColumnConstraint::Hidden);
            }
        }
        table
    }

    /// Adds rows, and writes the requested files, if any: what is measured is there if a long run
    /// is ended.
    pub fn add(
        &mut self,
        rows: impl IntoIterator<Item = R>,
        output: Option<&OutputOptions>,
    ) -> Result<()> {
        self.rows.extend(rows);
        output.map_or(Ok(()), |output| self.write(output))
    }

    /// Prints table and summary, and writes the requested files, if there are rows.
    pub fn publish(&self, summary: &impl Display, output: &OutputOptions) -> Result<()> {
        if self.rows.is_empty() {
            return Ok(());
        }
        println!("{}\n\n{summary}", self.table());
        self.write(output)
    }

    /// Writes the requested files.
    pub fn write(&self, output: &OutputOptions) -> Result<()> {
        if let Some(path) = &output.csv {
            self.write_csv(path).with_context(|| format!("cannot write {}", path.display()))?;
        }
        if let Some(path) = &output.json {
            write(path, &(serde_json::to_string_pretty(self)? + "\n"))?;
        }
        Ok(())
    }

    fn write_csv(&self, path: &Path) -> Result<()> {
        let mut csv = csv::Writer::from_path(path)?;
        for row in &self.rows {
            csv.serialize(row)?;
        }
        Ok(csv.flush()?)
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
        const COLUMNS: &'static [(&'static str, &'static str)] =
            &[("kernel", ""), ("time", "us"), ("#wrong", "")];
        const TEXT_COLUMNS: usize = 1;

        fn cells(&self) -> Vec<String> {
            let wrong = self.wrong.map_or("N/A".to_owned(), |wrong| wrong.to_string());
            vec![self.kernel.to_owned(), format!("{:.1}", self.us), wrong]
        }
    }

    #[test]
    fn rows_come_out_as_table_csv_and_json() {
        let folder = std::env::temp_dir();
        let path =
            |kind: &str| folder.join(format!("devcomm-bench-table-{}.{kind}", std::process::id()));
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
        let table = report.table().to_string();
        assert!(table.lines().count() == 4 && table.contains("us"), "{table}");
        for kind in ["csv", "json"] {
            fs::remove_file(path(kind)).unwrap();
        }
    }
}
